"""A thread that advances an executor, and the waits of the worker's own thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from kvtiers.data.copier import Marker
from kvtiers.data.executor import Executor
from kvtiers.model.messages import Completion, Forget, JobId, Link, Transfer

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.05  # how long a sleeping thread may miss a deadline of a waiting run
_BUSY_SECONDS = 0.0002  # first pause between polls of a store or stream that has not answered
_MAX_BUSY_SECONDS = 0.002  # the pauses double up to here


class ExecutorThread:
    """Owns an executor and the one thread that advances it.

    All methods are called from the worker's thread.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._wake = threading.Condition()
        self._work = False
        self._pause = _BUSY_SECONDS
        self._closing = False
        self._stopped = False
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._run, name="kvtiers-executor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, transfer: Transfer, marker: Marker | None) -> None:
        """Queue an order; see `Executor.submit`."""
        self._executor.submit(transfer, marker)
        self._ring()

    def forget(self, forget: Forget) -> None:
        """Queue the deletion of keys from a store; see `Executor.forget`."""
        self._executor.forget(forget)
        self._ring()

    def enter(self, epoch: int, generation: int) -> None:
        """Begin a new epoch or generation; see `Executor.enter`."""
        self._executor.enter(epoch, generation)
        self._ring()

    def poll(self) -> list[Completion]:
        """Return the answers since the last call, never waiting."""
        return self._executor.poll()

    def take_links(self) -> tuple[Link, ...]:
        """Return what each link did since the last call."""
        with self._wake:
            links, self._links = self._links, []
        return tuple(links)

    def wait_read(self, fences: Mapping[JobId, Iterable[int]], seconds: float) -> bool:
        """Wait until offloads have read some engine blocks, so that these may be overwritten.

        After `seconds`, what these offloads have not begun is dropped, and only copies that run
        are waited for.

        Returns:
            whether everything was read; False when something had to be dropped.
        """
        fence = self._executor.fence(fences)
        self._ring()
        if self._wait(lambda: not fence.jobs, seconds):
            return True
        self._executor.give_up(fence.jobs)
        self._ring()
        self._wait(lambda: not fence.jobs, None)
        return False

    def wait_loaded(self, job_ids: Iterable[JobId], seconds: float | None) -> bool:
        """Wait until reloads are settled, up to `seconds`; their own deadlines end them too."""
        wanted = set(job_ids)
        return self._wait(lambda: not self._executor.unloaded(wanted), seconds)

    def need(self, job_ids: Iterable[JobId]) -> None:
        """Hurry reloads that a forward pass waits for; see `Executor.need`."""
        self._executor.need(job_ids)
        self._ring()

    def hold_engine(self, job_ids: Iterable[JobId], group: int) -> bool:
        """Let what the engine does from now on come after needed reloads, up to one KV group.

        Where its device can wait for their copies, this returns as soon as they are queued; else
        once they are over. How they ended is answered later.

        Returns:
            False when the thread has stopped, and they never come.
        """
        wanted = set(job_ids)
        held: list[bool] = []

        def ordered() -> bool:
            answer = None if held else self._executor.hold_engine(wanted, group)
            held.extend([] if answer is None else [answer])
            return bool(held)

        if not self._wait(ordered, None):
            return False
        return held[0] or self._wait(lambda: not self._executor.lacks(wanted, group), None)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is queued or running, up to `seconds`."""
        return self._wait(lambda: self._executor.idle, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Stop the thread and release everything; idempotent. Queued work comes back FAILED."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.error("executor thread did not stop within %g s; memory is left to it", seconds)
            return
        self._executor.close()

    # -- internals --------------------------------------------------------------------

    def _ring(self) -> None:
        with self._wake:
            self._work = True
            self._wake.notify_all()

    def _wait(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait for something that the thread brings about; without the thread, it never comes."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopped or done(), seconds)
            return done()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:  # whatever ended it, nobody waits for a thread that is gone
            with self._wake:
                self._stopped = True
                self._wake.notify_all()

    def _turn(self) -> None:
        try:
            worked = self._executor.advance()
        except Exception:  # thread top: the engine must not lose its cache thread
            logger.exception("executor failed; what it was doing is answered FAILED")
            self._fail_all()
            return
        self._after(worked)

    def _fail_all(self) -> None:
        try:
            self._executor.fail_all()
        except Exception:  # thread top: tried again after the next failure
            logger.exception("executor failed while failing")
        with self._wake:
            self._wake.notify_all()
            if not self._closing:
                self._wake.wait(_IDLE_SECONDS)  # what fails at every turn must not fill a core

    def _after(self, worked: bool) -> None:
        """Tell waiters what happened; sleep while there is nothing to do."""
        with self._wake:
            self._links.extend(self._executor.take_links())
            if worked:
                self._pause = _BUSY_SECONDS
                self._wake.notify_all()
                return
            if not self._work and not self._closing:
                idle = self._executor.idle
                self._wake.wait(_IDLE_SECONDS if idle else self._pause)
                limit = _BUSY_SECONDS if self._executor.hurried else _MAX_BUSY_SECONDS
                self._pause = min(2 * self._pause, limit)
            if self._work:
                self._work = False
                self._pause = _BUSY_SECONDS
