"""The decision, measured in real vLLM on the CPU: how far off predictions are, and what they cost.

    python bench/decide.py predict            # prediction error, on lengths that were not fitted
    python bench/decide.py stall              # a store that drops to 1 % of its speed, and recovers
    python bench/decide.py regret --max-seconds 170    # again and again, until no cell is missing
    python bench/decide.py regret --concurrency 8 --factors 0.5 2 --repeats 3   # some cells anew
    python bench/decide.py split              # loads within the step that computes the rest

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
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decide_engine import (
    BLOCK_SIZE,
    FITTED,
    LAYERED,
    LONGEST,
    PLAIN,
    Engine,
    Setup,
    Shot,
    engine_here,
)
from decide_report import page
from decide_split import split
from options import at_least

from kvtiers.bench.engine_process import engine_environment
from kvtiers.model.cost_mode import CostMode

RESULTS = Path(__file__).parent / "results"
JUDGED = (385, 769, 1281, 2049)
LENGTHS = (513, 2049)  # of requests that come at once
MODES = (CostMode.NEVER, CostMode.ALWAYS, CostMode.AUTO)


def break_even(engine: Engine) -> float:
    """Return the bytes per second at which loading the longest prompt takes as computing does."""
    computed = [engine.shoot(LONGEST, CostMode.NEVER, [i]).ttft_seconds for i in range(3)]
    for num_tokens in (*FITTED, *FITTED):
        engine.shoot(num_tokens, CostMode.NEVER, [1])
    nbytes = engine.setup.model.kv_nbytes_per_token * (LONGEST - 1)
    return nbytes / statistics.median(computed)


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
    computed = engine.setup.model.kv_nbytes_per_token * (LONGEST - 1) / unit
    for done, at in enumerate(wanted):
        ends = time.monotonic() + at.seconds(computed, args.repeats)
        if args.max_seconds and ends > result.began + args.max_seconds:
            print(f"{len(wanted) - done} cells are missing; run this again")
            return
        cells[at] = regret(engine, unit, at, args.repeats)
        result.keep("cells", [cells[place] for place in sorted(cells)], unit)
    print("no cell is missing")


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

    def __init__(self, path: Path, setup: Setup, began: float) -> None:
        self._path, self._setup = path, setup
        self.began = began
        self.held: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def keep(self, name: str, part: Any, unit: float) -> None:
        """Write a part in place of the one before."""
        facts = {"device": device(), "date": datetime.now(UTC).date().isoformat()}
        load = round(os.getloadavg()[0], 1)
        self.held |= {**facts, "unit": unit, "load": load, name: part}
        model = self._setup.model
        self.held |= {
            "model": asdict(model),
            "kv_nbytes_per_token": model.kv_nbytes_per_token,
            "step_tokens": self._setup.step_tokens,
        }
        self._path.write_text(json.dumps(self.held, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(page(self.held))


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("piece", choices=["predict", "regret", "stall", "split"])
    parser.add_argument("--concurrency", type=at_least(1), nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 8.0])
    parser.add_argument("--repeats", type=at_least(2), default=7)
    parser.add_argument("--max-seconds", type=float, default=0.0, help="only what is missing")
    parser.add_argument("--out", type=Path, help="default: bench/results/decide.json, or _split")
    args = parser.parse_args()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":  # before torch is loaded
        os.execve(
            sys.executable, [sys.executable, "-W", "ignore", *sys.argv], engine_environment(1)
        )
    setup = LAYERED if args.piece == "split" else PLAIN
    out = args.out or RESULTS / ("decide.json" if setup is PLAIN else "decide_split.json")
    result = Result(out, setup, began)
    with engine_here(setup) as engine:
        unit = break_even(engine)
        if args.piece == "predict":
            result.keep("predict", predict(engine, unit, args.repeats), unit)
        elif args.piece == "stall":
            result.keep("stall", stall(engine, unit), unit)
        elif args.piece == "split":
            result.keep("split", split(engine, unit, setup.num_ranges, args.repeats), unit)
        else:
            regrets(engine, unit, result, args)
    print(page(result.held), flush=True)
    os._exit(0)  # vLLM's threads need not be waited for


if __name__ == "__main__":
    main()
