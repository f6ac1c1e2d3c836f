"""Which slots of a store's files are free, and which of them may be written at once."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Final


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A slot of one of the store's files."""

    file_idx: int
    slot: int


IN_FILE_ORDER: Final = attrgetter("file_idx", "slot")  # 2.5 times faster than the order of `Place`


class FileSlots:
    """The free slots of several files of equal size.

    A slot is *clean* when no record on disk names it, *stale* while the removal of its record
    is not durable. Clean ones are taken first, low slots before high ones, so that batches
    lie in runs; files share a batch evenly.

    Args:
        num_files: how many. slots_per_file: of each. taken: places that are not free.
        num_spare: slots that are always left free, for others to become clean meanwhile.
    """

    def __init__(
        self,
        num_files: int,
        slots_per_file: int,
        taken: Collection[Place] = (),
        num_spare: int = 0,
    ) -> None:
        self.num_slots = num_files * slots_per_file - num_spare
        self._num_spare = num_spare
        used = [set[int]() for _ in range(num_files)]
        for place in taken:
            used[place.file_idx].add(place.slot)
        # Sorted lists are heaps already.
        self._clean = [[s for s in range(slots_per_file) if s not in some] for some in used]
        self._stale: deque[tuple[int, Place]] = deque()  # (number of the change, place)
        self._num_free = sum(len(heap) for heap in self._clean)
        self._next_file = 0

    @property
    def num_free(self) -> int:
        """Slots that may be taken, stale ones included."""
        return max(0, self._num_free - self._num_spare)

    @property
    def newest_stale(self) -> int:
        """The change to hurry, now that clean slots run low; 0 while they do not."""
        num_clean = self._num_free - len(self._stale)
        return self._stale[-1][0] if self._stale and num_clean <= self._num_spare // 2 else 0

    def give(self, place: Place, change: int | None = None) -> None:
        """Return a slot; `change` is the number of the one that removes its record, if any."""
        self._num_free += 1
        if change is None:
            heapq.heappush(self._clean[place.file_idx], place.slot)
        else:
            self._stale.append((change, place))

    def take(self, num: int, num_committed: int) -> tuple[list[Place], int]:
        """Take up to some slots.

        Args:
            num: how many. num_committed: changes that are durable now.

        Returns:
            places in order, fewer than asked for when no more are free; and the change that
            must be durable before they are written, 0 for none.
        """
        while self._stale and self._stale[0][0] <= num_committed:
            _, place = self._stale.popleft()
            heapq.heappush(self._clean[place.file_idx], place.slot)
        num = min(num, self.num_free)
        places = self._take_clean(num)
        change = 0
        while len(places) < num and self._stale:
            number, place = self._stale.popleft()
            change = max(change, number)
            places.append(place)
        self._num_free -= len(places)
        places.sort(key=IN_FILE_ORDER)
        return places, change

    def _take_clean(self, num: int) -> list[Place]:
        num_files = len(self._clean)
        share = -(-num // num_files)
        places: list[Place] = []
        for limit in (share, num):  # evenly first, then wherever there is room
            for i in range(num_files):
                idx = (self._next_file + i) % num_files
                heap = self._clean[idx]
                some = range(min(limit, num - len(places), len(heap)))
                places += [Place(idx, heapq.heappop(heap)) for _ in some]
        self._next_file = (self._next_file + 1) % num_files
        return places
