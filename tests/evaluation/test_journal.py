"""Steps of an evaluation on disk: what damages them, or stands in their place, is named."""

import pytest

from triadic.evaluation.journal import Journal


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff"])
def test_damaged_steps_and_claims_are_named(tmp_path, content):
    Journal(tmp_path, {}).once("a", lambda: 1)
    (tmp_path / "steps" / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"steps/a\.json is damaged; remove it"):
        Journal(tmp_path, {}).once("a", lambda: 1)
    (tmp_path / "evaluation.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"evaluation\.json is damaged; choose another --output, or .* --overwrite"):
        Journal(tmp_path, {})
    assert Journal(tmp_path, {}, overwrite=True).once("a", lambda: 2) == 2


def test_what_stands_in_an_evaluations_place_is_named(tmp_path):
    (tmp_path / "evaluation.json").write_text("[]")
    with pytest.raises(ValueError, match=r"evaluation\.json is no evaluation's; choose another --output, or"):
        Journal(tmp_path, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "steps").touch()
    with pytest.raises(ValueError, match=r"steps/a\.json cannot be written: (Not a directory|File exists)"):
        Journal(tmp_path / "other", {}).once("a", lambda: 1)
