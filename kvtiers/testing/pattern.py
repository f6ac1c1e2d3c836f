"""Bytes that tell which block, layer and rank they belong to, so that any swap is visible."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from kvtiers.model.keys import BlockKey, Rank
from kvtiers.model.layout import GroupLayout
from kvtiers.model.messages import UInt8s

_DIGEST_NBYTES = 64


@functools.lru_cache(maxsize=4096)
def page_pattern(key: BlockKey, layer: str, nbytes: int, rank: Rank = Rank()) -> bytes:  # noqa: B008
    """Return what one page of a block holds: BLAKE2b of key, layer, rank and a counter.

    Args:
        key: of the block. layer: the page's name. nbytes: of the page.
    """
    seed = b"|".join((key, layer.encode(), rank.encode()))
    num_digests = -(-nbytes // _DIGEST_NBYTES)
    digests = [
        hashlib.blake2b(idx.to_bytes(4, "big") + seed).digest() for idx in range(num_digests)
    ]
    return b"".join(digests)[:nbytes]


def block_pattern(key: BlockKey, group: GroupLayout, rank: Rank = Rank()) -> UInt8s:  # noqa: B008
    """Return the payload of a block: the patterns of its pages one after another."""
    pages = [page_pattern(key, page.layer, page.nbytes, rank) for page in group.pages]
    return np.frombuffer(b"".join(pages), np.uint8)


def recognise(payload: UInt8s, keys: Sequence[BlockKey], group: GroupLayout) -> BlockKey | None:
    """Return which of the keys a payload is the pattern of, None for none of them."""
    for key in keys:
        if np.array_equal(payload, block_pattern(key, group)):
            return key
    return None
