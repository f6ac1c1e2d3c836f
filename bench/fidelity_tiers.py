"""The torch runner and the modelled one on the same requests, over several sets of real tiers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelity_judge import Cell, Run, fitted_links, words
from fidelity_torch import (
    BLOCK_NBYTES,
    BLOCK_SIZE,
    NO_KVTIERS,
    SEED,
    SHAPE,
    Arrivals,
    Below,
    Steps,
    Watched,
    coefficients,
    fit_steps,
    machine,
    measured_steps,
    serve,
    torch_engine_of,
    watch_links,
)

from kvtiers.cost.links import LinkSeed
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.modelled import modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.messages import Link

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

    def arrivals(self, documents: Sequence[Sequence[int]]) -> Arrivals:
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


def documents_of(kind: str, num: int = NUM_DOCUMENTS) -> list[list[int]]:
    """Return documents; other kinds, other documents."""
    rng = random.Random(kind)
    return [
        [rng.randrange(SHAPE.vocab_size) for _ in range(rng.randint(*DOCUMENT))] for _ in range(num)
    ]


def phases(engine: Engine, num: int | None = None) -> Iterator[tuple[str, Run]]:
    """Fill the tiers, and serve one workload after the other."""
    documents = documents_of("judged")
    fill = [(0.0, NewRequest(f"fill{i}", 0.0, 1, document)) for i, document in enumerate(documents)]
    serve(engine, fill, 1)
    for phase in PHASES[:num]:
        yield phase.name, serve(engine, phase.arrivals(documents), phase.concurrency)


def links_of(model: ReferenceModel, below: Below) -> dict[str, LinkSeed]:
    """Measure the links with other documents than those that are judged."""
    jobs: list[Link] = []

    def use(engine: Engine, runner: Watched) -> None:
        connector = runner.connector
        assert connector is not None
        watch_links(connector, jobs)
        documents = documents_of("fitted")
        for turn in range(3):
            for i, document in enumerate(documents):
                num = len(document) if turn == 0 else len(document) * (1 + (i + turn) % 4) // 4
                request = NewRequest(f"{turn}-{i}", 0.0, 1, document[:num])
                serve(engine, [(0.0, request)], 1)

    torch_engine_of(model, TIERED, below, use)
    return fitted_links(jobs, BLOCK_NBYTES)


def tiered(repeats: int) -> tuple[list[Cell], str]:
    """Judge workloads that reload, on several configurations of tiers."""
    model = ReferenceModel(SHAPE)
    measured_steps(model)  # whatever is done once
    seen: dict[bool, Steps] = {False: [], True: []}  # without kvtiers, and with it
    links = {below.name: links_of(model, below) for below in BELOW if below.tiers}
    measured: dict[tuple[str, str], list[Run]] = {}
    for _ in range(repeats):
        for has_tiers, mine in seen.items():
            mine.extend(measured_steps(model, BELOW[has_tiers]))
        for below in BELOW:

            def use(engine: Engine, _: Watched, name: str = below.name) -> None:
                for phase, run in phases(engine):
                    measured.setdefault((phase, name), []).append(run)

            torch_engine_of(model, TIERED, below, use)
    steps = {
        has_tiers: fit_steps(mine, SEED, SHAPE.to_hf_config()) for has_tiers, mine in seen.items()
    }
    cells = []
    for below in BELOW:
        on = machine(steps[bool(below.tiers)], links.get(below.name, {}))
        engine = modelled_engine(TIERED, on, below.config(Path("/nowhere")))
        for phase, said in phases(engine):
            cells.append(Cell(phase, below.name, measured[phase, below.name], said))
        engine.close()
    order = [phase.name for phase in PHASES]
    cells.sort(key=lambda cell: order.index(cell.workload))
    notes = [f"without kvtiers {coefficients(steps[False])}; with it {coefficients(steps[True])}"]
    notes += [f"{name}: {words(found, BLOCK_NBYTES)}" for name, found in links.items()]
    return cells, "\n".join(notes)
