"""The KV blocks of the engine: who holds them, and what free ones still remember."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from kvtiers.model.errors import ProtocolError

NULL_BLOCK: Final = 0  # never handed out, so that an empty place in a table cannot be somebody's


class BlockPool:
    """Blocks 1 to ``num_blocks``, with reference counts and a prefix cache.

    Free blocks are handed out in the order in which they were freed, those of one request tail
    first; until then they keep their content. A hash names a run of `blocks_per_hash` blocks, and
    can be hit until one of them is handed out.
    """

    def __init__(self, num_blocks: int, blocks_per_hash: int = 1) -> None:
        self.num_blocks = num_blocks
        self._per_hash = blocks_per_hash
        self._held: set[int] = set()
        self._more_refs: dict[int, int] = {}  # of held blocks: holders beside the first
        # A free block that is hit keeps its entry in the queue, which is stale from then on: it is
        # counted here, and skipped later. Freed again, the block is appended once more, so that
        # of a block's entries the last one is valid.
        self._free = deque(range(1, num_blocks + 1))
        self._stale: dict[int, int] = {}
        self._num_stale = 0
        self.num_taken = 0  # blocks that were handed out so far
        self._runs: dict[bytes, Sequence[int]] = {}  # hash -> its blocks
        self._hash_of: dict[int, bytes] = {}  # each block of a run that is cached

    # -- questions --------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) - self._num_stale

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

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Return how many of some blocks are free: to hold all takes as many from the pool."""
        return len(set(block_ids).difference(self._held))

    # -- commands ---------------------------------------------------------------------

    def take(self, num: int) -> list[int]:
        """Hand out free blocks; their content can no longer be hit.

        Raises:
            ProtocolError: there are fewer, and nothing was handed out.
        """
        if num > self.num_free:
            raise ProtocolError(f"{num} blocks are wanted, {self.num_free} are free")
        pop = self._free.popleft  # the longest free
        taken: list[int] = []
        while len(taken) < num:
            taken += [pop() for _ in range(num - len(taken))]
            if not self._stale.keys().isdisjoint(taken):
                taken = [block_id for block_id in taken if not self._drop_stale(block_id)]
        self._held.update(taken)
        self.num_taken += num
        for block_hash in set(map(self._hash_of.get, taken)):
            if block_hash is not None:
                self._forget(block_hash)
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a holder to blocks: after a hit, or for a forked sequence."""
        held, more, stale = self._held, self._more_refs, self._stale
        for block_id in block_ids:
            if block_id in held:
                more[block_id] = more.get(block_id, 0) + 1
            else:
                stale[block_id] = stale.get(block_id, 0) + 1
                self._num_stale += 1
                held.add(block_id)
        if self._num_stale > self.num_blocks:
            self._sweep()

    def free(self, block_ids: Sequence[int]) -> None:
        """Take a holder off a sequence's blocks, which are given in the order of its tokens.

        Raises:
            ProtocolError: nobody holds one of them; nothing was changed.
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
        """Let others hit the runs ``first .. end - 1`` of a sequence, all of which is computed.

        A hash that can be hit already keeps its blocks.
        """
        size = self._per_hash
        for idx in range(first, end):
            block_hash, run = hashes[idx], block_ids[idx * size : (idx + 1) * size]
            if block_hash not in self._runs and self._hash_of.keys().isdisjoint(run):
                self._runs[block_hash] = run
                self._hash_of.update(dict.fromkeys(run, block_hash))

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks stay held or free as they are."""
        self._runs.clear()
        self._hash_of.clear()

    def _drop_stale(self, block_id: int) -> bool:
        """Count a block's entry in the queue off if it is stale; returns whether it was."""
        num = self._stale.get(block_id, 0)
        if not num:
            return False
        self._num_stale -= 1
        if num > 1:
            self._stale[block_id] = num - 1
        else:
            del self._stale[block_id]
        return True

    def _sweep(self) -> None:
        """Remove all stale entries from the queue."""
        self._free = deque(b for b in self._free if not self._drop_stale(b))

    def _forget(self, block_hash: bytes) -> None:
        for block_id in self._runs.pop(block_hash):
            del self._hash_of[block_id]
