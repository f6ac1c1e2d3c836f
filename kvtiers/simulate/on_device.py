"""The engine that `simulate`, `size` and `capacity` are asked about: a model on a device."""

from __future__ import annotations

from dataclasses import dataclass

from kvtiers.cost.catalogue import known_hardware
from kvtiers.cost.engine_memory import EngineMemory
from kvtiers.cost.model_source import load_shape


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A model on a device, with the engine's settings.

    Attributes:
        model: as `load_shape` takes it. hardware: a name that `known_hardware` knows.
        dtype: of the weights. kv_dtype: of the KV cache.
        tensor_parallel_size: devices of the engine.
        utilization: share of a device's memory that the engine claims.
        block_size: tokens of a block. max_num_batched_tokens: token budget of a step.
        max_num_seqs: sequences of a batch.
        max_model_len: tokens of the longest sequence; None: whatever fits.
        runtime_nbytes: memory of a device beside weights and KV; None: estimated.
    """

    model: str
    hardware: str
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    tensor_parallel_size: int = 1
    utilization: float = 0.9
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int | None = None
    runtime_nbytes: int | None = None

    def memory(self) -> EngineMemory:
        """Return the engine's memory; it may be too small, see `EngineMemory.check`.

        Raises:
            ConfigError: a name is not known, or a value makes no sense.
        """
        return EngineMemory(
            load_shape(self.model)[0],
            known_hardware(self.hardware),
            self.dtype,
            self.kv_dtype,
            self.tensor_parallel_size,
            self.utilization,
            self.block_size,
            self.max_num_batched_tokens,
            self.runtime_nbytes,
        )
