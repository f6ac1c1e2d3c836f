"""How well the modelled runner predicts the torch runner: the same workloads, side by side.

Usage: python bench/fidelity.py [--repeats 5]

One model of a few million weights runs small workloads on the CPU; the modelled runner's step
model is fitted on two others. Workloads differ in prompt length, load and
pool, so that some preempt. Prints TTFT and throughput of both, the error, and the spread of the
torch runner's repeats, which is what this machine allows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

import torch

from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.cost.steps import StepModel
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.runners import StepResult, StepWork
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.engines.reference.torch_runner import TorchRunner
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


@dataclass(frozen=True)
class Measured:
    """What a run took."""

    ttft_seconds: float
    tokens_per_second: float


class Watched(TorchRunner):
    """A torch runner that notes its steps, and the time from one's end to the next one's."""

    steps: list[tuple[list[int], list[int], float]]
    ended: float

    def run(self, work: StepWork, orders: StepOrders | None) -> StepResult:
        """Run, and note."""
        result = super().run(work, orders)
        now = self.now
        if work.sequences:
            new = [it.num_tokens for it in work.sequences]
            context = [it.start for it in work.sequences]
            self.steps.append((new, context, now - self.ended))
        self.ended = now
        return result


def serve(engine: Engine, requests: list[NewRequest]) -> Measured:
    """Serve all requests at once."""
    began = engine.now
    for request in requests:
        engine.add(request)
    first, num_tokens = [], 0
    while engine.num_unfinished:
        report = engine.step()
        first += [engine.now - began] * len(report.first_tokens)
        num_tokens += sum(it.num_prompt_tokens + it.num_output_tokens for it in report.finished)
    return Measured(statistics.mean(first), num_tokens / (engine.now - began))


def fitted_steps(model: ReferenceModel, repeats: int) -> StepModel:
    """Measure the steps of workloads that are not judged, and fit the step model on them."""
    seen: list[tuple[list[int], list[int], float]] = []
    for workload in FITTED * repeats:
        runner = Watched(model, workload.settings())
        runner.steps, runner.ended = [], runner.now
        serve(Engine(workload.settings(), runner), workload.requests())
        seen += runner.steps
    speed = PrefillSpeed(1e-3, 2e10)
    shape = model_shape(SHAPE.to_hf_config())
    steps = StepModel(speed, shape, SHAPE.kv_nbytes_per_token, 1e10, 1e-4)
    steps.fit([(new, context) for new, context, _ in seen], [seconds for *_, seconds in seen])
    return steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    model = ReferenceModel(SHAPE)
    shape = model_shape(SHAPE.to_hf_config())
    began = time.monotonic()
    measured: dict[str, list[Measured]] = {it.name: [] for it in JUDGED}
    fitted_steps(model, 1)  # whatever is done once
    for _ in range(repeats):  # interleaved: a slow minute of the machine meets all of them
        for workload in JUDGED:
            settings = workload.settings()
            engine = Engine(settings, TorchRunner(model, settings))
            measured[workload.name].append(serve(engine, workload.requests()))
    steps = fitted_steps(model, repeats)
    print(f"fitted: {', '.join(f'{c:.3g}' for c in steps.coefficients)}")
    errors, spreads, order = [], [], []
    head = ("workload", "TTFT ms", "model", "error", "spread", "tokens/s", "model", "error")
    print("{:16} {:>8} {:>8} {:>6} {:>6} {:>9} {:>9} {:>6}".format(*head))
    for workload in JUDGED:
        machine = ModelledMachine(
            shape, PrefillSpeed(1e-3, 2e10), SHAPE.kv_nbytes_per_token, steps=steps
        )
        said = serve(modelled_engine(workload.settings(), machine), workload.requests())
        runs = measured[workload.name]
        ttfts = [run.ttft_seconds for run in runs]
        ttft = statistics.median(ttfts)
        rate = statistics.median(run.tokens_per_second for run in runs)
        spread = (max(ttfts) - min(ttfts)) / ttft
        found = (abs(said.ttft_seconds / ttft - 1), abs(said.tokens_per_second / rate - 1))
        errors += found
        spreads.append(spread)
        order.append((ttft, said.ttft_seconds))
        print(
            f"{workload.name:16} {ttft * 1e3:8.1f} {said.ttft_seconds * 1e3:8.1f} {found[0]:6.1%} "
            f"{spread:6.1%} {rate:9.0f} {said.tokens_per_second:9.0f} {found[1]:6.1%}"
        )
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]
    kept = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    spread = statistics.median(spreads)
    print(
        f"median error {statistics.median(errors):.1%}; allowed max(10 %, 1.5 x {spread:.1%}); "
        f"order of {kept} of {len(pairs)} pairs kept; {time.monotonic() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
