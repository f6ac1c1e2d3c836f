"""An I/O engine that fails chosen calls the way a kernel does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvtiers.data.io.base import IoBatch, IoDone, IoEngine, IoOp


class FaultyIo:
    """Passes operations on to another engine, except for those that are to fail.

    Operations are counted from 1 for each direction, in the order of their submission.
    """

    def __init__(self, inner: IoEngine) -> None:
        self.inner = inner
        self.num_ops = {True: 0, False: 0}
        self.seen: list[tuple[bool, IoOp]] = []
        self.hold = False  # whether finished batches stay out of sight
        self._faults: list[tuple[bool, Callable[[int], bool], int]] = []
        self._forged: dict[int, dict[int, int]] = {}
        self._held: list[IoDone] = []

    @property
    def name(self) -> str:
        """That of the engine behind."""
        return self.inner.name

    def fail(self, *, writes: bool, result: int, on: Callable[[int], bool] | int) -> None:
        """Let operations of a direction fail: one number, or those that a function picks.

        Args:
            result: what they answer, a negative errno or the bytes of a short count.
        """
        picked: Callable[[int], bool] = (lambda number: number == on) if isinstance(on, int) else on
        self._faults.append((writes, picked, result))

    def heal(self) -> None:
        """Fail no more."""
        self._faults.clear()

    def submit(self, batch: IoBatch) -> None:
        """Pass on what is not to fail."""
        forged: dict[int, int] = {}
        ops: list[IoOp] = []
        for idx, op in enumerate(batch.ops):
            self.num_ops[batch.writes] += 1
            self.seen.append((batch.writes, op))
            result = self._result(batch.writes)
            if result is None:
                ops.append(op)
            else:
                forged[idx] = result
        self._forged[batch.batch_id] = forged
        self.inner.submit(replace(batch, ops=tuple(ops)))

    def poll(self) -> list[IoDone]:
        """Return what has ended, failures among it."""
        self._held += [self._whole(done) for done in self.inner.poll()]
        if self.hold:
            return []
        ended, self._held = self._held, []
        return ended

    def close(self) -> None:
        """Pass on."""
        self.inner.close()

    def _result(self, writes: bool) -> int | None:
        number = self.num_ops[writes]
        for direction, picked, result in self._faults:
            if direction is writes and picked(number):
                return result
        return None

    def _whole(self, done: IoDone) -> IoDone:
        forged = self._forged.pop(done.batch_id)
        honest = iter(done.results)
        total = len(forged) + len(done.results)
        results = tuple(forged[i] if i in forged else next(honest) for i in range(total))
        return IoDone(done.batch_id, results)
