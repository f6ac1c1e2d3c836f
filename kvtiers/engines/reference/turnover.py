"""How the blocks of the pool change hands, by which it is judged what a victim loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from kvtiers.engines.reference.block_pool import BlockPool

_NUM_LATE: Final = 16  # events of late, by which the next one is judged


@dataclass(slots=True, eq=False)
class _Absence:
    """A victim's, in blocks that the pool had handed out when it lost its own, and until it was
    back; None: it still is away."""

    since: int
    until: int | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """Of requests, before a step.

    Attributes:
        num_freed: their blocks. num_reached: how many blocks the step took beyond those that were
            free before; negative where it left some of those.
    """

    num_freed: int
    num_reached: int


class Turnover:
    """Remembers the last victims, and the last ends of requests.

    The pool hands out the blocks that were freed first, and of one request the last ones first.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._absences: deque[_Absence] = deque(maxlen=_NUM_LATE)
        self._away: dict[str, _Absence] = {}
        self._ends: deque[_End] = deque(maxlen=_NUM_LATE)
        self._num_free = pool.num_free  # after the last step was scheduled

    # -- events -----------------------------------------------------------------------

    def gave_way(self, request_id: str) -> None:
        """Note that a victim is going to lose its blocks."""
        absence = self._away[request_id] = _Absence(self._pool.num_taken)
        self._absences.append(absence)

    def returns(self, request_id: str) -> None:
        """Note that a request is going to be given blocks, whether or not it ever gave way."""
        absence = self._away.pop(request_id, None)
        if absence is not None:
            absence.until = self._pool.num_taken

    def forget(self, request_id: str) -> None:
        """Note that a request will not return, if it is away."""
        absence = self._away.pop(request_id, None)
        if absence is not None and absence in self._absences:
            self._absences.remove(absence)

    def scheduled(self, num_free: int, num_taken: int) -> None:
        """Note that a step has been scheduled.

        Args:
            num_free, num_taken: of the pool before.
        """
        num_freed = num_free - self._num_free
        if num_freed > 0:
            num_new = self._pool.num_taken - num_taken
            self._ends.append(_End(num_freed, num_new - self._num_free))
        self._num_free = self._pool.num_free

    # -- questions --------------------------------------------------------------------

    def kept_blocks(self, num_blocks: int) -> Sequence[int]:
        """Return what a victim of so many blocks would find in HBM, were it away like each of the
        last ones; of those that are not back only who is away for longer than all others counts,
        and finds nothing."""
        late, free = self._absences, self._pool.num_free
        taken = [it.until - it.since for it in late if it.until is not None]
        most, now = max(taken, default=0), self._pool.num_taken
        num_longer = sum(it.until is None and now - it.since > most for it in late)
        return [max(0, num_blocks - max(0, num - free)) for num in taken] + [0] * num_longer

    def awaited_blocks(self, num_blocks: int) -> float:
        """Return how many blocks of so many the step after the end of their request takes, in the
        mean; a request that frees more fills those until then, and they are taken first."""
        reached = [it.num_reached - max(0, it.num_freed - num_blocks) for it in self._ends]
        return fmean(max(0, min(num, num_blocks)) for num in reached) if reached else 0.0

    @property
    def crowded(self) -> float:
        """Share of ends before which so little was free that the next step took all of it."""
        return fmean(it.num_reached >= 0 for it in self._ends) if self._ends else 0.0
