"""triadic.launch: one process speaks for all of them, and none stays silent."""

import time

import pytest

from triadic import launch


@pytest.mark.parametrize(
    ("environment", "waits"),
    [({}, []), ({"LOCAL_RANK": "0", "RANK": "8"}, []), ({"LOCAL_RANK": "3", "RANK": "3"}, [launch.PATIENCE])],
)
def test_a_refusal_is_one_line_and_exit_code_1(monkeypatch, environment, waits):
    """The others wait, for the launcher to end them, and only then say what the first one has not said."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"^error: too short$"):  # sys.exit prints a message and exits with 1
        launch.refuse(ValueError("too short"))
    assert slept == waits
    assert launch.is_main() == (environment.get("RANK", "0") == "0")
