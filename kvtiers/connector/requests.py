"""What is known of each live request of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtiers.control.controller import Answer
from kvtiers.model.keys import BlockKey, block_keys


@dataclass(slots=True)
class RequestState:
    """One request, from its first lookup to its end.

    Attributes:
        hashes: the engine's block hashes; the engine appends to this very list.
        keys: per KV group, derived from the hashes once.
        block_ids: per KV group, the engine blocks as last seen.
        num_full: blocks whose tokens are known and computed once the present step is done.
        num_offered: per KV group, leading blocks that have been taken by DRAM.
        answer: the last answer to a lookup, until the engine acts on it.
        num_asked: tokens beyond the engine's own that it was about.
        sources: of the last answer, tokens to reload by tier name.
    """

    request_id: str
    hashes: Sequence[bytes]
    keys: list[list[BlockKey]]
    block_ids: list[list[int]]
    num_offered: list[int]
    num_full: int = 0
    num_asked: int = 0
    answer: Answer | None = None
    sources: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls, request_id: str, hashes: Sequence[bytes], num_groups: int) -> RequestState:
        """Make the state of a request that holds nothing yet."""
        groups = range(num_groups)
        return cls(
            request_id, hashes, [[] for _ in groups], [[] for _ in groups], [0 for _ in groups]
        )

    def derive_keys(self, hashes_per_block: int) -> None:
        """Extend the keys by the hashes that came since the last call."""
        last = hashes_per_block - 1
        for group, keys in enumerate(self.keys):
            start = len(keys) * hashes_per_block + last
            if start < len(self.hashes):
                keys.extend(block_keys(self.hashes[start::hashes_per_block], group))

    def rewind(self) -> None:
        """Offer every block again, once it is known anew which are computed."""
        self.num_offered = [0 for _ in self.num_offered]
        self.num_full = 0

    def lose_blocks(self) -> None:
        """Note that the engine took the request's blocks away."""
        self.rewind()
        self.block_ids = [[] for _ in self.block_ids]
