"""How a program that a launcher has started several times over ends."""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C ended


@contextlib.contextmanager
def leaving_group() -> Iterator[None]:
    """Around all that a program does: leave the process group at its end, whose threads must not outlive Python's.

    Leaving waits for what this process has sent, and with NCCL for the other processes. Where this one fails, they may
    stand in a collective that it never enters. So it then says what Python would say and ends at once: its launcher
    ends the others.
    """
    try:
        yield
    except BaseException as error:
        if not _grouped():
            raise
        code = 1
        try:  # the streams may be closed already
            code = _told(error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    if _grouped():
        torch.distributed.destroy_process_group()


def end(code: int = 0) -> NoReturn:
    """End a program whose work is done, outside `leaving_group`. One of several processes is gone after Python's own
    threads and exit hooks: what C++ still takes down behind them ends a finished run by SIGABRT now and then
    ("terminate called without an active exception", gloo).
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _told(error: BaseException) -> int:
    """Print what Python prints of an error that nothing catches; the exit code it ends with."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)  # torch's, which names the rank
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
