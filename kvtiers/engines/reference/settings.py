"""The settings of the reference engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtiers.cost.preempt import PreemptMode
from kvtiers.model.errors import CapacityError, ConfigError


class Policy(StrEnum):
    """In which order waiting requests are admitted, and running ones preempted."""

    FCFS = "fcfs"  # as they came; the last one admitted is preempted
    PRIORITY = "priority"  # the smallest number first; the largest is preempted


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine; defaults are typical of vLLM on a GPU, but for `watermark`.

    Attributes:
        num_blocks: KV blocks that requests can have. max_model_len: tokens of the longest
            sequence, prompt and output together.
        block_size: tokens of a block.
        blocks_per_hash: engine blocks that one content hash names, and that travel as one through
            kvtiers: 1 where real tokens are hashed, 32 where an id of a trace covers 512 tokens.
        max_num_batched_tokens: token budget of a step. max_num_seqs: sequences in a batch.
        long_prefill_threshold: most tokens of one prompt in one step; 0 for any number.
        watermark: share of the blocks that an admission leaves free, for running ones to grow.
        preemption: how victims come back; without kvtiers they are always computed again.
        num_speculative_tokens: tokens that a decode tries beside its own.
        tenant_share: share of the blocks that one tenant may hold with all its requests; 1 for no
            bound. A tenant that holds nothing is always admitted.
        prefix_caching: whether KV of the past is looked for in HBM.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    blocks_per_hash: int = 1
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    long_prefill_threshold: int = 0
    watermark: float = 0.01
    policy: Policy = Policy.FCFS
    preemption: PreemptMode = PreemptMode.COST
    num_speculative_tokens: int = 0
    tenant_share: float = 1.0
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        counts = ("num_blocks", "max_model_len", "block_size", "blocks_per_hash", "max_num_seqs")
        for name in (*counts, "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; must be at least 1")
        for name in ("long_prefill_threshold", "num_speculative_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; must not be negative")
        if not 0 <= self.watermark < 1 or not 0 < self.tenant_share <= 1:
            raise ConfigError(
                f"watermark {self.watermark} must be in [0, 1), tenant_share "
                f"{self.tenant_share} in (0, 1]"
            )
        decodes = self.max_num_seqs * self.num_decode_tokens
        if decodes > self.max_num_batched_tokens:
            raise ConfigError(
                f"{self.max_num_seqs} sequences decode {decodes} tokens a step, max_num_batched_"
                f"tokens is {self.max_num_batched_tokens}: some would never get on; raise it, or "
                "lower max_num_seqs"
            )
        self._check_longest()

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free."""
        return int(self.watermark * self.num_blocks)

    @property
    def hash_tokens(self) -> int:
        """Tokens that one hash, and one block of kvtiers, covers."""
        return self.block_size * self.blocks_per_hash

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of one sequence's decode."""
        return 1 + self.num_speculative_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def _check_longest(self) -> None:
        """Refuse a pool in which the longest sequence could never run, even alone."""
        needed = self.blocks_for(self.max_model_len)
        room = self.num_blocks - self.watermark_blocks
        if needed > room:
            raise CapacityError(
                f"one sequence of max_model_len {self.max_model_len:,} needs {needed:,} KV blocks "
                f"of {self.block_size} tokens, the pool has {room:,} above the watermark. Any of "
                f"these helps: max_model_len of at most {room * self.block_size:,}, a higher "
                "gpu_memory_utilization, an fp8 KV cache (twice the blocks), tensor parallelism"
            )
