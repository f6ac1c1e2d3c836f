"""An engine's KV blocks: a pool with reference counts and a prefix cache, as vLLM keeps them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class FakePool:
    """Blocks by id. A free block keeps its cached content until it is given to somebody.

    Block 0 is the null block and never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self._refs = dict.fromkeys(range(1, num_blocks), 0)
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_blocks(self) -> int:
        """Blocks in all, without the null block."""
        return len(self._refs)

    def hit(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Return the cached blocks of the longest known prefix of at most `limit` blocks."""
        found = []
        for block_hash in hashes[:limit]:
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_needed(self, num_new: int, hits: Iterable[int]) -> int:
        """Return how many free blocks an allocation takes, cached but free ones included."""
        return num_new + sum(self._refs[block_id] == 0 for block_id in hits)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._free[block_id]
            self._refs[block_id] += 1

    def take(self, num: int) -> list[int]:
        """Hand out new blocks, the longest free first; what they cached is forgotten."""
        taken = []
        for _ in range(num):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._refs[block_id] = 1
            taken.append(block_id)
        return taken

    def cache(self, block_ids: Sequence[int], hashes: Sequence[bytes], num_full: int) -> None:
        """Let others hit the first full blocks of a request."""
        for block_id, block_hash in zip(block_ids[:num_full], hashes, strict=False):
            if block_id not in self._hash_of and block_hash not in self._cached:
                self._hash_of[block_id] = block_hash
                self._cached[block_hash] = block_id

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks; tails are handed out before heads."""
        for block_id in reversed(block_ids):
            self._refs[block_id] -= 1
            assert self._refs[block_id] >= 0, f"block {block_id} was freed twice"
            if self._refs[block_id] == 0:
                self._free[block_id] = None

    def evict(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the prefix cache; whoever holds them keeps them."""
        for block_id in block_ids:
            self._forget(block_id)

    def reset_cache(self) -> bool:
        """Forget all that is cached; False, changing nothing, while any block is held."""
        if self.num_free < self.num_blocks:
            return False
        self._hash_of.clear()
        self._cached.clear()
        return True

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None and self._cached.get(block_hash) == block_id:
            del self._cached[block_hash]
