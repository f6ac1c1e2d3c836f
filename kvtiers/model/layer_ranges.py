"""Ranges of neighbouring layers, each a KV group of its own: what a load comes in, one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def layer_ranges(num_layers: int, num_ranges: int) -> Sequence[range]:
    """Return ranges of neighbouring layers, as equal as they can be.

    Raises:
        ValueError: there are no such ranges.
    """
    if not 1 <= num_ranges <= num_layers:
        raise ValueError(f"{num_layers} layers do not make {num_ranges} ranges")
    bounds = [num_layers * idx // num_ranges for idx in range(num_ranges + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
