"""The torch runner and the modelled one on the same requests, without kvtiers and with it."""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fidelity_judge import Cell, Run
from fidelity_taught import Steps, Taught, num_reloads, runs_of, tokens_reloaded, words

from kvtiers.bench.throttle import ThrottledStore
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.data.store import BlockStore
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.runners import StepResult, StepWork
from kvtiers.engines.reference.serving import OpenLoop, drive
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.engines.reference.torch_runner import TorchRunner
from kvtiers.model.config import Config, parse_mapping
from kvtiers.model.messages import StepOrders

SHAPE = ReferenceShape(
    num_layers=4,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_size=32,
    intermediate_size=768,
    vocab_size=512,
)
BLOCK_SIZE = 16
BLOCK_NBYTES = BLOCK_SIZE * SHAPE.kv_nbytes_per_token
SEED = PrefillSpeed(1e-3, 2e10, kv_bytes_per_second=1e10, kv_element_nbytes=SHAPE.itemsize)

TimedRequests = Sequence[tuple[float, NewRequest]]


@dataclass(frozen=True)
class Workload:
    """Requests, and the engine that they meet; all of them come at once."""

    name: str
    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    num_blocks: int = 1024
    budget: int = 512

    def requests(self) -> list[NewRequest]:
        """Return the same requests every time."""
        rng = random.Random(self.name)
        return [
            NewRequest(
                f"{self.name}{idx}",
                0.0,
                rng.randint(*self.output),
                [rng.randrange(SHAPE.vocab_size) for _ in range(rng.randint(*self.prompt))],
            )
            for idx in range(self.num_requests)
        ]

    def settings(self) -> EngineSettings:
        """Return the engine."""
        return EngineSettings(
            num_blocks=self.num_blocks,
            max_model_len=1024,
            max_num_batched_tokens=self.budget,
            max_num_seqs=32,
        )


FITTED = (
    Workload("fitted prompts", 12, (16, 600), (4, 40), budget=256),
    Workload("fitted decodes", 24, (8, 120), (20, 90)),
)
JUDGED = (
    Workload("one long prompt", 1, (900, 900), (1, 1)),
    Workload("short prompts", 16, (32, 96), (8, 24)),
    Workload("long prompts", 6, (400, 800), (8, 16)),
    Workload("decodes", 16, (16, 32), (48, 64)),
    Workload("mixed", 12, (32, 700), (8, 40)),
    Workload("small budget", 8, (200, 500), (8, 16), budget=64),
    Workload("tight pool", 12, (100, 300), (60, 120), num_blocks=90),
)


class Watched(TorchRunner):
    """A torch runner that notes its steps, and the time from one's end to the next one's."""

    taught: Taught
    ended: float

    def run(self, work: StepWork, orders: StepOrders | None) -> StepResult:
        """Run, and note."""
        num_loads, scheduled = num_reloads(orders), self.now - self.ended
        num_tokens = sum(it.num_tokens for it in work.sequences)
        self.taught.schedules.append((num_loads, num_tokens, scheduled))
        result = super().run(work, orders)
        now = self.now
        if work.sequences and result.pure and not num_loads:
            new = [it.num_tokens for it in work.sequences]
            context = [it.start for it in work.sequences]
            self.taught.steps.append((new, context, now - self.ended))
        self.ended = now
        return result


@dataclass(frozen=True)
class Below:
    """Tiers, and how fast their store is read.

    Attributes:
        tiers: of the configuration; none: no kvtiers. bytes_per_second: of reads; 0: as it is.
    """

    name: str
    tiers: Sequence[Mapping[str, Any]] = ()
    bytes_per_second: float = 0.0
    mode: str = "always"

    def config(self, folder: Path) -> Config | None:
        """Return the configuration; `folder`: of its files."""
        if not self.tiers:
            return None
        tiers = [
            {**tier, "paths": [str(folder)]} if tier["kind"] == "nvme" else dict(tier)
            for tier in self.tiers
        ]
        return parse_mapping({"tiers": tiers, "cost": {"mode": self.mode}})

    def wrap(self, _name: str, store: BlockStore) -> BlockStore:
        """Slow a store down."""
        speed = self.bytes_per_second
        return ThrottledStore(store, speed) if speed else store


class SoMany:
    """Requests of which so many are served at a time: the next comes as soon as one has ended."""

    def __init__(self, engine: Engine, requests: Sequence[NewRequest], concurrency: int) -> None:
        self._engine = engine
        self._left = deque(requests)
        self._concurrency = concurrency

    @property
    def next_at(self) -> float | None:
        """See `kvtiers.engines.reference.serving.Arrivals`."""
        return self._engine.now if self._left and self._num_places > 0 else None

    def take(self, now: float) -> list[NewRequest]:
        """See `kvtiers.engines.reference.serving.Arrivals`."""
        num = min(self._num_places, len(self._left))
        return [replace(self._left.popleft(), arrived_at=now) for _ in range(num)]

    @property
    def _num_places(self) -> int:
        return self._concurrency - self._engine.num_unfinished


