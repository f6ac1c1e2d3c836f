"""What an engine that really runs teaches the modelled one: its steps, links and hand-over."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from kvtiers.cost.links import LinkModel, LinkSeed
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.cost.steps import StepModel
from kvtiers.engines.reference.modelled_media import HandOver
from kvtiers.model.messages import Link, StepOrders, TransferKind, WorkerReport

Steps = list[tuple[list[int], list[int], float]]


@dataclass
class Taught:
    """Measurements of one engine, as plain data.

    Attributes:
        steps: that loaded nothing: new tokens and those before them, by sequence, and seconds.
        links: jobs, as ranks report them.
        schedules: of each step, how many reloads it began, how many tokens it computes, and the
            seconds before its orders went out.
        notices: seconds that a reload waits for its answer, as kvtiers has learnt.
    """

    steps: Steps = field(default_factory=list)
    links: list[tuple[str, int, int, float]] = field(default_factory=list)
    schedules: list[tuple[int, int, float]] = field(default_factory=list)
    notices: list[float] = field(default_factory=list)

    @classmethod
    def merged(cls, parts: Iterable[Taught]) -> Taught:
        """Return all that was measured."""
        whole = cls()
        for part in parts:
            whole.steps += part.steps
            whole.links += part.links
            whole.schedules += part.schedules
            whole.notices += part.notices
        return whole

    def sizes(self) -> tuple[int, ...]:
        """Return how much of each was measured, for `cut`."""
        return len(self.steps), len(self.links), len(self.schedules), len(self.notices)

    def cut(self, sizes: Sequence[int]) -> None:
        """Forget what was measured since `sizes` was asked: it is to be judged."""
        lists: tuple[list[Any], ...] = (self.steps, self.links, self.schedules, self.notices)
        for mine, size in zip(lists, sizes, strict=True):
            del mine[size:]

    def watch(self, connector: Any) -> None:
        """Keep what links are reported to have done."""
        reported = connector.reported

        def watched(report: WorkerReport) -> Any:
            self.links += [astuple(job) for job in report.links]
            return reported(report)

        connector.reported = watched

    def notice(self, connector: Any) -> None:
        """Keep what kvtiers has learnt that a reload waits for its answer, on an idle engine."""
        self.notices.append(connector.controller.cost.noticing.seconds(computes=False))

    def step_model(self, seed: PrefillSpeed, hf_config: Mapping[str, Any]) -> StepModel:
        """Return the model of the steps."""
        steps = StepModel(seed, model_shape(hf_config), 1e-4, 1e-3)
        rows = [(new, context) for new, context, _ in self.steps]
        steps.fit(rows, [seconds for *_, seconds in self.steps])
        return steps

    def link_seeds(self, block_nbytes: int) -> dict[str, LinkSeed]:
        """Return what the links take, for blocks of one size."""
        found = {}
        jobs = [Link(*job) for job in self.links]
        for name in dict.fromkeys(job.name for job in jobs):
            model = LinkModel(1e-4, 1e-5, 5e9)
            mine = [job for job in jobs if job.name == name]
            rows = [Link(name, j.num_blocks, j.num_blocks * block_nbytes, j.seconds) for j in mine]
            model.fit(rows)
            found[name] = LinkSeed(
                model.latency_seconds, model.seconds_per_piece, model.bandwidth_bytes_per_second
            )
        return found

    def hand_over(self) -> HandOver:
        """Return what reloads take beside their links; medians."""
        usual = [seconds for num, tokens, seconds in self.schedules if not num and tokens]
        begun = [(num, seconds) for num, _, seconds in self.schedules if num]
        if not (usual and begun):
            return HandOver()
        idle = statistics.median(usual)
        plan = statistics.median((seconds - idle) / num for num, seconds in begun)
        notice = statistics.median(self.notices) if self.notices else 0.0
        return HandOver(max(0.0, plan), idle, notice)


def num_reloads(orders: StepOrders | None) -> int:
    """Return how many reloads a step begins."""
    return 0 if orders is None else sum(it.kind is TransferKind.RELOAD for it in orders.before)


def tokens_reloaded(connector: Any) -> dict[str, int]:
    """Return the tokens that kvtiers has brought so far, by tier."""
    counters = connector.counters.snapshot().counters
    return {
        labels[0]: int(value)
        for (name, labels), value in counters.items()
        if name == "kvtiers_tokens_reloaded_total"
    }


def words(
    name: str, steps: StepModel, links: Mapping[str, LinkSeed], over: HandOver, block_nbytes: int
) -> str:
    """Return what was taught about one configuration."""
    parts = [f"a step {', '.join(f'{c:.3g}' for c in steps.coefficients)}"]
    if links:
        parts.append(
            f"a reload {over.plan_seconds * 1e6:.0f} us to plan, {over.idle_seconds * 1e6:.0f} us "
            f"of a step, {over.notice_seconds * 1e6:.0f} us to notice"
        )
    parts += [
        f"{link} {seed.latency_seconds * 1e6:.0f} us + "
        f"{(seed.seconds_per_piece + block_nbytes / seed.bandwidth_bytes_per_second) * 1e6:.0f} us"
        " a block"
        for link, seed in links.items()
    ]
    return f"{name}: {'; '.join(parts)}"


def runs_of(raws: Sequence[Mapping[str, Any]], *names: str) -> list[Mapping[str, Any]]:
    """Return the runs of a cell, in the order in which they were measured."""
    return [run for raw in raws for *cell, run in raw["runs"] if cell == list(names)]
