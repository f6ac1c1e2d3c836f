"""How many sequences fit a card: the arithmetic of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtiers.cost.prefill import ModelShape
from kvtiers.model.errors import CapacityError
from kvtiers.model.units import format_size


class Limit(StrEnum):
    """What bounds the number of sequences that an engine serves at once."""

    KV = "kv"  # the KV pool
    MAX_NUM_SEQS = "max_num_seqs"  # the knob


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many sequences an engine sustains.

    Attributes:
        num_kv: that the KV pool holds. num_sequences: served at once. limit: what binds.
        overcommitted: whether the knob admits more than the pool holds: running requests then
            preempt each other, which is thrashing, not throughput.
    """

    num_kv: int
    num_sequences: int
    limit: Limit
    overcommitted: bool


@dataclass(frozen=True, slots=True)
class KVPool:
    """The part of a card's memory that is left for KV.

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
        return Concurrency(num_kv, min(num_kv, max_num_seqs), limit, max_num_seqs > num_kv)

    def check_longest(self, max_model_len: int) -> None:
        """Check that one sequence of the longest context fits.

        Raises:
            CapacityError: it does not; says what would help.
        """
        if max_model_len > self.num_tokens:
            raise CapacityError(
                f"one sequence of max_model_len {max_model_len} needs "
                f"{format_size(max_model_len * self.kv_nbytes_per_token)} of KV, the pool has "
                f"{format_size(self.nbytes)}: {self.num_tokens} tokens. Any of these helps: "
                f"max_model_len of at most {self.num_tokens}, a higher gpu_memory_utilization, an "
                "fp8 KV cache (twice the tokens), tensor parallelism"
            )


def kv_pool(  # noqa: PLR0913 - one argument a knob
    shape: ModelShape,
    memory_nbytes: float,
    *,
    gpu_memory_utilization: float = 0.9,
    weight_element_nbytes: float = 2,
    kv_element_nbytes: float = 2,
    tensor_parallel_size: int = 1,
    runtime_nbytes: float = 0,
    block_size: int = 16,
) -> KVPool:
    """Return what one card has left for KV.

    ``memory * gpu_memory_utilization - weights - runtime``, all on one rank.

    Args:
        memory_nbytes: of the card. runtime_nbytes: activations, graphs and the runtime's own.

    Raises:
        CapacityError: nothing is left: the weights do not load.
    """
    weights = shape.num_params * weight_element_nbytes / tensor_parallel_size
    claimed = memory_nbytes * gpu_memory_utilization
    per_token = shape.kv_nbytes_per_token(kv_element_nbytes, tensor_parallel_size)
    left = int(claimed - weights - runtime_nbytes)
    if left < block_size * per_token:
        cards = -(-int(shape.num_params * weight_element_nbytes) // max(int(claimed), 1))
        raise CapacityError(
            f"{format_size(int(weights))} of weights a card leave no KV block in "
            f"{format_size(int(claimed))} ({gpu_memory_utilization:g} of "
            f"{format_size(int(memory_nbytes))}): the model does not load. Any of these helps: "
            f"tensor_parallel_size of more than {cards}, fp8 weights, a card with more memory"
        )
    return KVPool(left, per_token, block_size)
