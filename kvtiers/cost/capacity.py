"""How many blocks, tokens and sequences fit the KV pool of a device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """What bounds the number of sequences that an engine serves at once."""

    KV = "kv"  # the KV pool
    MAX_NUM_SEQS = "max_num_seqs"  # the knob


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many sequences an engine sustains.

    Attributes:
        num_kv: that the KV pool holds. num_sequences: served at once.
        limit: what binds. With `KV` and a larger `max_num_seqs` running requests preempt each
            other, which is thrashing, not throughput.
    """

    num_kv: int
    num_sequences: int
    limit: Limit


@dataclass(frozen=True, slots=True)
class KVPool:
    """The part of a device's memory that is left for KV.

    Attributes:
        nbytes: on one rank. kv_nbytes_per_token: on one rank. block_size: tokens a block.
    """

    nbytes: int
    kv_nbytes_per_token: int
    block_size: int = 16

    @property
    def num_blocks(self) -> int:
        """Blocks that fit."""
        return self.nbytes // (self.block_size * self.kv_nbytes_per_token)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.block_size

    def concurrency(self, num_context_tokens: float, max_num_seqs: int) -> Concurrency:
        """Return how many sequences of an average context are served at once."""
        num_kv = int(self.num_tokens // num_context_tokens)
        limit = Limit.MAX_NUM_SEQS if max_num_seqs < num_kv else Limit.KV
        return Concurrency(num_kv, min(num_kv, max_num_seqs), limit)
