"""Real vLLM on the CPU and the modelled engine on the same small trace, with kvtiers and without.

Every configuration has an engine in a process of its own; they take turns. The modelled engine
goes through the same requests, those among them that have taught it what steps and links take.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decide_engine import BLOCK_SIZE, MODEL
from fidelity_judge import Cell, Run
from fidelity_taught import Taught, runs_of, words
from fidelity_torch import Below, TimedRequests, serve
from fidelity_vllm_engine import BUDGET, LONGEST, MOST_SEQUENCES, NUM_BLOCKS, VLLM

from kvtiers.bench.engine_process import engine_environment
from kvtiers.bench.random_model import write_random_model
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.simulate.generate import Workload, generate

EVENT = "fidelity: "
BLOCK_NBYTES = BLOCK_SIZE * MODEL.kv_nbytes_per_token
SHRUNK = 2  # a trace's tokens to ours
AT_A_TIME, SHARED = 4, 256  # tokens of a trace's block, shrunk
ROUNDS = {"trace": None, "four at a time": AT_A_TIME}  # None: as they come
TEACHING, RELOADING = "teaching", "reloading"  # are not judged
REPEATS = 2  # of all rounds, in the life of an engine
SPAN_SECONDS = 7.0  # of the trace's arrivals


def _tiers(below: str = "") -> list[dict[str, Any]]:
    if not below:
        return [{"kind": "dram", "capacity": "256MiB"}]
    return [{"kind": "dram", "capacity": "24MiB"}, {"kind": "memory", "capacity": below}]


CONFIGS = (
    Below("no kvtiers"),
    Below("DRAM", _tiers()),
    Below("DRAM, 250 MB/s", _tiers("512MiB"), 250e6),
    Below("DRAM, 20 MB/s", _tiers("512MiB"), 20e6),
)


# -- the requests ---------------------------------------------------------------------------


def teaching(salt: str) -> TimedRequests:
    """Return prompts of all lengths, some followed by themselves and a few tokens more."""
    rng = random.Random(f"teaching {salt}")
    found: list[NewRequest] = []

    def ask(tokens: Sequence[int]) -> None:
        found.append(NewRequest(f"{salt}-{len(found)}", 0.0, rng.randint(1, 24), list(tokens)))

    for _ in range(4):
        pair = [_prompt(rng, rng.randint(32, 600)) for _ in range(2)]
        for tokens in pair:
            ask(tokens)
        for tokens in pair:
            ask([*tokens, *_prompt(rng, rng.randint(8, 100))])
        ask(_prompt(rng, rng.randint(600, 1800)))
    return [(0.0, request) for request in found]


def reloading() -> TimedRequests:
    """Return prompts that are asked for again, in parts, when they have left HBM."""
    rng = random.Random("reloading")
    documents = [_prompt(rng, 1024) for _ in range(8)]
    return [
        (0.0, NewRequest(f"r{turn}-{i}", 0.0, 1, document[: 256 * (1 + (i + turn) % 4)]))
        if turn
        else (0.0, NewRequest(f"r{turn}-{i}", 0.0, 1, document))
        for turn in range(3)
        for i, document in enumerate(documents)
    ]


def _prompt(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(MODEL.vocab_size) for _ in range(num)]


def trace(salt: str) -> TimedRequests:
    """Return a generated trace: chats of several turns, shrunk to what a CPU serves.

    Args:
        salt: traces of other salts have no tokens in common, and are alike else.
    """
    made = generate(Workload("chat", 24, 1.0, seed=3))
    size = made.block_size // SHRUNK
    times = [request.arrival_seconds for request in made.requests]
    scale = SPAN_SECONDS / (times[-1] - times[0])
    found = []
    for idx, request in enumerate(made.requests):
        tokens: list[int] = []
        for block_id in request.block_ids.tolist():
            rng = random.Random(f"{salt} {block_id}")
            tokens += [rng.randrange(MODEL.vocab_size) for _ in range(size)]
        num = min(LONGEST - 32, max(1, request.num_prompt_tokens // SHRUNK))
        output = min(24, max(1, request.num_output_tokens // 16))
        new = NewRequest(f"{salt}-{idx}", 0.0, output, tokens[:num])
        found.append(((request.arrival_seconds - times[0]) * scale, new))
    return found


# -- the engine's process ------------------------------------------------------------------


def beginnings(salt: str) -> TimedRequests:
    """Return what prompts at the start of a trace have in common. It is in HBM before they come:
    two that are admitted together compute it once in vLLM, and twice in the modelled engine."""
    prompts = [request.prompt_token_ids or [] for _, request in trace(salt)[:AT_A_TIME]]
    counts = Counter(tuple(prompt[:SHARED]) for prompt in prompts)
    common = [tokens for tokens, num in counts.items() if num > 1]
    return [
        (0.0, NewRequest(f"{salt}-start{i}", 0.0, 1, list(tokens)))
        for i, tokens in enumerate(common)
    ]


def arrivals_of(name: str, salt: str) -> tuple[TimedRequests, int | None]:
    """Return what a part consists of, and how many requests there are at a time."""
    if name in ROUNDS:
        return trace(salt), ROUNDS[name]
    return (reloading(), 1) if name == RELOADING else (teaching(salt), AT_A_TIME)


def parts() -> Iterator[tuple[str, str]]:
    """Yield all parts of an engine's life, each time with other tokens."""
    yield TEACHING, "warm-up"
    yield RELOADING, ""
    for repeat in range(REPEATS):
        yield TEACHING, f"{repeat}"  # the machine's speed changes
        for name in ROUNDS:
            yield name, f"{name} {repeat}"


