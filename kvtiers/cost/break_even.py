"""From which prefix length on a reload is faster than computing."""

from __future__ import annotations

import numpy as np

from kvtiers.cost.links import Links
from kvtiers.cost.planner import pipelined_seconds
from kvtiers.cost.prefill import PrefillModel


def break_even_tokens(
    source: int,
    block_size: int,
    block_nbytes: int,
    longest_tokens: int,
    links: Links,
    prefill: PrefillModel,
) -> int | None:
    """Return the shortest prefix from which on a reload is always faster, up to a longest one.

    Prompts are whole blocks of prefix, all on one tier, and one token more, which is computed in
    either case. Links are taken to be idle.

    Args:
        source: where the prefix lies, 0 for DRAM, else 1 + store index.
        block_size: tokens of a block. block_nbytes: bytes of one on a rank.

    Returns:
        tokens of the prefix; None if there is no such length.
    """
    num_blocks = np.arange(1, longest_tokens // block_size + 1)
    cached = num_blocks * block_size
    stores = {links.stores[source - 1]: num_blocks} if source else {}
    loads = pipelined_seconds(num_blocks, stores, block_nbytes, links.without_queues())
    slower = np.flatnonzero(loads + prefill.seconds(1, cached) >= prefill.seconds(cached + 1))
    first = int(slower[-1]) + 1 if len(slower) else 0
    return int(cached[first]) if first < len(cached) else None
