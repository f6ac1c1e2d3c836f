"""The few documents that simulated requests are about, and what an earlier life kept of them."""

from __future__ import annotations

from typing import Final

from kvtiers.control.settings import StoreSettings
from kvtiers.model.keys import Rank, block_key
from kvtiers.testing.sim_rank import SimStore

NUM_DOCUMENTS: Final = 3
MAX_BLOCKS: Final = 6


def block_hash(document: int, position: int) -> bytes:
    """Return the hash of a block; documents share their first two blocks."""
    return bytes([document if position > 1 else 0, position]).ljust(32, b"\1")


def private_store(store: StoreSettings, rank: Rank, num_groups: int) -> SimStore:
    """Return a rank's store; where it inherits, each rank has lost another block."""
    if not store.inherits:
        return SimStore(store.capacity_blocks)
    hashes = [block_hash(d, i) for d in range(NUM_DOCUMENTS) for i in range(MAX_BLOCKS)]
    names = [(0, rank, block_key(h, g)) for h in hashes for g in range(num_groups)]
    del names[rank.tensor]
    return SimStore(store.capacity_blocks, names[: store.capacity_blocks])
