"""What a script says when a launcher has started it several times over."""

import os
import sys
import time
from typing import NoReturn

PATIENCE = 10.0  # seconds


def is_main() -> bool:
    """Whether this is the first of all processes, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def refuse(error: Exception) -> NoReturn:
    """Exit with code 1 and one line on stderr, said once for all processes of a machine.

    They refuse bad input in the same words, and a launcher ends the others when one has exited. So all but the first
    wait for that; one that is still there after PATIENCE seconds has found what the first did not, and speaks itself.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE)
    sys.exit(f"error: {error}")
