"""Real vLLM on the CPU and the modelled engine on the same small trace, with kvtiers and without.

Every configuration has an engine in a process of its own; they take turns. The modelled engine
goes through the same requests, from the warm-up on, which has taught it what steps and links take.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decide_engine import BLOCK_SIZE, MODEL, throttle_memory_stores
from fidelity_judge import Cell, Run
from fidelity_taught import Taught, num_reloads, runs_of, tokens_reloaded, words
from fidelity_torch import Arrivals, Below, serve

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
NUM_BLOCKS, LONGEST = 73, 2048  # vLLM's block 0 is nobody's
BUDGET, MOST_SEQUENCES = 512, 8
SHRUNK = 2  # a trace's tokens to ours
ROUNDS = (("trace", None), ("four at a time", 4))  # as they come, or so many at a time
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


def plain_config(below: Below) -> dict[str, Any]:
    """Return kvtiers' configuration."""
    return {"tiers": list(below.tiers), "cost": {"mode": below.mode}}


# -- the requests ---------------------------------------------------------------------------


def warmup() -> list[Arrivals]:
    """Return requests that teach: new prompts of all lengths, then old ones, in parts."""
    rng = random.Random("warm-up")

    def prompt(num: int) -> list[int]:
        return [rng.randrange(MODEL.vocab_size) for _ in range(num)]

    new = [
        (0.0, NewRequest(f"w{i}", 0.0, rng.randint(1, 24), prompt(rng.randint(32, 1800))))
        for i in range(16)
    ]
    documents = [prompt(1024) for _ in range(8)]
    old = [
        (0.0, NewRequest(f"w{turn}-{i}", 0.0, 1, document[: 256 * (1 + (i + turn) % 4)]))
        if turn
        else (0.0, NewRequest(f"w{turn}-{i}", 0.0, 1, document))
        for turn in range(3)
        for i, document in enumerate(documents)
    ]
    return [new, old]


def trace(salt: str) -> Arrivals:
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


# -- the engine, in its process -------------------------------------------------------------


class VLLM:
    """One engine, whose steps and links are watched."""

    def __init__(self, folder: Path, below: Below) -> None:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - takes seconds
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        throttle = throttle_memory_stores()
        more: dict[str, Any] = {}
        if below.tiers:
            more["kv_transfer_config"] = {
                "kv_connector": "KVTiersConnector",
                "kv_connector_module_path": "kvtiers.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"config": plain_config(below)},
            }
        args = EngineArgs(
            model=str(write_random_model(MODEL, folder)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=MODEL.dtype,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            max_num_batched_tokens=BUDGET,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_num_seqs=MOST_SEQUENCES,
            disable_log_stats=True,
            seed=0,
            **more,
        )
        args.use_tqdm_on_load = False
        self._engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        scheduler = self._engine.engine_core.engine_core.scheduler
        self.watermark = float(scheduler.scheduler_config.watermark)
        self.connector = scheduler.connector.scheduler_side.connector if below.tiers else None
        self._taught = Taught()
        self._num_loads = 0
        self._num_local: dict[str, int] = {}
        self._scheduled: Any = None
        self._num_preempted = 0
        self._watch(scheduler)
        if below.bytes_per_second:
            throttle(below.bytes_per_second)

    def _watch(self, scheduler: Any) -> None:
        schedule, get_output = scheduler.schedule, self._engine.engine_core.get_output

        def scheduling(*args: Any) -> Any:
            began = time.perf_counter()
            output = self._scheduled = schedule(*args)
            self._num_preempted += len(output.preempted_req_ids or ())
            meta = output.kv_connector_metadata
            self._num_loads = 0 if meta is None else num_reloads(meta.orders)
            took, num_tokens = time.perf_counter() - began, output.total_num_scheduled_tokens
            self._taught.schedules.append((self._num_loads, num_tokens, took))
            return output

        def outputting() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    local = output.prefill_stats.num_local_cached_tokens
                    self._num_local.setdefault(output.request_id, local)
            return outputs

        scheduler.schedule = scheduling
        self._engine.engine_core.get_output = outputting
        if self.connector is not None:
            self._taught.watch(self.connector)

    def serve(self, arrivals: Arrivals, concurrency: int | None) -> Run:
        """Serve requests as `fidelity_torch.serve` does."""
        from vllm import SamplingParams  # noqa: PLC0415

        self._num_local.clear()
        before, preempted = self._reloaded(), self._num_preempted
        ended = began = time.perf_counter()
        left = [(began + at, request) for at, request in arrivals][::-1]
        arrived: dict[str, float] = {}
        first: dict[str, float] = {}
        num_tokens = 0
        while left or self._engine.has_unfinished_requests():
            now, num = time.perf_counter(), self._engine.get_num_unfinished_requests()
            while left and (left[-1][0] <= now if concurrency is None else num < concurrency):
                at, request = left.pop()
                arrived[request.request_id] = at if concurrency is None else now
                fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
                params = SamplingParams(max_tokens=request.max_tokens, **fixed)
                prompt = {"prompt_token_ids": list(request.prompt_token_ids or ())}
                self._engine.add_request(request.request_id, prompt, params)
                num += 1
            if not num:
                self._idle(left[-1][0])
                ended = time.perf_counter()
                continue
            outputs = self._engine.step()
            now = time.perf_counter()
            self._note_step(now - ended)
            ended = now
            for output in outputs:
                first.setdefault(output.request_id, now)
                if output.finished:
                    num_tokens += len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        while self.connector is not None and self.connector.busy:
            self._engine.step()
        hits = {tier: num - before.get(tier, 0) for tier, num in self._reloaded().items()}
        hits["hbm"] = sum(self._num_local.values())
        return Run.of(
            [first[name] - at for name, at in arrived.items()],
            num_tokens / (ended - began),
            hits={tier: num for tier, num in hits.items() if num},
            num_preemptions=self._num_preempted - preempted,
        )

    def lessons(self) -> Taught:
        """Return what it has taught so far."""
        if self.connector is not None:
            self._taught.notice(self.connector)
        return self._taught

    def _note_step(self, seconds: float) -> None:
        """Keep a step that loaded nothing and computed something."""
        scheduled = self._scheduled
        if scheduled is None or not scheduled.num_scheduled_tokens or self._num_loads:
            return
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduled.num_scheduled_tokens)
        new = [scheduled.num_scheduled_tokens[name] for name in names]
        self._taught.steps.append((new, [before[name] for name in names], seconds))
        self._scheduled = None

    def _idle(self, until: float) -> None:
        while (now := time.perf_counter()) < until:
            if self.connector is not None and self.connector.busy:
                self._engine.step()
            else:
                time.sleep(min(0.001, until - now))

    def _reloaded(self) -> dict[str, int]:
        return {} if self.connector is None else tokens_reloaded(self.connector)


