"""What is known of each live request of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtiers.control.answers import Answer
from kvtiers.model.keys import BlockKey, block_key, block_keys
from kvtiers.model.messages import NO_BLOCK


@dataclass(slots=True)
class RequestState:
    """One request, from its first lookup to its end.

    Attributes:
        hashes: the engine's block hashes; the engine appends to this very list.
        keys: per KV group, derived from the hashes once.
        block_ids: per KV group, the engine blocks as last seen.
        num_full: blocks whose tokens are known and computed once the present step is done.
        num_computed: tokens computed once the present step is done.
        num_offered: per KV group, leading blocks that have been taken by DRAM.
        num_tried: per KV group, leading blocks that were offered at all.
        admitted: whether it holds engine blocks. tainted: whether those were computed before a
            reset, so that they must not be kept.
        answer: the last answer to a lookup, until the engine acts on it.
        num_asked: tokens beyond the engine's own that it was about.
        sources: of the last answer, tokens to reload by tier name.
    """

    request_id: str
    hashes: Sequence[bytes]
    keys: list[list[BlockKey]]
    block_ids: list[list[int]]
    num_offered: list[int]
    num_tried: list[int]
    num_full: int = 0
    num_computed: int = 0
    admitted: bool = False
    tainted: bool = False
    num_asked: int = 0
    answer: Answer | None = None
    sources: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls, request_id: str, hashes: Sequence[bytes], num_groups: int) -> RequestState:
        """Make the state of a request that holds nothing yet."""
        return cls(
            request_id,
            hashes,
            keys=[[] for _ in range(num_groups)],
            block_ids=[[] for _ in range(num_groups)],
            num_offered=[0] * num_groups,
            num_tried=[0] * num_groups,
        )

    def derive_keys(self, hashes_per_block: int) -> None:
        """Extend the keys by the hashes that came since the last call."""
        last, hashes, first = hashes_per_block - 1, self.hashes, self.keys[0]
        num_hashes, num_covered = len(hashes), len(first) * hashes_per_block
        if first and not (
            num_covered <= num_hashes and first[-1].startswith(hashes[num_covered - 1])
        ):  # the hashes do not say any longer what they said: each covers all that precede it
            self._drop_changed_keys(last)
        elif num_hashes < num_covered + hashes_per_block:
            return
        for group, keys in enumerate(self.keys):
            start = len(keys) * hashes_per_block + last
            if start + 1 == num_hashes:  # a decode that fills its block
                keys.append(block_key(hashes[start], group))
            elif start < num_hashes:
                keys.extend(block_keys(hashes[start::hashes_per_block], group))

    def offer_again(self) -> None:
        """Offer every block again: some may have been lost."""
        self.num_offered = [0] * len(self.num_offered)

    def rewind(self) -> None:
        """Offer every block again, but only once the next step says which are computed."""
        self.offer_again()
        self.num_full = 0

    def see_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Take in the blocks that the engine has added to its table."""
        for mine, now in zip(self.block_ids, block_ids, strict=True):
            mine.extend(now[len(mine) :])

    def leave_windows(self, windows: Sequence[int | None], block_size: int) -> None:
        """Forget engine blocks that have left a sliding window; the engine may have reused them."""
        for block_ids, window in zip(self.block_ids, windows, strict=True):
            if window is not None:
                gone = max(0, (self.num_computed - window + 1) // block_size)
                block_ids[:gone] = [NO_BLOCK] * min(gone, len(block_ids))

    def leave_behind(self, num_blocks: int) -> None:
        """Offer at most so many leading blocks: the others are not worth a copy."""
        self.num_full = min(self.num_full, num_blocks)

    def lose_blocks(self) -> None:
        """Note that the engine took the request's blocks away."""
        self.rewind()
        self.block_ids = [[] for _ in self.block_ids]
        self.admitted = self.tainted = False

    def _drop_changed_keys(self, last: int) -> None:
        """Forget keys whose tokens the engine replaced, as it does in a streaming session."""
        hashes = self.hashes[last :: last + 1]
        old = self.keys[0]
        num = min(len(old), len(hashes))
        while num and old[num - 1] != block_key(hashes[num - 1], 0):
            num -= 1
        for keys in self.keys:
            del keys[num:]
        self.num_offered = [min(offered, num) for offered in self.num_offered]
        self.num_full = min(self.num_full, num)
