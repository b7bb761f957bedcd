"""What runs beside the training: the writing of a checkpoint, and the watch over ranks that stand still."""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from accelerate import Accelerator

from triadic.training import parallel

PHASES = ("reading data", "computing", "validating", "saving")  # of one step, in this order


class Writer:
    """Runs one job at a time in a thread of rank 0, while all ranks train on."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future | None = None

    def start(self, job: Callable[[], Any]) -> None:
        """Begin `job` on rank 0; the one before must have been waited for."""
        if self._accelerator.is_main_process:
            self._job = self._pool.submit(job)

    def finished(self) -> Any:
        """What the job has returned, once; None before and on other ranks, and if it failed."""
        if self._job is None or not self._job.done() or self._job.exception() is not None:
            return None
        result, self._job = self._job.result(), None
        return result

    @property
    def failed(self) -> bool:
        """Whether the job has ended with an error, which `wait` raises. False on other ranks."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    def wait(self) -> Any:
        """The job's result, or None if there is none; its exception on every rank (all must call)."""

        def result() -> Any:
            job, self._job = self._job, None
            return None if job is None else job.result()

        return parallel.on_main(self._accelerator, result)

    def close(self) -> None:
        """Let a job that is running come to its end, whatever that is."""
        self._pool.shutdown(wait=True)


class Watch:
    """While entered, a thread of each rank ends the run with one sentence if no rank gets on for `seconds`.

    Ranks wait for each other in every step, so one that stands still stops all. Each posts where it stands; those
    furthest behind, or silent, are named. Alone, a process is not watched.
    """

    def __init__(self, accelerator: Accelerator, seconds: float):
        self.rank, self.ranks, self.seconds = accelerator.process_index, accelerator.num_processes, seconds
        self._every = min(10.0, seconds / 5)
        self._at = (0, 0, time.time())  # step, phase, since when
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        if self.ranks > 1:
            self._store = torch.distributed.distributed_c10d._get_default_store()
            self._post()
            threading.Thread(target=self._watch, daemon=True, name="watch").start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase`, one of PHASES, of the step after `step`."""
        self._at = (step, PHASES.index(phase), time.time())

    def _post(self) -> None:
        step, phase, _ = self._at
        self._store.set(f"triadic/rank/{self.rank}", f"{step} {phase} {time.time()}")

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self._post()
            if time.time() - self._at[2] > self.seconds:
                posts = [self._store.get(f"triadic/rank/{rank}").decode().split() for rank in range(self.ranks)]
                self._end([(int(step), int(phase), float(posted)) for step, phase, posted in posts])

    def _end(self, posts: list[tuple[int, int, float]]) -> None:
        told, silent = stalled(posts, time.time() - 3 * self._every)
        speaker = min((rank for rank in range(self.ranks) if rank not in silent), default=self.rank)
        if self.rank != speaker:
            time.sleep(5)  # the launcher ends the others when one has exited
        print(
            f"error: no rank got on for {self.seconds:g} seconds, waiting for {told}; checkpoints are untouched and "
            "the same command resumes from the newest (parallel.stall_seconds sets the patience)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # the main thread stands in a collective and can be told nothing


def stalled(posts: list[tuple[int, int, float]], alive_since: float) -> tuple[str, set[int]]:
    """Who keeps the others waiting, in words, and which ranks have not posted since `alive_since`.

    `posts` has for each rank the step and phase where it stands and when it said so. Silent ranks are named first, else
    those furthest behind, of which all but some may be waiting too.
    """
    silent = {rank for rank, (_, _, posted) in enumerate(posts) if posted < alive_since}
    last = min(post[:2] for post in posts)
    culprits = sorted(silent or {rank for rank, post in enumerate(posts) if post[:2] == last})
    named = [f"{rank} ({PHASES[posts[rank][1]]} of step {posts[rank][0] + 1})" for rank in culprits[:8]]
    more = f" and {len(culprits) - 8} more" if len(culprits) > 8 else ""
    kind = "silent rank" if silent else "rank"
    return f"{kind}{'s' if len(culprits) > 1 else ''} {', '.join(named)}{more}", silent
