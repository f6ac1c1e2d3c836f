"""The decision, measured in real vLLM on the CPU: how far off predictions are, and what they cost.

    python bench/decide.py predict            # prediction error, on lengths that were not fitted
    python bench/decide.py stall              # a store that drops to 1 % of its speed, and recovers
    python bench/decide.py regret --max-seconds 170    # again and again, until no cell is missing
    python bench/decide.py regret --concurrency 8 --factors 0.5 2 --repeats 3   # some cells anew

Blocks lie in a memory store that is as slow as one wants, so that loading is now faster, now slower
than computing. Bandwidths are multiples of the one at which both take alike, measured at the start.
Regret is the mean time to the first token where kvtiers decides, over the better of computing
everything and loading everything; the three take turns, and follow a change of the bandwidth by
some loads of other lengths, which show it to kvtiers. Results go to bench/results/decide.*, cell
by cell. With `--max-seconds` only cells that are not there yet are measured, and none is begun that
would end later; the program says how many are missing still.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from decide_report import page
from decide_split import split

from kvtiers.bench.engine_process import engine_environment
from kvtiers.bench.random_model import RandomModel, write_random_model
from kvtiers.control.tier import Residence
from kvtiers.model.cost_mode import CostMode

RESULTS = Path(__file__).parent / "results"
MODEL = RandomModel(
    num_layers=6,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=1408,
    vocab_size=512,
    max_position_embeddings=8192,
    dtype="bfloat16",
)
BLOCK_SIZE, STEP_TOKENS, LONGEST = 32, 1024, 2049
NUM_DOCUMENTS = 8
FITTED = (257, 513, 1025, 1537)  # lengths of prompts that teach
JUDGED = (385, 769, 1281, 2049)
LENGTHS = (513, 2049)  # of requests that come at once
MODES = (CostMode.NEVER, CostMode.ALWAYS, CostMode.AUTO)


@dataclass(frozen=True)
class Shot:
    """Requests that came at once: times to their first tokens, and what was predicted."""

    ttft_seconds: float
    predicted_seconds: float | None
    num_loaded: int
    num_failed: int
    load_seconds: float | None
    predicted_load_seconds: float | None


class Engine:
    """One engine with one store, whose bandwidth and mode of deciding can be set."""

    def __init__(self, folder: Path, num_ranges: int = 1) -> None:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - takes seconds
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        self.throttle = throttle_memory_stores()
        config = {
            "tiers": [
                {"kind": "dram", "capacity": "160MiB"},
                {"kind": "memory", "capacity": "1GiB"},
            ],
            # No queue, and one way for all loads. Loading everything from a slow store takes longer
            # than the default's 10 s, and would switch it off for a while, for all.
            "reload": {"prefetch": "off", "sync_below": "0ms", "deadline": "60s"}
            | {"layer_ranges": num_ranges},
        }
        args = EngineArgs(
            model=str(write_random_model(MODEL, folder)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=MODEL.dtype,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST + BLOCK_SIZE,
            max_num_batched_tokens=STEP_TOKENS,
            num_gpu_blocks_override=(NUM_DOCUMENTS + 1) * (LONGEST // BLOCK_SIZE + 2),
            max_num_seqs=NUM_DOCUMENTS,
            disable_log_stats=True,
            seed=0,
            kv_transfer_config={
                "kv_connector": "KVTiersConnector",
                "kv_connector_module_path": "kvtiers.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"config": config},
            },
        )
        self._engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        rng = np.random.default_rng(0)
        self._documents = rng.integers(0, MODEL.vocab_size, (NUM_DOCUMENTS, LONGEST)).tolist()
        self._ids = itertools.count()
        for document in range(NUM_DOCUMENTS):
            self.shoot(LONGEST, CostMode.NEVER, [document])

    @property
    def connector(self) -> Any:
        """The engine-neutral connector."""
        return self._engine.engine_core.engine_core.scheduler.connector.scheduler_side.connector

    def set_bandwidth(self, bytes_per_second: float) -> None:
        """Make the store so fast, and let kvtiers see it by loads of other lengths."""
        self.throttle(bytes_per_second)
        for num_tokens in FITTED:
            self.shoot(num_tokens, CostMode.ALWAYS, [0])

    def shoot(
        self, num_tokens: int, mode: CostMode, documents: Sequence[int], *, settle: bool = True
    ) -> Shot:
        """Ask for the first tokens of some documents at once, which only the store has.

        Args:
            settle: wait for what the store still does for them.
        """
        from vllm import SamplingParams  # noqa: PLC0415

        self._forget()
        num_before = len(self.connector.decisions.finished())
        cost = self.connector.controller.cost
        cost.policy = replace(cost.policy, mode=mode)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        ids = [f"{mode}-{next(self._ids)}" for _ in documents]
        started = time.perf_counter()
        for request_id, document in zip(ids, documents, strict=True):
            prompt = {"prompt_token_ids": self._documents[document][:num_tokens]}
            self._engine.add_request(request_id, prompt, params)
        first: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first.setdefault(output.request_id, time.perf_counter() - started)
        while settle and self.connector.busy:
            self._engine.step()
        decisions = self.connector.decisions.finished()[num_before:]
        outcomes = [decision.outcome for decision in decisions]
        alone = decisions[0] if len(documents) == 1 and decisions else None
        return Shot(
            statistics.fmean(first.values()),
            None if alone is None else alone.predicted_seconds["chosen"],
            sum(outcome.num_loaded_blocks for outcome in outcomes),
            sum(outcome.num_failed_blocks for outcome in outcomes),
            None if alone is None else alone.outcome.measured_seconds,
            None if alone is None else alone.predicted_seconds["load"],
        )

    def _forget(self) -> None:
        """Leave all blocks to the store."""
        while not self._engine.reset_prefix_cache(False, False):
            self._engine.step()
        dram = self.connector.controller.dram
        for entry in [e for e in dram.entries() if e.residence is Residence.READY]:
            dram.doom(entry)


def throttle_memory_stores() -> Any:
    """Put a throttle on every memory store of engines to come; returns what sets it."""
    import kvtiers.connector.stores as stores  # noqa: PLC0415 - the module is changed
    from kvtiers.data.memory_store import MemoryStore  # noqa: PLC0415
    from kvtiers.testing.faults import ThrottledStore  # noqa: PLC0415

    made: list[ThrottledStore] = []

    def make(slab: Any, capacity_nbytes: int) -> ThrottledStore:
        made.append(ThrottledStore(MemoryStore(slab, capacity_nbytes), 1e12))
        return made[-1]

    def throttle(bytes_per_second: float) -> None:
        for store in made:
            store.bytes_per_second = bytes_per_second

    stores.MemoryStore = make  # type: ignore[misc, assignment]
    return throttle


def break_even(engine: Engine) -> float:
    """Return the bytes per second at which loading the longest prompt takes as computing does."""
    computed = [engine.shoot(LONGEST, CostMode.NEVER, [i]).ttft_seconds for i in range(3)]
    for num_tokens in (*FITTED, *FITTED):
        engine.shoot(num_tokens, CostMode.NEVER, [1])
    return MODEL.kv_nbytes_per_token * (LONGEST - 1) / statistics.median(computed)


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def predict(engine: Engine, unit: float, repeats: int) -> dict[str, Any]:
    """Compare predictions with what happens, one request at a time."""
    rows = []
    for factor in (1.0, 8.0):
        engine.set_bandwidth(factor * unit)
        for num_tokens in JUDGED:
            for mode in (CostMode.NEVER, CostMode.ALWAYS):
                shots = [engine.shoot(num_tokens, mode, [i % 8]) for i in range(repeats)]
                rows.append(
                    {
                        "what": "recompute" if mode is CostMode.NEVER else "reload",
                        "bandwidth_factor": factor,
                        "num_tokens": num_tokens,
                        "measured_ms": 1e3 * statistics.median(s.ttft_seconds for s in shots),
                        "errors": [
                            abs((s.predicted_seconds or 0.0) - s.ttft_seconds) / s.ttft_seconds
                            for s in shots
                        ],
                        "load_errors": [
                            abs((s.predicted_load_seconds or 0.0) - s.load_seconds) / s.load_seconds
                            for s in shots
                            if s.load_seconds
                        ],
                        "spread": spread([s.ttft_seconds for s in shots]),
                        "num_failed": sum(s.num_failed for s in shots),
                    }
                )
    return {"rows": rows}


@dataclass(frozen=True, order=True)
class Place:
    """Where in the grid of regrets a cell is."""

    concurrency: int
    bandwidth_factor: float
    num_tokens: int

    @classmethod
    def of(cls, cell: dict[str, Any]) -> Place:
        """Return a measured cell's."""
        return cls(cell["concurrency"], cell["bandwidth_factor"], cell["num_tokens"])

    def seconds(self, computed: float, repeats: int) -> float:
        """Return about how long it takes to measure, from how long the longest prompt takes."""
        alone = computed * self.num_tokens / LONGEST
        loads = 1 / self.bandwidth_factor
        return repeats * self.concurrency * alone * (2 + loads) + len(FITTED) * computed * loads


