"""The demonstration: one long prompt, computed, found in HBM, and reloaded from each tier."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtiers.bench.engine_process import EngineProcess
from kvtiers.bench.random_model import DEMO, RandomModel, write_random_model
from kvtiers.engines.vllm.drive import Measured, Script

DRAM_CAPACITY: Final = "1GiB"

RECOMPUTE: Final = "recompute"
PREFIX_HIT: Final = "vLLM prefix hit"
STORE: Final = "recompute, offload"
RELOAD: Final = "reload from DRAM"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demonstration runs.

    Attributes:
        model: a random one; its output depends on its KV. num_prompt_tokens: of the prompt.
        num_repeats: of every quick measurement; medians are shown.
        num_threads: OpenMP threads of the engine on the CPU.
    """

    model: RandomModel = field(default_factory=lambda: replace(DEMO, dtype="float32"))
    num_prompt_tokens: int = 4096
    num_output_tokens: int = 16
    num_repeats: int = 5
    num_threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    block_size: int = 32
    dram_capacity: str = DRAM_CAPACITY

    @property
    def kvtiers(self) -> dict[str, Any]:
        """The configuration: embedded defaults, in a size that any machine has."""
        return {"tiers": [{"kind": "dram", "capacity": self.dram_capacity}]}


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One line of the table.

    Attributes:
        ttft_seconds: median over the runs. speedup: over RECOMPUTE.
        num_reloaded_tokens, num_cached_tokens, num_computed_tokens: of the prompt.
        nbytes: moved into HBM.
        same_tokens: whether every run gave the tokens of RECOMPUTE.
    """

    name: str
    num_runs: int
    ttft_seconds: float
    speedup: float
    num_reloaded_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    nbytes: int
    same_tokens: bool


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The table, and what it was measured on."""

    device: str
    plan: DemoPlan
    rows: tuple[DemoRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every row gave the same tokens, and the reload reloaded."""
        return all(row.same_tokens for row in self.rows) and any(
            row.num_reloaded_tokens for row in self.rows
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"ok": self.ok, "device": self.device, "plan": asdict(self.plan), "rows": rows}


def num_events(plan: DemoPlan) -> int:
    """Return how many events `run_demo` reports."""
    return sum(1 + len(steps) for steps in (_plain_steps(plan), _tiered_steps(plan)))


def run_demo(plan: DemoPlan, folder: Path, progress: Callable[[str], None]) -> DemoResult:
    """Run both engines, one after the other, each in a process of its own.

    Args:
        folder: where the model is written, and found again by a later run.
        progress: called with what happens next, `num_events` times.

    Raises:
        EngineProcessError: an engine failed.
    """
    model = write_random_model(plan.model, folder)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, plan.model.vocab_size, plan.num_prompt_tokens).tolist()
    warm_up = rng.integers(0, plan.model.vocab_size, 2 * plan.block_size).tolist()
    runs: dict[str, list[Measured]] = {}
    device = ""
    for steps, kvtiers in ((_plain_steps(plan), None), (_tiered_steps(plan), plan.kvtiers)):
        script = Script(engine_args(plan, model, kvtiers), prompt, warm_up, plan.num_output_tokens)
        with EngineProcess(script, plan.num_threads) as engine:
            device = engine.device
            progress("started")
            for name, what in steps:
                progress(name)
                runs.setdefault(name, []).append(engine.run(name, what))
    return DemoResult(device, plan, tuple(_row(plan, name, runs) for name in runs))


def _plain_steps(plan: DemoPlan) -> list[tuple[str, str]]:
    return [(RECOMPUTE, "drop")] * 2 + [(PREFIX_HIT, "keep")] * plan.num_repeats


def _tiered_steps(plan: DemoPlan) -> list[tuple[str, str]]:
    return [(STORE, "fresh")] * 2 + [(RELOAD, "drop")] * plan.num_repeats


def engine_args(plan: DemoPlan, model: Path, kvtiers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the engine that the plan describes, with or without kvtiers."""
    num_tokens = plan.num_prompt_tokens + plan.num_output_tokens
    args: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": plan.model.dtype,
        "block_size": plan.block_size,
        "max_model_len": num_tokens + plan.block_size,
        "num_gpu_blocks_override": 2 * num_tokens // plan.block_size,
        "max_num_seqs": 4,
        "disable_log_stats": True,
        "seed": 0,
    }
    if kvtiers is not None:
        args["kv_transfer_config"] = {
            "kv_connector": "KVTiersConnector",
            "kv_connector_module_path": "kvtiers.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"config": dict(kvtiers)},
        }
    return args


def _row(plan: DemoPlan, name: str, runs: Mapping[str, list[Measured]]) -> DemoRow:
    baseline = statistics.median(run.ttft_seconds for run in runs[RECOMPUTE])
    expected = runs[RECOMPUTE][0].token_ids
    mine = runs[name]
    ttft = statistics.median(run.ttft_seconds for run in mine)
    reloaded = int(statistics.median(sum(run.reloaded_tokens.values()) for run in mine))
    cached = int(statistics.median(run.num_cached_tokens for run in mine))
    return DemoRow(
        name=name,
        num_runs=len(mine),
        ttft_seconds=ttft,
        speedup=baseline / ttft,
        num_reloaded_tokens=reloaded,
        num_cached_tokens=cached,
        num_computed_tokens=plan.num_prompt_tokens - cached,
        nbytes=reloaded * plan.model.kv_nbytes_per_token,
        same_tokens=all(run.token_ids == expected for run in mine),
    )
