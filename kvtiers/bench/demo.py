"""The demonstration: one long prompt, computed, found in HBM, and reloaded from each tier."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtiers.bench.engine_process import EngineProcess
from kvtiers.bench.random_model import DEMO, RandomModel, write_random_model
from kvtiers.engines.vllm.drive import Measured, Script

DRAM_CAPACITY: Final = "1GiB"
STAGING_CAPACITY: Final = "32MiB"  # of engines that shall find little in DRAM
STORE_CAPACITY: Final = "512MiB"

RECOMPUTE: Final = "recompute"
PREFIX_HIT: Final = "vLLM prefix hit"
STORE: Final = "recompute, offload"
DRAM: Final = "reload from DRAM"
OTHER_ENGINE: Final = "LMDB, another engine"
LMDB: Final = "LMDB, again"
RESTARTED: Final = "NVMe, after a restart"
NVME: Final = "NVMe, again"


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
    store_capacity: str = STORE_CAPACITY

    @property
    def kvtiers(self) -> dict[str, Any]:
        """The configuration without stores, in a size that any machine has."""
        return {"tiers": [{"kind": "dram", "capacity": self.dram_capacity}]}

    def with_stores(self, folder: Path, dram_capacity: str, *kinds: str) -> dict[str, Any]:
        """Return the configuration with stores of some kinds below a folder."""
        stores: dict[str, dict[str, Any]] = {
            "nvme": {"kind": "nvme", "paths": [str(folder / "nvme")]},
            "lmdb": {"kind": "lmdb", "path": str(folder / "shared.lmdb")},
        }
        tiers = [{**stores[kind], "capacity": self.store_capacity} for kind in kinds]
        return {"tiers": [{"kind": "dram", "capacity": dram_capacity}, *tiers]}


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One line of the table.

    Attributes:
        ttft_seconds: median over the runs. speedup: over RECOMPUTE.
        num_reloaded_tokens, num_cached_tokens, num_computed_tokens: of the prompt.
        reloaded_from: tokens of the prompt by tier, in the median run.
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
    reloaded_from: dict[str, int]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The table, and what it was measured on."""

    device: str
    plan: DemoPlan
    rows: tuple[DemoRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every row gave the same tokens, and each reload reloaded."""
        computes = (RECOMPUTE, PREFIX_HIT, STORE)
        return all(
            row.same_tokens and (row.num_reloaded_tokens > 0) == (row.name not in computes)
            for row in self.rows
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"ok": self.ok, "device": self.device, "plan": asdict(self.plan), "rows": rows}


Runs = dict[str, list[Measured]]


def num_events(plan: DemoPlan) -> int:
    """Return how many events `run_demo` reports: four engines that start, and all runs."""
    return 4 + 2 + plan.num_repeats + 1 + plan.num_repeats + 2 * (1 + plan.num_repeats)


def run_demo(plan: DemoPlan, folder: Path, progress: Callable[[str], None]) -> DemoResult:
    """Run the engines, each in a process of its own.

    One without kvtiers; one that computes and stores; beside it, another one that shares its
    LMDB store; and, after these have ended, one that finds what is on the disk.

    Args:
        folder: where the model is written, and found again by a later run.
        progress: called with what happens next, `num_events` times.

    Raises:
        EngineProcessError: an engine failed.
    """
    demo = _Demo(plan, write_random_model(plan.model, folder), progress)
    repeats = plan.num_repeats
    with tempfile.TemporaryDirectory(prefix="stores-", dir=folder) as temporary:
        stores = Path(temporary)
        with demo.engine(None) as plain:
            demo.run(plain, RECOMPUTE, "drop", 2)
            demo.run(plain, PREFIX_HIT, "keep", repeats)
        everything = plan.with_stores(stores, plan.dram_capacity, "nvme", "lmdb")
        with demo.engine(everything) as first:
            demo.run(first, STORE, "drop", 1)
            first.settle()
            demo.run(first, DRAM, "drop", repeats)
            with demo.engine(plan.with_stores(stores, STAGING_CAPACITY, "lmdb")) as second:
                demo.run(second, OTHER_ENGINE, "drop", 1)
                demo.run(second, LMDB, "drop", repeats)
        with demo.engine(plan.with_stores(stores, STAGING_CAPACITY, "nvme")) as third:
            demo.run(third, RESTARTED, "drop", 1)
            demo.run(third, NVME, "drop", repeats)
    rows = tuple(_row(plan, name, demo.runs) for name in demo.runs)
    return DemoResult(demo.device, plan, rows)


class _Demo:
    """Starts engines and collects what they measured."""

    def __init__(self, plan: DemoPlan, model: Path, progress: Callable[[str], None]) -> None:
        rng = np.random.default_rng(0)
        vocab_size = plan.model.vocab_size
        self._plan = plan
        self._model = model
        self._prompt = rng.integers(0, vocab_size, plan.num_prompt_tokens).tolist()
        self._warm_up = rng.integers(0, vocab_size, 2 * plan.block_size).tolist()
        self._progress = progress
        self.runs: Runs = {}
        self.device = ""

    def engine(self, kvtiers: Mapping[str, Any] | None) -> EngineProcess:
        """Start an engine."""
        args = engine_args(self._plan, self._model, kvtiers)
        script = Script(args, self._prompt, self._warm_up, self._plan.num_output_tokens)
        self._progress("an engine starts")
        engine = EngineProcess(script, self._plan.num_threads)
        self.device = engine.device
        return engine

    def run(self, engine: EngineProcess, name: str, what: str, num_runs: int) -> None:
        """Measure the prompt a few times; see `kvtiers.engines.vllm.drive` for `what`."""
        for _ in range(num_runs):
            self._progress(name)
            self.runs.setdefault(name, []).append(engine.run(name, what))


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


def _row(plan: DemoPlan, name: str, runs: Runs) -> DemoRow:
    baseline = statistics.median(run.ttft_seconds for run in runs[RECOMPUTE])
    expected = runs[RECOMPUTE][0].token_ids
    mine = runs[name]
    ttft = statistics.median(run.ttft_seconds for run in mine)
    reloaded = int(statistics.median(map(_reloaded, mine)))
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
        reloaded_from=dict(sorted(mine, key=_reloaded)[len(mine) // 2].reloaded_tokens),
    )


def _reloaded(run: Measured) -> int:
    return sum(run.reloaded_tokens.values())
