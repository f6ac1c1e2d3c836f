"""What a block is worth to a tier: the time that a hit saves, times the chance of one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtiers.cost.links import Links, read_link, reload_link
from kvtiers.cost.prefill import PrefillModel

Float64s = npt.NDArray[np.float64]


def seconds_saved(
    positions: npt.ArrayLike,
    block_size: int,
    block_nbytes: int,
    source: int,
    links: Links,
    prefill: PrefillModel,
) -> Float64s:
    """Return the seconds that one reused block saves, by its place in the prefix.

    Computing it, as part of steps that run anyway, less loading it, as part of a load that runs
    anyway (the slower stage of its way rules). Deeper blocks save more: their tokens attend to all
    before them. Never negative: a block that is cheaper to compute is computed.

    Args:
        positions: the first token of each block, counted from the prefix's start.
        source: where the blocks lie, 0 for DRAM, else 1 + store index.
    """
    ways = [links[reload_link()]]
    if source:
        ways.append(links[read_link(links.stores[source - 1])])
    load = max(
        way.seconds_per_piece + block_nbytes / way.bandwidth_bytes_per_second for way in ways
    )
    compute = prefill.marginal_seconds(block_size, positions)
    return np.asarray(np.maximum(compute - load, 0.0))


def block_values(
    saved_seconds: npt.ArrayLike, reuse_chances: npt.ArrayLike, block_nbytes: int
) -> Float64s:
    """Return seconds saved per byte kept: what eviction keeps most of, and admission asks for.

    Args:
        saved_seconds: see `seconds_saved`. reuse_chances: of each block, 0 to 1; broadcasts.
    """
    if block_nbytes < 1:
        raise ValueError(f"a block of {block_nbytes} bytes has no value per byte")
    chances = np.asarray(reuse_chances, dtype=np.float64)
    if not ((chances >= 0) & (chances <= 1)).all():
        raise ValueError("chances of reuse must lie in 0..1")
    return np.asarray(np.asarray(saved_seconds, dtype=np.float64) * chances / block_nbytes)