def child(idx: int) -> None:
    """Serve what is asked for on stdin, a part a line; answer with a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        engine = VLLM(Path(folder), CONFIGS[idx])
        for line in sys.stdin:
            name, salt = json.loads(line)
            arrivals, concurrency = arrivals_of(name, salt)
            sizes = engine.taught.sizes()
            if name in ROUNDS:
                engine.serve(beginnings(salt), 1)
            run = engine.serve(arrivals, concurrency)
            if name in ROUNDS:
                engine.taught.cut(sizes)
            if name == RELOADING and engine.connector is not None:
                engine.taught.notice(engine.connector)
            told = {"run": run, "taught": engine.taught, "watermark": engine.watermark}
            print(EVENT + json.dumps(told, default=asdict), flush=True)
    os._exit(0)  # vLLM's threads need not be waited for


# -- the comparison -------------------------------------------------------------------------


class Child:
    """One engine's process."""

    def __init__(self, idx: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(idx)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=engine_environment(1),
            text=True,
        )

    def ask(self, name: str, salt: str) -> Any:
        """Let it serve a part, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, salt]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(EVENT):
                return json.loads(line.removeprefix(EVENT))
        raise RuntimeError(f"the engine stopped with {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def modelled(below: Below, taught: Taught, watermark: float) -> tuple[dict[str, list[Run]], str]:
    """Return what the modelled engine says of all rounds, and what it was taught."""
    hf_config = hf_config_of()
    seed = PrefillSpeed(1e-3, 1e11, kv_bytes_per_second=1e10)
    machine = ModelledMachine(
        model_shape(hf_config),
        seed,
        MODEL.kv_nbytes_per_token,
        taught.link_seeds(BLOCK_NBYTES),
        steps=taught.step_model(seed, hf_config),
        hand_over=taught.hand_over(),
    )
    settings = EngineSettings(
        num_blocks=NUM_BLOCKS - 1,
        max_model_len=LONGEST,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=MOST_SEQUENCES,
        watermark=watermark,
    )
    engine = modelled_engine(settings, machine, below.config(Path("/nowhere")))
    found: dict[str, list[Run]] = {}
    for name, salt in parts():
        if name in ROUNDS:
            serve(engine, beginnings(salt), 1)
        found.setdefault(name, []).append(serve(engine, *arrivals_of(name, salt)))
    engine.close()
    steps = machine.step_model()
    return found, words(below.name, steps, machine.links, machine.hand_over, BLOCK_NBYTES)


def hf_config_of() -> dict[str, Any]:
    """Return the model's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(MODEL, Path(folder))
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        return config


def measure_vllm() -> dict[str, Any]:
    """Start all engines, and serve all rounds on each; returns plain data."""
    with ExitStack() as stack:
        children = [Child(idx) for idx in range(len(CONFIGS))]
        for each in children:
            stack.callback(each.close)
        told: dict[str, Any] = {}
        runs = []
        for name, salt in parts():
            for below, each in zip(CONFIGS, children, strict=True):
                told[below.name] = each.ask(name, salt)
                runs.append([name, below.name, told[below.name]["run"]])
    taught = {name: last["taught"] for name, last in told.items()}
    return {"taught": taught, "watermark": told[CONFIGS[0].name]["watermark"], "runs": runs}


def judge_vllm(raws: Sequence[Mapping[str, Any]]) -> tuple[list[Cell], str]:
    """Judge all configurations by what was measured."""
    cells, notes = [], []
    for below in CONFIGS:
        taught = Taught.merged(Taught(**raw["taught"][below.name]) for raw in raws)
        said, note = modelled(below, taught, raws[0]["watermark"])
        notes.append(note)
        for name in ROUNDS:
            runs = [Run(**run) for run in runs_of(raws, name, below.name)]
            cells.append(Cell(name, below.name, runs, _median(said[name])))
    cells.sort(key=lambda cell: list(ROUNDS).index(cell.workload))
    return cells, "\n".join(notes)


def _median(runs: Sequence[Run]) -> Run:
    """Return the last of alike runs, with the median of each time."""
    last = runs[-1]
    middles = {
        name: statistics.median(getattr(run, name) for run in runs)
        for name in ("ttft_seconds", "ttft_median", "ttft_p90", "tokens_per_second")
    }
    return Run(**middles, hits=last.hits, num_preemptions=last.num_preemptions)


if __name__ == "__main__":
    if not sys.argv[1:] or not sys.argv[1].isdigit():
        sys.exit("this is an engine of `python bench/fidelity.py vllm`; run that")
    child(int(sys.argv[1]))
