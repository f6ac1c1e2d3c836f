"""Preemption on paper: the same traffic under recompute, swap and cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtiers.cost.catalogue import known_hardware
from kvtiers.cost.known_models import known_model
from kvtiers.cost.links import LinkSeed, offload_link, reload_link
from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import Config, parse_mapping

_NUM_REQUESTS: Final = 160

Shape = tuple[float, int, int]  # arrival, prompt tokens, output tokens


@dataclass(frozen=True, slots=True)
class Mix:
    """Traffic that overcommits the KV, and the machine that it meets.

    Attributes:
        num_tokens: of the KV pool. link: between HBM and DRAM, either way.
        offload: "eager" or "lazy": whether a victim's blocks lie below already.
    """

    name: str
    draw: Callable[[random.Random, int, float], Shape]
    num_tokens: int
    link: LinkSeed
    offload: str = "lazy"
    seed: int = 0

    def requests(self) -> Sequence[NewRequest]:
        """Return the same requests every time."""
        rng, now, requests = random.Random(self.seed), 0.0, []
        for idx in range(_NUM_REQUESTS):
            now, num_prompt, num_output = self.draw(rng, idx, now)
            requests.append(NewRequest(f"r{idx}", now, num_output, num_prompt_tokens=num_prompt))
        return requests


@dataclass(frozen=True, slots=True)
class Outcome:
    """End-to-end latency under one mode."""

    p99_seconds: float
    mean_seconds: float
    num_preemptions: int
    num_swaps: int


def bursty(rng: random.Random, idx: int, now: float) -> Shape:
    """Forty short prompts at once, every 20 seconds, with long answers."""
    now = idx / 40 * 20.0 if idx % 40 == 0 else now
    return now + rng.expovariate(20), rng.randint(100, 600), rng.randint(400, 1600)


def adversarial(rng: random.Random, idx: int, now: float) -> Shape:
    """Short prompts with long answers, and every so often a huge one: memory goes over the edge."""
    now += rng.expovariate(8)
    if idx % 16 == 15:
        return now, rng.randint(40_000, 60_000), rng.randint(200, 500)
    return now, rng.randint(100, 400), rng.randint(400, 1600)


def mixed(rng: random.Random, _: int, now: float) -> Shape:
    """One in seven is a long document with a short answer."""
    now += rng.expovariate(4)
    if rng.random() < 0.85:
        return now, rng.randint(100, 300), rng.randint(200, 1200)
    return now, rng.randint(30_000, 60_000), rng.randint(50, 200)


_SLOW: Final = LinkSeed(4e-6, 4e-6, 6e9)  # pageable memory over PCIe 4
_FAR: Final = LinkSeed(10e-3, 4e-6, 6e9)  # the same with a long way round
_OTHER: Final = LinkSeed(4e-6, 4e-6, 25e9)  # PCIe 4, pinned
MIXES: Final = (
    Mix("bursty", bursty, 20_000, _SLOW),
    Mix("bursty, fast link", bursty, 20_000, _OTHER),
    Mix("bursty, far", bursty, 20_000, _FAR),
    Mix("adversarial, far", adversarial, 80_000, _FAR),
    Mix("adversarial, far, eager", adversarial, 80_000, _FAR, "eager"),
    Mix("mixed, far", mixed, 72_000, LinkSeed(20e-3, 4e-6, 12e9)),
    Mix("mixed, far, eager", mixed, 72_000, LinkSeed(20e-3, 4e-6, 12e9), "eager"),
    Mix("mixed, very far", mixed, 72_000, LinkSeed(50e-3, 4e-6, 25e9)),
)


def compare(mix: Mix) -> Mapping[PreemptMode, Outcome]:
    """Serve a mix under each mode: Llama-3.1-8B on an H100 with the mix's link."""
    return {mode: _serve(mix, mode) for mode in PreemptMode}


def _serve(mix: Mix, mode: PreemptMode) -> Outcome:
    engine = _engine(mix, mode)
    requests, latencies, idx = mix.requests(), [], 0
    while idx < len(requests) or engine.num_unfinished:
        while idx < len(requests) and requests[idx].arrived_at <= engine.now:
            engine.add(requests[idx])
            idx += 1
        due = requests[idx].arrived_at if idx < len(requests) else None
        if not engine.num_unfinished and due is not None:
            engine.wait_until(due)
            continue
        latencies += [served.e2e_seconds for served in engine.step(due).finished]
    gauges = engine.gauges
    engine.close()
    latencies.sort()
    return Outcome(
        latencies[int(0.99 * (len(latencies) - 1))],
        sum(latencies) / len(latencies),
        gauges.num_preemptions,
        gauges.num_swaps,
    )


def _engine(mix: Mix, mode: PreemptMode) -> Engine:
    machine = ModelledMachine.of(known_model("llama-3.1-8b").shape, known_hardware("h100"), {})
    machine = replace(machine, links={offload_link(): mix.link, reload_link(): mix.link})
    settings = EngineSettings(
        num_blocks=mix.num_tokens // 16,
        max_model_len=min(62_000, mix.num_tokens),
        preemption=mode,
        watermark=0.0,
    )
    return modelled_engine(settings, machine, _config(mix))


def _config(mix: Mix) -> Config:
    return parse_mapping(
        {
            "tiers": [{"kind": "dram", "capacity": "64GiB", "pin": "off"}],
            "policy": {"offload": mix.offload},
        }
    )
