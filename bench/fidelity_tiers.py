"""The torch runner and the modelled one on the same requests, over several sets of real tiers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fidelity_judge import Cell, Run
from fidelity_taught import Taught, runs_of
from fidelity_torch import (
    BLOCK_SIZE,
    NO_KVTIERS,
    SHAPE,
    Below,
    TimedRequests,
    Watched,
    in_words,
    machine,
    measured_steps,
    serve,
    torch_engine_of,
)

from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.modelled import modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings

NUM_DOCUMENTS = 10
DOCUMENT = (480, 640)
TIERED = EngineSettings(
    num_blocks=160,  # four of ten documents
    max_model_len=1024,
    block_size=BLOCK_SIZE,
    max_num_batched_tokens=512,
    max_num_seqs=16,
)


def _dram(capacity: str) -> dict[str, Any]:
    return {"kind": "dram", "capacity": capacity, "pin": "off"}


SMALL = "10MiB"  # four documents
BELOW = (
    NO_KVTIERS,
    Below("DRAM", [_dram("64MiB")]),
    Below("DRAM, NVMe", [_dram(SMALL), {"kind": "nvme", "capacity": "64MiB"}]),
    Below("DRAM, 80 MB/s", [_dram(SMALL), {"kind": "memory", "capacity": "64MiB"}], 80e6),
    Below("DRAM, 15 MB/s", [_dram(SMALL), {"kind": "memory", "capacity": "64MiB"}], 15e6),
    Below("15 MB/s, auto", [_dram(SMALL), {"kind": "memory", "capacity": "64MiB"}], 15e6, "auto"),
)


@dataclass(frozen=True)
class Phase:
    """Questions about documents.

    Attributes:
        rate: requests per second; None: `concurrency` at a time. skew: of their popularity.
    """

    name: str
    num_requests: int
    concurrency: int | None = None
    rate: float = 0.0
    skew: float = 0.0
    output: tuple[int, int] = (4, 12)

    def arrivals(self, documents: Sequence[Sequence[int]]) -> TimedRequests:
        """Return the same questions every time."""
        rng, at, found = random.Random(self.name), 0.0, []
        weights = [1.0 / (rank + 1) ** self.skew for rank in range(len(documents))]
        for idx in range(self.num_requests):
            if self.skew:
                which = rng.choices(range(len(documents)), weights)[0]
            else:
                which = idx % len(documents)
            question = [rng.randrange(SHAPE.vocab_size) for _ in range(rng.randint(8, 40))]
            prompt = [*documents[which], *question]
            request = NewRequest(f"{self.name}{idx}", 0.0, rng.randint(*self.output), prompt)
            found.append((at, request))
            if self.rate:
                at += rng.expovariate(self.rate)
        return found


PHASES = (
    Phase("one by one", 20, concurrency=1),
    Phase("six at a time", 24, concurrency=6, skew=0.8),
    Phase("all at once", 10, concurrency=10),
    Phase("arrivals", 24, rate=14.0, skew=0.8),
)
TEACHING = (
    Phase("taught one by one", 12, concurrency=1),
    Phase("taught together", 18, concurrency=5, skew=0.7),
)


def documents_of(kind: str, num: int = NUM_DOCUMENTS) -> list[list[int]]:
    """Return documents; other kinds, other documents."""
    rng = random.Random(kind)
    return [
        [rng.randrange(SHAPE.vocab_size) for _ in range(rng.randint(*DOCUMENT))] for _ in range(num)
    ]


def phases(engine: Engine, kind: str, judged: Sequence[Phase]) -> Iterator[tuple[str, Run]]:
    """Fill the tiers with documents of a kind, and serve one workload after the other."""
    documents = documents_of(kind)
    fill = [(0.0, NewRequest(f"fill{i}", 0.0, 1, document)) for i, document in enumerate(documents)]
    serve(engine, fill, 1)
    for phase in judged:
        yield phase.name, serve(engine, phase.arrivals(documents), phase.concurrency)


def taught_by(model: ReferenceModel, below: Below) -> Taught:
    """Let an engine teach with other requests than those that are judged."""

    def use(engine: Engine) -> None:
        if below.tiers:
            _parts(engine)
        list(phases(engine, "fitted", TEACHING))

    taught = torch_engine_of(model, TIERED, below, use)
    taught.steps += measured_steps(model, below)
    return taught


def _parts(engine: Engine) -> None:
    """Reload parts of documents one by one: jobs of several sizes, with nobody beside them."""
    documents = documents_of("parts")
    for turn in range(3):
        for i, document in enumerate(documents):
            num = len(document) if turn == 0 else len(document) * (1 + (i + turn) % 4) // 4
            serve(engine, [(0.0, NewRequest(f"{turn}-{i}", 0.0, 1, document[:num]))], 1)
    runner = engine.runner
    assert isinstance(runner, Watched)
    runner.taught.notice(runner.connector)


def measure_tiers() -> dict[str, Any]:
    """Serve every workload once on every configuration; returns plain data."""
    model = ReferenceModel(SHAPE)
    measured_steps(model)  # whatever is done once
    taught, runs = {}, []
    for below in BELOW:
        taught[below.name] = asdict(taught_by(model, below))

        def use(engine: Engine, name: str = below.name) -> None:
            for phase, run in phases(engine, "judged", PHASES):
                runs.append([phase, name, asdict(run)])

        torch_engine_of(model, TIERED, below, use)
    return {"taught": taught, "runs": runs}


def judge_tiers(raws: Sequence[Mapping[str, Any]]) -> tuple[list[Cell], str]:
    """Judge workloads that reload, on several configurations of tiers, by what was measured."""
    cells, notes = [], []
    for below in BELOW:
        taught = Taught.merged(Taught(**raw["taught"][below.name]) for raw in raws)
        engine = modelled_engine(TIERED, machine(taught), below.config(Path("/nowhere")))
        for phase, said in phases(engine, "judged", PHASES):
            runs = [Run(**run) for run in runs_of(raws, phase, below.name)]
            cells.append(Cell(phase, below.name, runs, said))
        engine.close()
        notes.append(in_words(below.name, taught))
    order = [phase.name for phase in PHASES]
    cells.sort(key=lambda cell: order.index(cell.workload))
    return cells, "\n".join(notes)