def regret(engine: Engine, unit: float, at: Place, repeats: int) -> dict[str, Any]:
    """Compare deciding with the better of both pure choices, in one cell."""
    engine.set_bandwidth(at.bandwidth_factor * unit)
    shots: dict[CostMode, list[Shot]] = {mode: [] for mode in MODES}
    for i in range(repeats):
        for mode in MODES[i % 3 :] + MODES[: i % 3]:
            shots[mode].append(engine.shoot(at.num_tokens, mode, range(at.concurrency)))
    ttft = {m: [s.ttft_seconds for s in shots[m]] for m in MODES}
    better = min(MODES[:2], key=lambda m: statistics.median(ttft[m]))
    return {
        **asdict(at),
        "ms": {m.value: 1e3 * statistics.median(ttft[m]) for m in MODES},
        "regret": statistics.median(ttft[CostMode.AUTO]) / statistics.median(ttft[better]) - 1,
        "spread": max(spread(ttft[better]), spread(ttft[CostMode.AUTO])),
        "blocks_loaded": statistics.median(s.num_loaded for s in shots[CostMode.AUTO]),
        "blocks_failed": sum(s.num_failed for s in shots[CostMode.AUTO]),
        "repeats": repeats,
    }


def regrets(engine: Engine, unit: float, result: Result, args: argparse.Namespace) -> None:
    """Measure the cells that were asked for; see the module."""
    grid = itertools.product(args.concurrency, args.factors, LENGTHS)
    wanted = [Place(*place) for place in grid]
    cells = {Place.of(cell): cell for cell in result.held.get("cells", [])}
    if args.max_seconds:
        wanted = [place for place in wanted if place not in cells]
    computed = MODEL.kv_nbytes_per_token * (LONGEST - 1) / unit
    for done, at in enumerate(wanted):
        ends = time.monotonic() + at.seconds(computed, args.repeats)
        if args.max_seconds and ends > result.began + args.max_seconds:
            print(f"{len(wanted) - done} cells are missing; run this again")
            return
        cells[at] = regret(engine, unit, at, args.repeats)
        result.keep("cells", [cells[place] for place in sorted(cells)], unit)
    print("no cell is missing")


