"""Prepares data in children that get killed; a program of its own, since a killed child must share nothing with a
process that goes on: a fork of pytest would share tqdm's lock, and whoever is killed holding it stops pytest for good.

Each line of input is [settings file, how], where how is one of
["rename", count, late]   killed at rename number `count`, before it or after it
["seconds", x]            ended by the kernel after x seconds
["tokenizer"]             killed when it begins to train the tokenizer
Each line of output is the child's exit code.
"""

import json
import os
import signal
import sys

import datasets.packaged_modules  # noqa: F401 - before the forks, so that no child has to
import pandas  # noqa: F401
from tqdm.std import TqdmDefaultWriteLock

from triadic.data import DataConfig, prepare, tokenizer
from triadic.settings import load


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(how: str, *arguments) -> None:
    """Let this process be killed in the way asked for."""
    if how == "seconds":
        signal.setitimer(signal.ITIMER_REAL, *arguments)  # SIGALRM's default is the end
    elif how == "tokenizer":
        tokenizer.train = die
    else:
        count, late = arguments
        rename, calls = os.replace, iter(range(count))

        def replace(*names):
            last = next(calls, None) is None
            if last and not late:
                die()
            rename(*names)
            if last:
                die()

        os.replace = replace


assert not hasattr(TqdmDefaultWriteLock, "mp_lock"), "the children would share it"
for line in sys.stdin:
    settings, how = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            arm(*how)
            prepare(load(DataConfig, settings, []))
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
