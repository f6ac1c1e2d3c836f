"""Content addresses of KV blocks."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NewType

from blake3 import blake3

BlockKey = NewType("BlockKey", bytes)
"""A content address: 32 bytes of block hash, then the KV group (big-endian uint32)."""

StoreKey = NewType("StoreKey", bytes)
"""What a store files a frame under: BLAKE3-256 of fingerprint, rank and `BlockKey`."""

HASH_NBYTES: Final = 32
KEY_NBYTES: Final = HASH_NBYTES + 4
STORE_KEY_NBYTES: Final = 32
_ENGINE_HASH_NBYTES: Final = (16, 32)  # xxh3-128; sha256 and BLAKE3-256
_ROOT: Final = b"kvtiers.prefix_hash_chain.v1"

ExtraKey = None | bool | int | str | bytes | tuple["ExtraKey", ...]


def block_key(block_hash: bytes, group: int) -> BlockKey:
    """Return the key of the block with an engine's hash in one KV group.

    Args:
        block_hash: the engine's own hash of the block and all before it, 16 or 32 bytes.
        group: index of the KV cache group, 0 <= group < 2**32.

    Raises:
        ValueError: the hash has another length, or the group does not fit.
    """
    if len(block_hash) == HASH_NBYTES:
        return BlockKey(block_hash + _group_suffix(group))
    if len(block_hash) not in _ENGINE_HASH_NBYTES:
        raise ValueError(f"block hash has {len(block_hash)} bytes, expected 16 or 32")
    return BlockKey(block_hash.ljust(HASH_NBYTES, b"\0") + _group_suffix(group))


def block_keys(block_hashes: Iterable[bytes], group: int) -> list[BlockKey]:
    """Return the keys of many blocks of one KV group; see `block_key`."""
    suffix = _group_suffix(group)
    keys = []
    for block_hash in block_hashes:
        if len(block_hash) == HASH_NBYTES:
            keys.append(BlockKey(block_hash + suffix))
        else:
            keys.append(block_key(block_hash, group))
    return keys


@lru_cache(maxsize=64)
def _group_suffix(group: int) -> bytes:
    if not 0 <= group < 2**32:
        raise ValueError(f"KV group {group} is not in 0..2**32-1")
    return group.to_bytes(4, "big")


def group_of(key: BlockKey) -> int:
    """Return the KV group in which a key lies."""
    return int.from_bytes(key[HASH_NBYTES:], "big")


def pack_keys(keys: Iterable[BlockKey]) -> bytes:
    """Return keys as one column of ``KEY_NBYTES`` bytes each, for a message."""
    return b"".join(keys)


def unpack_keys(column: bytes) -> Iterator[BlockKey]:
    """Yield the keys of a column made by `pack_keys`.

    Raises:
        ValueError: the column is no multiple of ``KEY_NBYTES`` long.
    """
    if len(column) % KEY_NBYTES:
        raise ValueError(f"key column has {len(column)} bytes, no multiple of {KEY_NBYTES}")
    for start in range(0, len(column), KEY_NBYTES):
        yield BlockKey(column[start : start + KEY_NBYTES])


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a worker stands in the engine's parallel grid.

    Attributes:
        tensor: tensor-parallel rank. pipeline: pipeline-parallel rank.
        context: context-parallel rank. Data-parallel replicas hold the same bytes
            and are told apart by instance folders, not by key.
    """

    tensor: int = 0
    pipeline: int = 0
    context: int = 0

    def encode(self) -> bytes:
        """Return the coordinates as 12 bytes, big-endian."""
        return struct.pack(">3I", self.tensor, self.pipeline, self.context)


def store_key(fingerprint: bytes, rank: Rank, key: BlockKey) -> StoreKey:
    """Return the name under which a store files one rank's frame of a block.

    Args:
        fingerprint: 32 bytes; everything that changes the meaning of the frame's bytes.
        rank: which shard of the block.
        key: the block.
    """
    return StoreKey(blake3(fingerprint + rank.encode() + key).digest())


def prefix_hash_chain(
    token_ids: Sequence[int],
    block_size: int,
    *,
    extra_keys: tuple[ExtraKey, ...] = (),
    parent: bytes | None = None,
) -> list[bytes]:
    """Hash the full blocks of a token sequence, each with all that precede it.

    For engines without block hashes of their own. BLAKE3-256 over a typed,
    length-prefixed encoding: equal in every process and Python version, unlike
    ``hash()``, which differs between processes for a tuple holding ``None``.

    Args:
        token_ids: the tokens, each 0 <= id < 2**32. A last partial block is not hashed.
        block_size: tokens per block, > 0.
        extra_keys: what else changes the KV: LoRA, cache salt, multimodal item hashes.
        parent: hash of the block before the first one, None at the start of a sequence.

    Returns:
        ``len(token_ids) // block_size`` hashes of 32 bytes.

    Raises:
        ValueError: block_size < 1, a token id out of range, or a parent that is no hash.
        TypeError: an extra key of a type that has no canonical encoding.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size} is not positive")
    if parent is not None and len(parent) not in _ENGINE_HASH_NBYTES:
        raise ValueError(f"parent hash has {len(parent)} bytes, expected 16 or 32")
    extras = b"".join(_encode_extra(key) for key in extra_keys)
    previous = parent if parent is not None else blake3(_ROOT).digest()
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = token_ids[start : start + block_size]
        try:
            body = struct.pack(f">{block_size}I", *tokens)
        except struct.error as error:
            raise ValueError(f"token ids {start}..{start + block_size - 1}: {error}") from error
        previous = blake3(previous + struct.pack(">I", block_size) + body + extras).digest()
        hashes.append(previous)
    return hashes


def _encode_extra(key: ExtraKey) -> bytes:
    """Encode one extra key: a type tag, a length, the value."""
    if key is None:
        return b"n" + bytes(8)
    if isinstance(key, bool):
        return b"b" + struct.pack(">Q?", 1, key)
    if isinstance(key, int):
        body = key.to_bytes((key.bit_length() + 8) // 8, "big", signed=True)
        return b"i" + struct.pack(">Q", len(body)) + body
    if isinstance(key, str):
        body = key.encode()
        return b"s" + struct.pack(">Q", len(body)) + body
    if isinstance(key, bytes):
        return b"y" + struct.pack(">Q", len(key)) + key
    if isinstance(key, tuple):
        parts = [_encode_extra(part) for part in key]
        return b"t" + struct.pack(">Q", len(parts)) + b"".join(parts)
    raise TypeError(f"extra key {key!r} has type {type(key).__name__}, which has no encoding")
