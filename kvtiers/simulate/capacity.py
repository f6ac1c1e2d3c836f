"""The answer of ``kvtiers capacity``: what an engine holds, what binds it, and what fp8 changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtiers.cost.capacity import Limit
from kvtiers.cost.engine_memory import (
    ACTIVATION_NBYTES,
    RUNTIME_NBYTES,
    EngineMemory,
    prefill_chunks,
)
from kvtiers.cost.hardware import Figure
from kvtiers.cost.model_source import load_shape
from kvtiers.model.units import counted
from kvtiers.simulate.on_device import OnDevice


@dataclass(frozen=True, slots=True)
class CapacityPlan(OnDevice):
    """What `kvtiers capacity` is asked.

    Attributes:
        average_context: tokens of a running sequence, prompt and output so far.
        prompt_tokens: of the prompt whose steps are counted. num_decodes: that run beside it.
    """

    average_context: int = 4000
    prompt_tokens: int = 30_000
    num_decodes: int = 0


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of one data type.

    Attributes:
        nbytes_per_token: of one device. num_tokens: of the pool.
        num_seqs: that run at once without preempting each other. limit: what binds them.
    """

    kv_dtype: str
    nbytes_per_token: int
    num_blocks: int
    num_tokens: int
    num_seqs_by_kv: int
    num_seqs: int
    limit: Limit


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """What `kvtiers capacity` answers.

    Attributes:
        title: model and devices, in words. model_source: where the model's shape was read.
        memory_nbytes, claimed_nbytes: of one device: all, and what the engine may use.
        weights_nbytes, other_nbytes, pool_nbytes: of one device.
        pools: that of the plan first, then that of an fp8 cache, unless it is one.
        chunks: tokens of the prompt, step by step. notes: what binds, and what would help.
        assumptions: figures that were estimated, with their sources.
    """

    plan: CapacityPlan
    title: str
    model_source: str
    memory_nbytes: int
    claimed_nbytes: int
    weights_nbytes: int
    other_nbytes: int
    pool_nbytes: int
    pools: tuple[PoolSize, ...]
    chunks: tuple[int, ...]
    notes: tuple[str, ...]
    assumptions: Mapping[str, Figure]

    @property
    def summary(self) -> str:
        """The answer in a few words."""
        context = counted(self.plan.average_context, "token")
        held = [
            f"{pool.num_tokens:,} tokens of KV in {pool.kv_dtype}, "
            f"{counted(pool.num_seqs, 'sequence')} of {context}"
            for pool in self.pools
        ]
        return (
            f"{self.title} holds {'; or '.join(held)}. What a trace gains from DRAM and NVMe below "
            "it: kvtiers size."
        )

    @property
    def steps(self) -> str:
        """How long the prompt takes, in words."""
        plan = self.plan
        beside = f" beside {counted(plan.num_decodes, 'decode')}" if plan.num_decodes else ""
        return (
            f"A prompt of {counted(plan.prompt_tokens, 'token')} takes "
            f"{counted(len(self.chunks), 'step')}{beside}: {counted(self.chunks[0], 'token')} in "
            "the first."
        )

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"ok": True, **asdict(self)}


def work_out(plan: CapacityPlan) -> CapacityResult:
    """Work out what an engine's KV pool holds.

    Raises:
        ConfigError: a name is not known, or a value makes no sense.
        CapacityError: such an engine would not start; the message says what would help.
    """
    memory = plan.memory()
    memory.check(plan.max_model_len)
    pools = [_pool(plan, memory)]
    if plan.kv_dtype != "fp8":
        pools.append(_pool(plan, memory.with_kv_dtype("fp8")))
    ranks = f"{plan.tensor_parallel_size} x " if plan.tensor_parallel_size > 1 else ""
    return CapacityResult(
        plan=plan,
        title=f"{plan.model} on {ranks}{memory.hardware.title}",
        model_source=load_shape(plan.model)[1],
        memory_nbytes=int(memory.hardware.memory_nbytes.value),
        claimed_nbytes=memory.claimed_nbytes,
        weights_nbytes=memory.weights_nbytes,
        other_nbytes=memory.other_nbytes,
        pool_nbytes=memory.pool_nbytes,
        pools=tuple(pools),
        chunks=prefill_chunks(plan.prompt_tokens, plan.max_num_batched_tokens, plan.num_decodes),
        notes=tuple(_notes(plan, memory, pools[0])),
        assumptions=_assumptions(memory),
    )


def _pool(plan: CapacityPlan, memory: EngineMemory) -> PoolSize:
    pool = memory.pool
    found = pool.concurrency(plan.average_context, plan.max_num_seqs)
    return PoolSize(
        kv_dtype=memory.kv_dtype,
        nbytes_per_token=memory.kv_nbytes_per_token,
        num_blocks=pool.num_blocks,
        num_tokens=pool.num_tokens,
        num_seqs_by_kv=found.num_kv,
        num_seqs=found.num_sequences,
        limit=found.limit,
    )


def _notes(plan: CapacityPlan, memory: EngineMemory, pool: PoolSize) -> list[str]:
    notes, context = [], counted(plan.average_context, "token")
    if not pool.num_seqs_by_kv:
        notes.append(
            f"KV does not hold one sequence of {context}: it would be refused, or preempt itself. "
            f"The pool has {pool.num_tokens:,} tokens; cap the context, or add capacity (fp8, "
            "tensor parallelism)."
        )
    elif pool.limit is Limit.KV and pool.num_seqs < plan.max_num_seqs:
        notes.append(
            f"KV binds: it holds {counted(pool.num_seqs, 'sequence')} of {context}, max_num_seqs "
            f"is {plan.max_num_seqs:,}. The others are preempted again and again instead of "
            f"served: set max_num_seqs to about {max(1, pool.num_seqs):,}, cap the context, or "
            "add capacity (fp8, tensor parallelism, a lower tier)."
        )
    elif pool.limit is Limit.MAX_NUM_SEQS:
        notes.append(
            f"max_num_seqs binds: KV would hold {counted(pool.num_seqs_by_kv, 'sequence')} of "
            f"{context}. What is left of the pool is prefix cache."
        )
    if plan.max_model_len is None:
        notes.append("The longest sequence was not checked; give --max-model-len.")
    if memory.shape.num_window_layers:
        notes.append(
            f"{memory.shape.num_window_layers} of {memory.shape.num_layers} layers look back "
            f"{memory.shape.window:,} tokens only: longer sequences need less KV than is counted."
        )
    return notes


def _assumptions(memory: EngineMemory) -> dict[str, Figure]:
    found = {f"{memory.hardware.title}, memory": memory.hardware.memory_nbytes}
    if memory.runtime_nbytes is None:
        found["runtime, bytes"] = RUNTIME_NBYTES
        found["activations, bytes a token of a step and unit of hidden size"] = ACTIVATION_NBYTES
    return found
