"""How the blocks of the pool change hands, by which it is judged what a victim loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtiers.engines.reference.block_pool import BlockPool

_NUM_LATE: Final = 16  # events of late, by which the next one is judged


@dataclass(slots=True, eq=False)
class _Absence:
    """A victim's.

    Attributes:
        since, until: blocks that the pool had handed out when it lost its own, and when it was
            back; None: it still is away.
        num_joined: tokens that the step in which it was back computed for others, beside decodes.
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
    """Remembers the last victims, and who was handed out blocks.

    The pool hands out the blocks that were freed first, and of one request the last ones first.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._absences: deque[_Absence] = deque(maxlen=_NUM_LATE)
        self._away: dict[str, _Absence] = {}
        self._back: dict[str, _Absence] = {}  # since the last step
        # Blocks that were handed out when the last admission ended; and decaying sums, of those of
        # admissions, and of all.
        self._num_taken = pool.num_taken
        self._num_admitted = 0.0
        self._num_all = 0.0

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
        """Note an admission that was just handed out so many blocks."""
        decay, num_taken = 1.0 - 1.0 / _NUM_LATE, self._pool.num_taken
        self._num_admitted = self._num_admitted * decay + num_blocks
        self._num_all = self._num_all * decay + num_taken - self._num_taken
        self._num_taken = num_taken

    # -- questions --------------------------------------------------------------------

    def guesses(self, num_blocks: int) -> Sequence[Guess]:
        """Return what a victim of so many blocks would meet, were it away like each of the last
        ones; of those that are not back only who is away for longer than all others counts, and
        finds nothing."""
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
        """Of the blocks that were handed out, those of admissions, of late."""
        return self._num_admitted / self._num_all if self._num_all else 0.0