def serve(engine: Engine, arrivals: TimedRequests, concurrency: int | None = None) -> Run:
    """Serve requests as they come, or so many at a time; returns once all is settled."""
    began, before = engine.now, _reloaded(engine)
    preempted = engine.gauges.num_preemptions
    requests = [replace(request, arrived_at=began + at) for at, request in arrivals]
    come = OpenLoop(requests) if concurrency is None else SoMany(engine, requests, concurrency)
    served = [it for report in drive(engine, come) for it in report.finished]
    ended = engine.now
    engine.settle()
    tokens = sum(it.num_prompt_tokens + it.num_output_tokens for it in served)
    hits = {tier: num - before.get(tier, 0) for tier, num in _reloaded(engine).items()}
    hits["hbm"] = sum(it.num_local_tokens for it in served)
    return Run.of(
        [it.ttft_seconds for it in served if it.ttft_seconds is not None],
        tokens / (ended - began),
        hits={tier: num for tier, num in hits.items() if num},
        num_preemptions=engine.gauges.num_preemptions - preempted,
    )


def _reloaded(engine: Engine) -> dict[str, int]:
    """Return the tokens that came from each tier so far."""
    connector = engine.runner.connector
    return {} if connector is None else tokens_reloaded(connector)


def torch_engine_of(
    model: ReferenceModel,
    settings: EngineSettings,
    below: Below,
    use: Callable[[Engine], None],
) -> Taught:
    """Start an engine over some tiers, let it be used, close it, and return what it taught."""
    taught = Taught()
    with tempfile.TemporaryDirectory() as folder:
        runner = Watched(model, settings, below.config(Path(folder)), below.wrap)
        runner.taught, runner.ended = taught, runner.now
        if runner.connector is not None:
            taught.watch(runner.connector)
        engine = Engine(settings, runner)
        try:
            use(engine)
        finally:
            engine.close()
    return taught


NO_KVTIERS = Below("no kvtiers")


def measured_steps(model: ReferenceModel, below: Below = NO_KVTIERS) -> Steps:
    """Measure the steps of workloads that are not judged.

    Args:
        below: tiers that the steps' blocks are offloaded to; nothing is hit there.
    """
    seen: Steps = []
    for workload in FITTED:

        def use(engine: Engine, workload: Workload = workload) -> None:
            serve(engine, _at_once(workload))

        seen += torch_engine_of(model, workload.settings(), below, use).steps
    return seen


def machine(taught: Taught) -> ModelledMachine:
    """Return the torch runner's machine, on paper."""
    hf_config = SHAPE.to_hf_config()
    return ModelledMachine(
        model_shape(hf_config),
        SEED,
        SHAPE.kv_nbytes_per_token,
        taught.link_seeds(BLOCK_NBYTES),
        steps=taught.step_model(SEED, hf_config),
        hand_over=taught.hand_over(),
    )


def in_words(name: str, taught: Taught) -> str:
    """Return what was taught about one configuration."""
    on = machine(taught)
    return words(name, on.step_model(), on.links, on.hand_over, BLOCK_NBYTES)


def measure_plain() -> dict[str, Any]:
    """Serve every workload once without kvtiers; returns plain data."""
    model = ReferenceModel(SHAPE)
    measured_steps(model)  # whatever is done once
    taught = asdict(Taught(measured_steps(model)))
    runs = []
    for workload in JUDGED:
        settings = workload.settings()
        engine = Engine(settings, TorchRunner(model, settings))
        runs.append([workload.name, asdict(serve(engine, _at_once(workload)))])
    return {"taught": taught, "runs": runs}


def judge_plain(raws: Sequence[Mapping[str, Any]]) -> tuple[list[Cell], str]:
    """Judge workloads without kvtiers by what was measured."""
    taught = Taught.merged(Taught(**raw["taught"]) for raw in raws)
    on, cells = machine(taught), []
    for workload in JUDGED:
        said = serve(modelled_engine(workload.settings(), on), _at_once(workload))
        runs = [Run(**run) for run in runs_of(raws, workload.name)]
        cells.append(Cell(workload.name, "no kvtiers", runs, said))
    return cells, in_words("no kvtiers", taught)


def _at_once(workload: Workload) -> TimedRequests:
    return [(0.0, request) for request in workload.requests()]