def child(idx: int) -> None:
    """Serve what is asked for on stdin, a line at a time; answer with a line of JSON."""

    def say(what: Any) -> None:
        print(EVENT + json.dumps(what), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        engine = VLLM(Path(folder), CONFIGS[idx])
        for line in sys.stdin:
            what, name, salt = json.loads(line)
            if what == "warm-up":
                new, old = warmup()
                engine.serve(new, 4)
                engine.serve(old, 1)
                say({"taught": asdict(engine.lessons()), "watermark": engine.watermark})
            else:
                say(asdict(engine.serve(trace(salt), dict(ROUNDS)[name])))
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

    def ask(self, what: str, name: str = "", salt: str = "") -> Any:
        """Let it do something, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, name, salt]) + "\n")
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


def rounds() -> Iterator[tuple[str, int | None, str]]:
    """Yield what is served, each time with other tokens."""
    for repeat in range(REPEATS):
        for name, concurrency in ROUNDS:
            yield name, concurrency, f"{name} {repeat}"


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
    for arrivals, concurrency in zip(warmup(), (4, 1), strict=True):
        serve(engine, arrivals, concurrency)
    found: dict[str, list[Run]] = {}
    for name, concurrency, salt in rounds():
        found.setdefault(name, []).append(serve(engine, trace(salt), concurrency))
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
        learnt = [each.ask("warm-up") for each in children]
        runs = []
        for name, _, salt in rounds():
            for below, each in zip(CONFIGS, children, strict=True):
                runs.append([name, below.name, each.ask("serve", name, salt)])
    taught = {below.name: mine["taught"] for below, mine in zip(CONFIGS, learnt, strict=True)}
    return {"taught": taught, "watermark": learnt[0]["watermark"], "runs": runs}


def judge_vllm(raws: Sequence[Mapping[str, Any]]) -> tuple[list[Cell], str]:
    """Judge all configurations by what was measured."""
    cells, notes = [], []
    for below in CONFIGS:
        taught = Taught.merged(Taught(**raw["taught"][below.name]) for raw in raws)
        said, note = modelled(below, taught, raws[0]["watermark"])
        notes.append(note)
        for name, _ in ROUNDS:
            runs = [Run(**run) for run in runs_of(raws, name, below.name)]
            cells.append(Cell(name, below.name, runs, _median(said[name])))
    cells.sort(key=lambda cell: [name for name, _ in ROUNDS].index(cell.workload))
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
    child(int(sys.argv[1]))
