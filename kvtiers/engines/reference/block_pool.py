"""The KV blocks of the engine: who holds them, and what free ones still remember."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from kvtiers.model.errors import ProtocolError

NULL_BLOCK: Final = 0  # never handed out, so that an empty place in a table cannot be somebody's


class BlockPool:
    """Blocks 1 to ``num_blocks``, with reference counts and a prefix cache.

    A free block keeps its content until it is handed out: the longest free leaves first, and of
    one request the tail before the head. A hash names a run of `blocks_per_hash` blocks, which is
    forgotten as soon as one of them is handed out.
    """

    def __init__(self, num_blocks: int, blocks_per_hash: int = 1) -> None:
        self.num_blocks = num_blocks
        self._per_hash = blocks_per_hash
        self._held: set[int] = set()
        self._more_refs: dict[int, int] = {}  # of held blocks: holders beside the first
        # A block that a hit takes out of the middle leaves its place behind; those that it was
        # left by since come after, so that of a block's places the last one counts.
        self._free = deque(range(1, num_blocks + 1))
        self._left_places: dict[int, int] = {}
        self._num_left_places = 0
        self.num_taken = 0  # blocks that were handed out so far
        self._runs: dict[bytes, Sequence[int]] = {}  # hash -> its blocks
        self._hash_of: dict[int, bytes] = {}  # each block of a run that is cached

    # -- questions --------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) - self._num_left_places

    @property
    def use(self) -> float:
        """Share of the blocks that somebody holds."""
        return 1.0 - self.num_free / self.num_blocks

    @property
    def num_cached(self) -> int:
        """Hashes that can be hit."""
        return len(self._runs)

    def refs(self, block_id: int) -> int:
        """Return by how many sequences a block is held."""
        return int(block_id in self._held) + self._more_refs.get(block_id, 0)

    def hit(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Return the blocks of the longest cached prefix of at most `limit` hashes."""
        found: list[int] = []
        for block_hash in hashes[:limit]:
            run = self._runs.get(block_hash)
            if run is None:
                break
            found += run
        return found

    def num_held_by_none(self, block_ids: Iterable[int]) -> int:
        """Return how many of some blocks are free: holding them takes as many from the pool."""
        return len(set(block_ids).difference(self._held))

    # -- commands ---------------------------------------------------------------------

    def take(self, num: int) -> list[int]:
        """Hand out new blocks; what they remembered is forgotten.

        Raises:
            ProtocolError: there are fewer, and nothing was handed out.
        """
        if num > self.num_free:
            raise ProtocolError(f"{num} blocks are wanted, {self.num_free} are free")
        pop = self._free.popleft  # the longest free
        taken: list[int] = []
        while len(taken) < num:
            taken += [pop() for _ in range(num - len(taken))]
            if not self._left_places.keys().isdisjoint(taken):
                taken = [block_id for block_id in taken if not self._leaves_place(block_id)]
        self._held.update(taken)
        self.num_taken += num
        for block_hash in set(map(self._hash_of.get, taken)):
            if block_hash is not None:
                self._forget(block_hash)
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more: those of a hit, or of a fork."""
        held, more, left = self._held, self._more_refs, self._left_places
        for block_id in block_ids:
            if block_id in held:
                more[block_id] = more.get(block_id, 0) + 1
            else:
                left[block_id] = left.get(block_id, 0) + 1
                self._num_left_places += 1
                held.add(block_id)
        if self._num_left_places > self.num_blocks:
            self._sweep()

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of a sequence's blocks.

        Raises:
            ProtocolError: nobody holds one of them.
        """
        held, more = self._held, self._more_refs
        if not held.issuperset(block_ids):
            block_id = next(b for b in block_ids if b not in held)
            raise ProtocolError(f"block {block_id} was let go of, and nobody holds it")
        last = set(block_ids).difference(more)  # of which this is the last holder
        held -= last
        if len(last) == len(block_ids):
            self._free.extend(reversed(block_ids))
            return
        for block_id in reversed(block_ids):
            if block_id in last:
                last.remove(block_id)
                self._free.append(block_id)
            else:
                more[block_id] -= 1
                if not more[block_id]:
                    del more[block_id]

    def cache(
        self, block_ids: Sequence[int], hashes: Sequence[bytes], first: int, end: int
    ) -> None:
        """Let others hit the runs ``first .. end - 1`` of a sequence; all of it is computed.

        A hash that is cached already keeps its blocks.
        """
        size = self._per_hash
        for idx in range(first, end):
            block_hash, run = hashes[idx], block_ids[idx * size : (idx + 1) * size]
            if block_hash not in self._runs and self._hash_of.keys().isdisjoint(run):
                self._runs[block_hash] = run
                self._hash_of.update(dict.fromkeys(run, block_hash))

    def forget_all(self) -> None:
        """Let nobody hit anything any more."""
        self._runs.clear()
        self._hash_of.clear()

    def _leaves_place(self, block_id: int) -> bool:
        """Whether a place is one that was left, which counts it off."""
        num = self._left_places.get(block_id, 0)
        if not num:
            return False
        self._num_left_places -= 1
        if num > 1:
            self._left_places[block_id] = num - 1
        else:
            del self._left_places[block_id]
        return True

    def _sweep(self) -> None:
        """Give up the places that were left."""
        self._free = deque(b for b in self._free if not self._leaves_place(b))

    def _forget(self, block_hash: bytes) -> None:
        for block_id in self._runs.pop(block_hash):
            del self._hash_of[block_id]
