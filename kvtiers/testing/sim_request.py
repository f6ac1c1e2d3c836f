"""The size of a simulated engine, and one request of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtiers.model.keys import BlockKey

BLOCK_SIZE = 4
NUM_ENGINE_BLOCKS = 40
MAX_REQUESTS = 6
SHARED = "shared"


@dataclass(eq=False)
class SimRequest:
    """One request of the simulated engine; counts are in blocks.

    Attributes:
        status: waiting, loading, running or aborted (in a load).
        keys, block_ids: per KV group. offered: per KV group, the cursor.
    """

    request_id: str
    keys: list[list[BlockKey]]
    block_ids: list[list[int]]
    offered: list[int]
    num_computed: int = 0
    status: str = "waiting"
    failed_before: bool = False
    failed_blocks: set[int] = field(default_factory=set)

    @property
    def num_blocks(self) -> int:
        """The request's length."""
        return len(self.keys[0])
