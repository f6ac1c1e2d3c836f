"""How an engine divides a device's memory, and what would help where it is too small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtiers.cost.capacity import KVPool
from kvtiers.cost.hardware import WEIGHT_NBYTES, Figure, Hardware
from kvtiers.cost.prefill import ModelShape
from kvtiers.model.errors import CapacityError, ConfigError

RUNTIME_NBYTES: Final = Figure(
    2e9, "the driver's context, graphs and work space; an order of magnitude, not measured"
)
ACTIVATION_NBYTES: Final = Figure(
    48, "24 live elements of 2 bytes a token of a step and unit of hidden size; as above"
)
_MOST_RANKS: Final = 64
_MOST_CHUNKS: Final = 100_000
_MOST_UTILIZATION: Final = 0.97  # what a driver leaves of a device
_USUAL_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory of one engine's devices, and what takes it; bytes are those of one device.

    Attributes:
        dtype: of the weights. kv_dtype: of the KV cache.
        utilization: share of a device's memory that the engine claims.
        runtime_nbytes: of one device, beside weights and KV; None: estimated.
    """

    shape: ModelShape
    hardware: Hardware
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    tensor_parallel_size: int = 1
    utilization: float = 0.9
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    runtime_nbytes: int | None = None

    def __post_init__(self) -> None:
        for what, dtype in (("weights", self.dtype), ("KV cache", self.kv_dtype)):
            if dtype not in WEIGHT_NBYTES:
                known = ", ".join(WEIGHT_NBYTES)
                raise ConfigError(f"no data type {dtype!r} for the {what}; known: {known}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization {self.utilization} must be above 0 and at most 1")
        if min(self.tensor_parallel_size, self.block_size, self.max_num_batched_tokens) < 1:
            raise ConfigError("ranks, tokens of a block and of a step must be at least 1")

    @property
    def claimed_nbytes(self) -> int:
        """What the engine may use of one device's memory."""
        return int(self.hardware.memory_nbytes.value * self.utilization)

    @property
    def weights_nbytes(self) -> int:
        """Weights on one device."""
        every = self.shape.num_params * WEIGHT_NBYTES[self.dtype]
        return int(every / self.tensor_parallel_size)

    @property
    def other_nbytes(self) -> int:
        """Activations of a step, and what the runtime needs, on one device."""
        if self.runtime_nbytes is not None:
            return self.runtime_nbytes
        per_token = ACTIVATION_NBYTES.value * self.shape.hidden_size
        return int(RUNTIME_NBYTES.value + per_token * self.max_num_batched_tokens)

    @property
    def kv_nbytes_per_token(self) -> int:
        """KV of one token on one device, over all layers."""
        element = WEIGHT_NBYTES[self.kv_dtype]
        return self.shape.kv_nbytes_per_token(element, self.tensor_parallel_size)

    @property
    def pool_nbytes(self) -> int:
        """What is left for KV on one device; 0 or less where the weights leave no room."""
        return self.claimed_nbytes - self.weights_nbytes - self.other_nbytes

    @property
    def pool(self) -> KVPool:
        """The KV pool; it may hold nothing, see `check`."""
        return KVPool(max(0, self.pool_nbytes), self.kv_nbytes_per_token, self.block_size)

    def with_ranks(self, num: int) -> EngineMemory:
        """Return the same engine on another number of devices."""
        return replace(self, tensor_parallel_size=num)

    def with_block_size(self, num_tokens: int) -> EngineMemory:
        """Return the same engine with blocks of `num_tokens` tokens."""
        return replace(self, block_size=num_tokens)

    def with_kv_dtype(self, kv_dtype: str) -> EngineMemory:
        """Return the same engine with another KV cache."""
        return replace(self, kv_dtype=kv_dtype)

    def check(self, max_model_len: int | None = None) -> None:
        """Refuse what would not start.

        Args:
            max_model_len: tokens of the longest sequence; None: room for one block is enough.

        Raises:
            CapacityError: the heads cannot be divided over the ranks, weights do not leave room
                for KV, or the pool does not hold the longest sequence; the message says what would
                help.
        """
        check_ranks(self.shape, self.tensor_parallel_size)
        if self.pool.num_blocks < 1:
            raise CapacityError(self._no_room())
        room = self.pool.num_tokens
        if max_model_len is not None and max_model_len > room:
            raise CapacityError(
                f"one sequence of max_model_len {max_model_len:,} does not fit the KV pool of "
                f"{room:,} tokens. {_helps(self._remedies(max_model_len))}"
            )

    def _no_room(self) -> str:
        memory = self.hardware.memory_nbytes.value
        devices = f"{self.tensor_parallel_size} x " if self.tensor_parallel_size > 1 else ""
        text = (
            f"{_gb(self.weights_nbytes)} of weights ({self.dtype}) and {_gb(self.other_nbytes)} of "
            f"activations and runtime a device leave no KV block of {_gb(memory)} x "
            f"{self.utilization:g} on {devices}{self.hardware.title}"
        )
        if self.weights_nbytes > memory:
            text += ": the model does not even load"
        each = list(self._any_of())
        if each:
            return f"{text}. {_helps(each)}"
        return (
            f"{text}. None of the knobs helps on its own: take a device with more memory, or "
            "several of: fp8 weights, tensor parallelism, a higher utilization"
        )

    def _any_of(self) -> Iterator[str]:
        """Yield what would leave room for a block, each on its own."""
        ranks = self._least_ranks(self.block_size)
        if ranks is not None:
            yield f"tensor parallelism over {ranks} devices"
        if self.dtype != "fp8" and replace(self, dtype="fp8").pool.num_blocks:
            yield "weights in fp8"
        block_nbytes = self.block_size * self.kv_nbytes_per_token
        missing = (block_nbytes - self.pool_nbytes) / self.hardware.memory_nbytes.value
        if self.utilization + missing <= _MOST_UTILIZATION:
            yield f"a utilization of {self.utilization + missing + 0.005:.2f}"
        if self.runtime_nbytes is None:
            activations = ACTIVATION_NBYTES.value * self.shape.hidden_size
            room = self.pool_nbytes + activations * self.max_num_batched_tokens - block_nbytes
            if room >= activations:
                yield f"steps of at most {int(room / activations):,} tokens"
        elif self.pool_nbytes + self.runtime_nbytes >= block_nbytes:
            most = _gb(self.pool_nbytes + self.runtime_nbytes - block_nbytes - 5e7)
            yield f"at most {most} for activations and runtime"
        if self.block_size > _USUAL_BLOCK and self.with_block_size(_USUAL_BLOCK).pool.num_blocks:
            yield f"blocks of {_USUAL_BLOCK} tokens"

    def _remedies(self, max_model_len: int) -> list[str]:
        room = self.pool.num_tokens
        remedies = [f"max_model_len of at most {room:,}"]
        missing = max_model_len * self.kv_nbytes_per_token - self.pool_nbytes
        utilization = self.utilization + missing / self.hardware.memory_nbytes.value
        if utilization <= _MOST_UTILIZATION:
            remedies.append(f"a utilization of {utilization + 0.005:.2f}")
        tokens = self.with_kv_dtype("fp8").pool.num_tokens
        if self.kv_dtype != "fp8" and tokens >= max_model_len:
            remedies.append(f"an fp8 KV cache ({tokens:,} tokens)")
        ranks = self._least_ranks(max_model_len)
        if ranks is not None:
            remedies.append(f"tensor parallelism over {ranks} devices")
        return remedies

    def _least_ranks(self, num_tokens: int) -> int | None:
        """Return the devices that would hold `num_tokens` tokens of KV; None: more than 64."""
        ranks = self.tensor_parallel_size * 2
        while ranks <= _MOST_RANKS:
            other = self.with_ranks(ranks)
            if _divides(self.shape, ranks) and other.pool.num_tokens >= num_tokens:
                return ranks
            ranks *= 2
        return None


