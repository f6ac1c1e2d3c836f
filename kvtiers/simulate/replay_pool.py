"""Plays jobs on a trace, several at a time in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Protocol

from kvtiers.model.errors import KVTiersError
from kvtiers.simulate.replay import Progress
from kvtiers.simulate.share import Shares
from kvtiers.simulate.trace import Trace

_TELL_SECONDS: Final = 0.1  # between two words on the progress of a job in another process
_LONGEST_WAIT_SECONDS: Final = 1.0
_SIGNAL_SECONDS: Final = 0.5  # in which who ends all processes of a group has ended this one, too

Told = Callable[[str], Progress]
"""Makes what follows the progress of one job, given what it is; told (0, 0) if it is given up."""


class Job(Hashable, Protocol):
    """Something to play: a value that equals another one if the same comes of both.

    It is pickled for a process, as is what comes of it.
    """

    @property
    def what(self) -> str:
        """In words."""
        ...

    @property
    def kind(self) -> Hashable:
        """Jobs of one kind take about equally long."""
        ...

    def run(self, shares: Shares, progress: Progress) -> Any:
        """Return what comes of it; raises KeyboardInterrupt where it was ended early."""
        ...


class WorkerError(KVTiersError):
    """A process that played a job has died, or met with what nobody foresaw."""


class ReplayPool:
    """Plays jobs, each once: what came of it is remembered.

    With one job at a time all happens in this process. What is chosen to play may depend on what
    came of earlier jobs, never on which of them ended first: then the answer is the same for any
    number of processes. So what was only likely to be wanted ends nothing if it fails: it is
    played again once it is wanted.

    Args:
        shares: given to every job. num_jobs: at a time.
        deadline: of `time.monotonic`: no job that would not end by then begins, but the first.

    Attributes:
        num_jobs: at a time. spent: job that is done to the seconds that it took.
    """

    def __init__(self, shares: Shares, num_jobs: int, deadline: float, told: Told) -> None:
        self._shares = shares
        self.num_jobs = num_jobs
        self.spent: dict[Job, float] = {}
        self._deadline = deadline
        self._told = told
        self._done: dict[Job, Any] = {}
        self._longest: dict[Hashable, float] = {}  # seconds, by kind
        self._failed: set[Job] = set()  # while nobody wanted them
        self._workers: list[_Worker] = []
        self._any_began = False

    def result(self, wanted: Job, likely: Sequence[Job] = ()) -> Any:
        """Return what comes of a job; None: there is no time left. See `first`."""
        done = self.first([wanted], likely)
        return None if done is None else self._done[done]

    def first(self, wanted: Sequence[Job], likely: Sequence[Job] = ()) -> Job | None:
        """Play until one of the jobs is done, and return it; None: there is no time left.

        Args:
            likely: what will be wanted next, the most likely first; played on idle cores only.

        Raises:
            WorkerError: a process died. Whatever a job that is wanted raises.
        """
        while True:
            for job in wanted:
                if job in self._done:
                    return job
            if self.num_jobs == 1:
                if not self._may_begin(wanted[0]):
                    return None
                self._play_here(wanted[0])
                continue
            if not self._begin_what_fits(wanted, likely):
                return None
            self._listen(wanted)

    def __getitem__(self, job: Job) -> Any:
        """Return what came of a job that is done."""
        return self._done[job]

    def close(self) -> None:
        """End all processes, whatever they are at."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    # -- internals --------------------------------------------------------------------

    def _may_begin(self, job: Job) -> bool:
        """Whether there is time for a job; the first one may always."""
        left = self._deadline - time.monotonic()
        may = not self._any_began or left > self._longest.get(job.kind, 0.0)
        self._any_began |= may
        return may

    def _play_here(self, job: Job) -> None:
        started = time.monotonic()
        self._done[job] = job.run(self._shares, self._told(job.what))
        self._note(job, time.monotonic() - started)

    def _note(self, job: Job, seconds: float) -> None:
        self.spent[job] = seconds
        self._longest[job.kind] = max(self._longest.get(job.kind, 0.0), seconds)

    def _begin_what_fits(self, wanted: Sequence[Job], likely: Sequence[Job]) -> bool:
        """Begin as many as there are processes; returns whether one that is wanted runs, or will
        as soon as another one ends."""
        jobs = dict.fromkeys([*wanted, *(it for it in likely if it not in self._failed)])
        comes = False
        for job in jobs:
            runs = any(worker.job == job for worker in self._workers)
            if job in self._done or (not runs and not self._may_begin(job)):
                continue
            comes |= job in wanted
            if not runs:
                worker = self._free_worker(jobs)
                if worker is None:
                    break
                worker.begin(job, self._told(job.what))
        return comes

    def _free_worker(self, jobs: Container[Job]) -> _Worker | None:
        """Return a process without a job; None: all are at one of these.

        What is of no use any more is given up for one that is.
        """
        for worker in self._workers:
            if worker.job is None:
                return worker
        useless = next((worker for worker in self._workers if worker.job not in jobs), None)
        if useless is not None:
            self._workers.remove(useless)
            useless.end()
        elif len(self._workers) == self.num_jobs:
            return None
        self._workers.append(_Worker(self._shares))
        return self._workers[-1]

    def _listen(self, wanted: Container[Job]) -> None:
        """Take in what the processes have to say."""
        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        for connection in wait(list(busy), _LONGEST_WAIT_SECONDS):
            worker = busy[connection]  # type: ignore[index]
            job = worker.job
            assert job is not None, "it is busy"
            try:
                word, value = worker.heard()
            except WorkerError as error:
                self._workers.remove(worker)
                worker.end()
                word, value = "raised", error
            if word == "progress":
                worker.told(*value)
                continue
            seconds, worker.job = time.monotonic() - worker.began, None
            if word == "done":
                self._done[job] = value
                self._note(job, seconds)
            elif job in wanted:
                raise value
            else:
                worker.told(0, 0)
                self._failed.add(job)


