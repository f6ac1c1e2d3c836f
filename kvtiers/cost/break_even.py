"""From which prefix length on a reload is faster than computing."""

from __future__ import annotations

import numpy as np

from kvtiers.cost.links import Links
from kvtiers.cost.loads import Loads, WindowKV
from kvtiers.cost.prefill import PrefillModel


def break_even_tokens(
    source: int,
    block_size: int,
    block_nbytes: int,
    longest_tokens: int,
    links: Links,
    prefill: PrefillModel,
    windows: tuple[WindowKV, ...] = (),
) -> int | None:
    """Return the shortest prefix from which on a reload is always faster, up to a longest one.

    Prompts are whole blocks of prefix, all on one tier, and one token more, which is computed in
    either case. Links are taken to be idle.

    Args:
        source: where the prefix lies, 0 for DRAM, else 1 + store index.
        block_size: tokens of a block. block_nbytes: bytes of one on a rank, over all KV groups.
        windows: KV groups of which only the last blocks are loaded.

    Returns:
        tokens of the prefix; None if there is no such length.
    """
    idle = links.without_queues()
    sources = np.full(longest_tokens // block_size, source, np.uint8)
    loads = Loads.of_prefixes(sources, block_nbytes, idle, windows).seconds(idle)[1:]
    cached = np.arange(1, len(sources) + 1) * block_size
    slower = np.flatnonzero(loads + prefill.seconds(1, cached) >= prefill.seconds(cached + 1))
    first = int(slower[-1]) + 1 if len(slower) else 0
    return int(cached[first]) if first < len(cached) else None