def check_ranks(shape: ModelShape, num_ranks: int) -> None:
    """Refuse ranks over which no engine divides a model.

    Raises:
        CapacityError: some would have more heads than others.
    """
    if _divides(shape, num_ranks):
        return
    kv_heads = f", {shape.num_kv_heads} KV heads" if shape.num_kv_heads else ""
    raise CapacityError(
        f"{shape.num_query_heads} heads{kv_heads} do not divide over {num_ranks} devices; write a "
        "tensor parallel size that divides the heads, and divides or is a multiple of the KV heads"
    )


def _divides(shape: ModelShape, num_ranks: int) -> bool:
    kv_heads = shape.num_kv_heads
    divided = not kv_heads or kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0
    return divided and shape.num_query_heads % num_ranks == 0


def prefill_chunks(num_tokens: int, budget: int, num_decodes: int = 0) -> tuple[int, ...]:
    """Return the tokens of a prompt that each step computes beside `num_decodes` decodes.

    Args:
        budget: tokens of a step, of which every decode takes one first.

    Raises:
        ConfigError: the decodes leave no token for prefills, or there would be too many steps.
    """
    left = budget - num_decodes
    if left < 1:
        raise ConfigError(
            f"{num_decodes} decodes leave nothing of a step of {budget} tokens; raise "
            "max_num_batched_tokens, or lower max_num_seqs"
        )
    whole, rest = divmod(num_tokens, left)
    if whole > _MOST_CHUNKS:
        raise ConfigError(
            f"a prompt of {num_tokens:,} tokens takes {whole:,} steps of {left:,} tokens, at most "
            f"{_MOST_CHUNKS:,} are listed; give a shorter prompt, or raise max_num_batched_tokens"
        )
    return (left,) * whole + ((rest,) if rest else ())


def _helps(remedies: Sequence[str]) -> str:
    each = "This helps" if len(remedies) == 1 else "Any of these helps"
    return f"{each}: {'; '.join(remedies)}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