class _Worker:
    """One process, as seen from here.

    Attributes:
        job: what it is at. began: when, of `time.monotonic`.
    """

    def __init__(self, shares: Shares) -> None:
        # Not forked: a copy of a process with threads may hang on a lock.
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, shares.trace, shares.longest), daemon=True
        )
        resource_tracker.ensure_running()  # it would unblock the signal below
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()  # it inherits the mask: Ctrl-C is for the one who asks
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()
        self.job: Job | None = None
        self.began = 0.0
        self.told: Progress = _untold

    def begin(self, job: Job, told: Progress) -> None:
        """Let it play a job."""
        self.job, self.began, self.told = job, time.monotonic(), told
        with suppress(OSError):  # it has died, as whoever listens will find
            self.connection.send(job)

    def heard(self) -> tuple[str, Any]:
        """Return what it says."""
        try:
            word, value = self.connection.recv()
        except (EOFError, OSError):
            self._died()
        return word, value

    def end(self) -> None:
        """End it, and give up what it is at."""
        if self.job is not None:
            self.told(0, 0)
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _died(self) -> None:
        self._process.join(_LONGEST_WAIT_SECONDS)
        time.sleep(_SIGNAL_SECONDS)
        what = "" if self.job is None else f" while it played: {self.job.what}"
        code = self._process.exitcode
        why = "it may have said why on standard error; --jobs 1 plays all in one process"
        if code is None or code < 0:
            why = "was it out of memory? --jobs 1 needs the least"
        raise WorkerError(f"a process died (exit code {code}){what}; {why}")


def _untold(_ended: int, _num: int) -> None:
    """Follow no progress."""


def _serve(connection: Connection, trace: Trace, longest: int | None) -> None:
    """Play jobs in a process, until nobody listens any more."""
    shares, last = Shares(trace, longest), 0.0

    def progress(ended: int, num: int) -> None:
        nonlocal last
        if ended == num or time.monotonic() - last >= _TELL_SECONDS:
            last = time.monotonic()
            connection.send(("progress", (ended, num)))

    try:
        while True:
            job = connection.recv()
            try:
                said = ("done", job.run(shares, progress))
            except KVTiersError as error:
                said = ("raised", error)
            except Exception as error:  # thread top: who asked must know  # noqa: BLE001
                text = f"{job.what}: {type(error).__name__}: {error}"
                said = ("raised", WorkerError(f"a process failed at {text}"))
            connection.send(said)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # who asked is gone: there is nobody to tell