@contextmanager
def engine_here(num_ranges: int = 1) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        yield Engine(Path(folder), num_ranges)


def device() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def stall(engine: Engine, unit: float) -> dict[str, Any]:
    """Let the store drop to a hundredth of its bandwidth in mid-run, and recover."""
    computed = statistics.median(
        engine.shoot(LONGEST, CostMode.NEVER, [i]).ttft_seconds for i in range(5)
    )
    engine.set_bandwidth(8 * unit)
    started, row = time.monotonic(), itertools.count()
    served: list[dict[str, Any]] = []

    def serve_until(phase: str, seconds: float, *, until_all: bool = False) -> None:
        while time.monotonic() - started < seconds:
            shot = engine.shoot(LONGEST, CostMode.AUTO, [next(row) % 8], settle=False)
            served.append(
                {
                    "phase": phase,
                    "at_seconds": time.monotonic() - started,
                    "ttft_ms": 1e3 * shot.ttft_seconds,
                    "num_loaded": shot.num_loaded,
                    "num_failed": shot.num_failed,
                }
            )
            if until_all and shot.num_loaded == (LONGEST - 1) // BLOCK_SIZE:
                return

    serve_until("before", 5)
    engine.throttle(0.08 * unit)
    serve_until("stalled", 40)
    engine.throttle(8 * unit)
    serve_until("after", 120, until_all=True)
    return {"computed_ms": 1e3 * computed, "served": served}


class Result:
    """What is measured so far, on disk.

    Attributes:
        held: all of it. began: when this program did, on `time.monotonic`.
    """

    def __init__(self, path: Path, began: float) -> None:
        self._path = path
        self.began = began
        self.held: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def keep(self, name: str, part: Any, unit: float) -> None:
        """Write a part in place of the one before."""
        facts = {"device": device(), "date": datetime.now(UTC).date().isoformat()}
        load = round(os.getloadavg()[0], 1)
        self.held |= {**facts, "unit": unit, "load": load, "model": asdict(MODEL), name: part}
        self.held |= {
            "kv_nbytes_per_token": MODEL.kv_nbytes_per_token,
            "step_tokens": STEP_TOKENS,
        }
        self._path.write_text(json.dumps(self.held, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(page(self.held))


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("piece", choices=["predict", "regret", "stall", "split"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 8.0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-seconds", type=float, default=0.0, help="only what is missing")
    parser.add_argument("--out", type=Path, default=RESULTS / "decide.json")
    args = parser.parse_args()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":  # before torch is loaded
        os.execve(
            sys.executable, [sys.executable, "-W", "ignore", *sys.argv], engine_environment(1)
        )
    result = Result(args.out, began)
    with engine_here(MODEL.num_layers if args.piece == "split" else 1) as engine:
        unit = break_even(engine)
        if args.piece == "predict":
            result.keep("predict", predict(engine, unit, args.repeats), unit)
        elif args.piece == "stall":
            result.keep("stall", stall(engine, unit), unit)
        elif args.piece == "split":
            result.keep("split", split(engine, unit, MODEL.num_layers, args.repeats), unit)
        else:
            regrets(engine, unit, result, args)
    print(page(result.held), flush=True)
    os._exit(0)  # vLLM's threads need not be waited for


if __name__ == "__main__":
    main()
