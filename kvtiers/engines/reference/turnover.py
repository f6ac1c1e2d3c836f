"""How fast the pool's blocks are handed out, from which follows what a victim loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtiers.engines.reference.block_pool import BlockPool

_NUM_LATE: Final = 16  # the last absences, by which the next one is judged


@dataclass(slots=True, eq=False)
class _Absence:
    """The time that a victim was away, on a clock that counts blocks handed out by the pool.

    Attributes:
        since: when it was preempted. until: when it was admitted again; None: it is still away.
        num_joined: tokens beside decodes that the step of its return computed for others.
    """

    since: int
    until: int | None = None
    num_joined: int = 0


@dataclass(frozen=True, slots=True)
class Guess:
    """What a victim may meet when it returns.

    Attributes:
        num_kept: its blocks that it finds in HBM. num_joined: see `Surroundings.joined_tokens`.
    """

    num_kept: int
    num_joined: int


class Turnover:
    """Remembers the last absences of victims, and which share of the blocks admissions took.

    The pool hands out the blocks that were freed first, and of one request the last ones first.
    So what a victim finds in HBM follows from how many were handed out while it was away.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._absences: deque[_Absence] = deque(maxlen=_NUM_LATE)
        self._away: dict[str, _Absence] = {}
        self._back: dict[str, _Absence] = {}  # since the last step
        # Blocks handed out when the last admission ended; and decaying sums of the blocks handed
        # out to admissions, and to all.
        self._num_taken = pool.num_taken
        self._num_admitted = 0.0
        self._num_all = 0.0

    # -- events -----------------------------------------------------------------------

    def gave_way(self, request_id: str) -> None:
        """Note that a victim is going to lose its blocks."""
        absence = self._away[request_id] = _Absence(self._pool.num_taken)
        self._absences.append(absence)

    def returns(self, request_id: str) -> None:
        """Note that a request is about to be admitted, whether or not it was ever preempted."""
        absence = self._away.pop(request_id, None)
        if absence is not None:
            absence.until = self._pool.num_taken
            self._back[request_id] = absence

    def stepped(self, chunks: Mapping[str, int]) -> None:
        """Note what a step is going to compute beside decodes, by request."""
        total = sum(chunks.values())
        for request_id, absence in self._back.items():
            absence.num_joined = total - chunks.get(request_id, 0)
        self._back.clear()

    def forget(self, request_id: str) -> None:
        """Note that a request will not return, if it is away."""
        absence = self._away.pop(request_id, None)
        if absence is not None and absence in self._absences:
            self._absences.remove(absence)

    def admitted(self, num_blocks: int) -> None:
        """Note that an admission was just handed out `num_blocks` blocks."""
        decay, num_taken = 1.0 - 1.0 / _NUM_LATE, self._pool.num_taken
        self._num_admitted = self._num_admitted * decay + num_blocks
        self._num_all = self._num_all * decay + num_taken - self._num_taken
        self._num_taken = num_taken

    # -- questions --------------------------------------------------------------------

    def guesses(self, num_blocks: int) -> Sequence[Guess]:
        """Return what a victim of `num_blocks` blocks would meet after each of the last absences.

        One that has not ended counts only if it is longer than all that have: then nothing is left
        in HBM.
        """
        late, free = self._absences, self._pool.num_free
        back = [(it.until - it.since, it.num_joined) for it in late if it.until is not None]
        most, now = max((num for num, _ in back), default=0), self._pool.num_taken
        num_longer = sum(it.until is None and now - it.since > most for it in late)
        joined = sum(num for _, num in back) // len(back) if back else 0
        found = [Guess(max(0, num_blocks - max(0, num - free)), others) for num, others in back]
        return found + [Guess(0, joined)] * num_longer

    @property
    def has_returned(self) -> bool:
        """Whether a victim has returned since the last step."""
        return bool(self._back)

    @property
    def admitted_share(self) -> float:
        """Share of admissions in the blocks that were handed out lately; 0 before any were."""
        return self._num_admitted / self._num_all if self._num_all else 0.0
