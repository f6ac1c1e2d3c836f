"""Real vLLM on the CPU and the modelled engine on the same small trace, with kvtiers and without.

Every configuration has an engine in a process of its own; they take turns. The modelled engine
goes through the same requests, from the warm-up on, which has taught it what steps and links take.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from decide_engine import BLOCK_SIZE, MODEL, throttle_memory_stores
from fidelity_judge import Cell, Run, fitted_links, words
from fidelity_torch import Arrivals, Below, Steps, fit_steps, serve, tokens_reloaded, watch_links

from kvtiers.bench.engine_process import engine_environment
from kvtiers.bench.random_model import write_random_model
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.messages import Link
from kvtiers.simulate.generate import Workload, generate

EVENT = "fidelity: "
BLOCK_NBYTES = BLOCK_SIZE * MODEL.kv_nbytes_per_token
NUM_BLOCKS, LONGEST = 73, 2048  # vLLM's block 0 is nobody's
BUDGET, MOST_SEQUENCES = 512, 8
SHRUNK = 2  # a trace's tokens to ours
ROUNDS = (("trace", None), ("four at a time", 4))  # as they come, or so many at a time
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
        self.steps: Steps = []
        self.links: list[Link] = []
        self._num_local: dict[str, int] = {}
        self._scheduled: Any = None
        self._num_preempted = 0
        self._watch(scheduler)
        if below.bytes_per_second:
            throttle(below.bytes_per_second)

    def _watch(self, scheduler: Any) -> None:
        schedule, get_output = scheduler.schedule, self._engine.engine_core.get_output

        def scheduling(*args: Any) -> Any:
            self._scheduled = schedule(*args)
            self._num_preempted += len(self._scheduled.preempted_req_ids or ())
            return self._scheduled

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
            watch_links(self.connector, self.links)

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
        waits = [first[name] - at for name, at in arrived.items()]
        return Run(
            sum(waits) / len(waits),
            num_tokens / (ended - began),
            {tier: num for tier, num in hits.items() if num},
            self._num_preempted - preempted,
        )

    def _note_step(self, seconds: float) -> None:
        """Keep a step that loaded nothing and computed something."""
        scheduled = self._scheduled
        if scheduled is None or not scheduled.num_scheduled_tokens:
            return
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduled.num_scheduled_tokens)
        new = [scheduled.num_scheduled_tokens[name] for name in names]
        self.steps.append((new, [before[name] for name in names], seconds))
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
                steps = engine.steps.copy()
                engine.serve(old, 1)
                links = [astuple(job) for job in engine.links]
                say({"steps": steps, "links": links, "watermark": engine.watermark})
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


def rounds(repeats: int) -> Iterator[tuple[str, int | None, str]]:
    """Yield what is served, each time with other tokens."""
    for repeat in range(repeats):
        for name, concurrency in ROUNDS:
            yield name, concurrency, f"{name} {repeat}"


def modelled(
    below: Below, learnt: Mapping[str, Any], repeats: int
) -> tuple[dict[str, list[Run]], str]:
    """Return what the modelled engine says of all rounds, and what it was taught."""
    hf_config = hf_config_of()
    shape = model_shape(hf_config)
    seed = PrefillSpeed(1e-3, 1e11, kv_bytes_per_second=1e10)
    steps = fit_steps([tuple(step) for step in learnt["steps"]], seed, hf_config)
    links = fitted_links([Link(*job) for job in learnt["links"]], BLOCK_NBYTES)
    machine = ModelledMachine(shape, seed, MODEL.kv_nbytes_per_token, links, steps=steps)
    settings = EngineSettings(
        num_blocks=NUM_BLOCKS - 1,
        max_model_len=LONGEST,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=MOST_SEQUENCES,
        watermark=learnt["watermark"],
    )
    engine = modelled_engine(settings, machine, below.config(Path("/nowhere")))
    for arrivals, concurrency in zip(warmup(), (4, 1), strict=True):
        serve(engine, arrivals, concurrency)
    found: dict[str, list[Run]] = {}
    for name, concurrency, salt in rounds(repeats):
        found.setdefault(name, []).append(serve(engine, trace(salt), concurrency))
    engine.close()
    taught = ", ".join(f"{c:.3g}" for c in steps.coefficients)
    return found, f"{below.name}: a step: {taught}; {words(links, BLOCK_NBYTES)}"


def hf_config_of() -> dict[str, Any]:
    """Return the model's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(MODEL, Path(folder))
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        return config


def judged(repeats: int) -> tuple[list[Cell], str]:
    """Measure and model all configurations."""
    with ExitStack() as stack:
        children = [Child(idx) for idx in range(len(CONFIGS))]
        for each in children:
            stack.callback(each.close)
        learnt = [each.ask("warm-up") for each in children]
        runs: list[dict[str, list[Run]]] = [{} for _ in CONFIGS]
        for name, _, salt in rounds(repeats):
            for each, mine in zip(children, runs, strict=True):
                mine.setdefault(name, []).append(Run(**each.ask("serve", name, salt)))
    cells: list[Cell] = []
    notes = []
    for below, taught, mine in zip(CONFIGS, learnt, runs, strict=True):
        said, note = modelled(below, taught, repeats)
        notes.append(note)
        cells += [Cell(name, below.name, mine[name], _median(said[name])) for name, _ in ROUNDS]
    cells.sort(key=lambda cell: [name for name, _ in ROUNDS].index(cell.workload))
    return cells, "\n".join(notes)


def _median(runs: Sequence[Run]) -> Run:
    """Return the last of alike runs, with the median times."""
    ttfts = sorted(run.ttft_seconds for run in runs)
    rates = sorted(run.tokens_per_second for run in runs)
    middle, last = len(runs) // 2, runs[-1]
    return Run(ttfts[middle], rates[middle], last.hits, last.num_preemptions)


if __name__ == "__main__":
    child(int(sys.argv[1]))
