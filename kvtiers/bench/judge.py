"""Calibrates the cost model on some measured lengths, and judges it on the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from kvtiers.bench.measure import SPLIT, Measured
from kvtiers.bench.plan import RECOMPUTE, MeasuredPlan
from kvtiers.cost.break_even import break_even_tokens
from kvtiers.cost.links import LinkModel, Links, read_link, reload_link
from kvtiers.cost.planner import PlanPolicy, Prompt, ReloadPlan, plan_reload
from kvtiers.cost.prefill import MeasuredPrefill, PrefillModel, PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.model.messages import Link

ALLOWED_ERROR: Final = 0.10
SPREADS_ALLOWED: Final = 1.5  # of the repeats' spread, where that is more
COMPARABLE: Final = 2.0  # load and computation are alike within this factor: a split may gain
MAX_SPLIT_LENGTHS: Final = 3
_SEED_STEP_SECONDS: Final = 0.001
_SEED_KV_BYTES_PER_SECOND: Final = 1e10
_SEED_LATENCY_SECONDS: Final = 0.001
_SEED_SECONDS_PER_PIECE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way at one length.

    Attributes:
        fitted: whether the model was calibrated on it.
        measured_seconds: median time to the first token. spread: of the repeats, the distance of
            their quartiles over the median.
        predicted_seconds: what the calibrated model says.
    """

    way: str
    num_tokens: int
    fitted: bool
    num_repeats: int
    measured_seconds: float
    spread: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Distance of the prediction from the median, over the median."""
        return abs(self.predicted_seconds - self.measured_seconds) / self.measured_seconds


@dataclass(frozen=True, slots=True)
class Crossover:
    """From which prompt length on a reload is faster than computing.

    Attributes:
        measured_tokens: between lengths interpolated on logarithmic scales; the first length
            where a reload is always faster; None where it is not at the last.
        predicted_tokens: a prefix by the calibrated model; None: never, up to the last length.
    """

    tier: str
    measured_tokens: float | None
    predicted_tokens: int | None


@dataclass(frozen=True, slots=True)
class Regret:
    """What the planner's choice costs at one length on one tier, over the better pure choice.

    Attributes:
        chosen: "recompute" or "reload", of the calibrated model; a part where it would load one
            (never measured in serial: `regret` is None).
    """

    tier: str
    num_tokens: int
    chosen: str
    regret: float | None


@dataclass(frozen=True, slots=True)
class SplitGain:
    """A layer-wise split beside both pure choices, all three measured in turn by one means.

    Attributes:
        num_blocks: of the prompt. num_loaded_blocks: of them, in a split; the rest is computed.
        split_seconds, recompute_seconds, reload_seconds: medians.
        gain: how many times faster than the better pure choice, the median over the rounds.
    """

    num_tokens: int
    num_blocks: int
    num_loaded_blocks: int
    num_rounds: int
    split_seconds: float
    recompute_seconds: float
    reload_seconds: float
    gain: float

    @property
    def alike(self) -> bool:
        """Whether load and computation were within a factor of `COMPARABLE` of each other."""
        return 1 / COMPARABLE <= self.recompute_seconds / self.reload_seconds <= COMPARABLE


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that a run says.

    Attributes:
        complete: whether every measurement of the plan was made.
        median_error: over the lengths that were not fitted; None without such.
        allowed_error: the larger of 10 % and 1.5 x the median spread of those.
        calibrated: coefficients by name.
    """

    complete: bool
    comparisons: tuple[Comparison, ...]
    crossovers: tuple[Crossover, ...]
    regrets: tuple[Regret, ...]
    splits: tuple[SplitGain, ...]
    median_error: float | None
    allowed_error: float
    calibrated: dict[str, float]

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plain = asdict(self)
        for row, comparison in zip(plain["comparisons"], self.comparisons, strict=True):
            row["error"] = comparison.error
        for row, split in zip(plain["splits"], self.splits, strict=True):
            row["alike"] = split.alike
        return plain


class Calibrated:
    """The cost model after a fit to the medians of some lengths.

    A way weighs as much as another, and the computation of what reloads leave, which all tiers
    have in common, as much as that of whole prompts. Reload times are fitted as a request sees
    them, from its order to its last block: waits between steps and the control plane's part are
    in the links' latencies.

    Args:
        slowdown: how many times longer the engine takes now than when it was measured: other
            work of the machine comes and goes.

    Raises:
        ValueError: too few lengths were measured.
    """

    def __init__(
        self, plan: MeasuredPlan, points: Sequence[Measured], slowdown: float = 1.0
    ) -> None:
        fitted = [p for p in points if p.num_tokens in plan.fitted_lengths and p.way != SPLIT]
        if len({p.num_tokens for p in fitted if p.way == RECOMPUTE}) < 2:
            raise ValueError("two lengths must be measured before a model can be fitted")
        self.plan = plan
        self._slowdown = slowdown
        self.shape = model_shape(plan.shape.to_hf_config())
        self.prefill = self._fit_prefill(self._prompts(fitted))
        self.links = self._fit_links(fitted)

    def plan_at(self, tier: str, num_tokens: int, num_stages: int = 1) -> ReloadPlan:
        """Return what the planner does with a prompt that lies on one tier."""
        num_blocks = (num_tokens - 1) // self.plan.block_size
        return plan_reload(
            np.full(num_blocks, self.plan.tiers.index(tier), np.uint8),
            np.ones(num_blocks + 1, np.bool_),
            Prompt(num_tokens, 0, self.plan.block_size, self.plan.block_nbytes),
            self.links,
            self.prefill,
            PlanPolicy(margin=0.0, num_load_stages=num_stages),
        )

    def break_even_tokens(self, tier: str) -> int | None:
        """Return the shortest prefix from which on a reload is predicted to be faster."""
        plan = self.plan
        source, longest = plan.tiers.index(tier), plan.lengths[-1]
        return break_even_tokens(
            source, plan.block_size, plan.block_nbytes, longest, self.links, self.prefill
        )

    def coefficients(self) -> dict[str, float]:
        """Return what was learnt, by name."""
        found = {
            "step_seconds": self.prefill.step_seconds,
            "flops_per_second": self.prefill.flops_per_second,
            "attention_flops_per_second": self.prefill.attention_flops_per_second,
            "seconds_per_kv_element": self.prefill.seconds_per_kv_element,
        }
        for name in (reload_link(), *map(read_link, self.plan.stores)):
            link = self.links[name]
            found[f"{name} latency_seconds"] = link.latency_seconds
            found[f"{name} seconds_per_piece"] = link.seconds_per_piece
            found[f"{name} bandwidth_bytes_per_second"] = link.bandwidth_bytes_per_second
        return found

    def _prompts(self, points: Sequence[Measured]) -> list[MeasuredPrefill]:
        """Return the median of each length's computation, of whole prompts and of rests."""
        by_part: dict[tuple[int, int], list[float]] = {}
        for point in points:
            context = point.num_loaded_blocks * self.plan.block_size
            part = point.num_tokens - context, context
            by_part.setdefault(part, []).append(point.rest_seconds)
        return [
            MeasuredPrefill(*part, self._slowdown * statistics.median(seconds))
            for part, seconds in by_part.items()
        ]

    def _fit_prefill(self, prompts: Sequence[MeasuredPrefill]) -> PrefillModel:
        """Fit the engine's speed. The seed is as fast as the fastest prompt was as a whole."""
        flops = [
            float(self.shape.prefill_flops(p.num_tokens, p.num_context_tokens)) / p.seconds
            for p in prompts
        ]
        speed = PrefillSpeed(
            _SEED_STEP_SECONDS,
            max(flops),
            kv_bytes_per_second=_SEED_KV_BYTES_PER_SECOND,
            kv_element_nbytes=self.plan.shape.itemsize,
        )
        prefill = PrefillModel.of(speed, self.shape, self.plan.max_tokens_per_step)
        prefill.fit(prompts)
        return prefill

    def _fit_links(self, points: Sequence[Measured]) -> Links:
        """Fit every tier's link: the stores' after DRAM's, whose last block follows theirs."""
        block = self.plan.block_nbytes
        models: dict[str, LinkModel] = {}
        for tier in self.plan.tiers:
            store = tier in self.plan.stores
            name = read_link(tier) if store else reload_link()
            after = float(models[reload_link()].seconds(1, block)) if store else 0.0
            loads: dict[int, list[float]] = {}
            for point in points:
                if point.way == tier:
                    loads.setdefault(point.num_loaded_blocks, []).append(point.load_seconds)
            medians = {num: statistics.median(seconds) for num, seconds in loads.items()}
            jobs = [  # beside other work DRAM's may seem the longer
                Link(name, num, num * block, max(seconds - after, 0.1 * seconds))
                for num, seconds in medians.items()
                if seconds > 0
            ]
            if not jobs:
                raise ValueError(f"no reload from {tier} was measured")
            # As fast as the fastest job was as a whole: a fit trusts seeds to some hundred times.
            fastest = max(job.nbytes / job.seconds for job in jobs)
            models[name] = LinkModel(_SEED_LATENCY_SECONDS, _SEED_SECONDS_PER_PIECE, fastest)
            models[name].fit(jobs)
        return Links(self.plan.stores, models)


def comparable_lengths(calibrated: Calibrated, tier: str) -> list[int]:
    """Return the lengths where a split is worth measuring: load and computation are alike there.

    At most `MAX_SPLIT_LENGTHS`, those that are most alike by the model's account.
    """
    ratios = {}
    for num_tokens in calibrated.plan.lengths:
        serial = calibrated.plan_at(tier, num_tokens)
        ratios[num_tokens] = abs(math.log(serial.reload_seconds / serial.recompute_seconds))
    near = [n for n in sorted(ratios, key=ratios.__getitem__) if ratios[n] <= math.log(COMPARABLE)]
    return sorted(near[:MAX_SPLIT_LENGTHS])


def best_split(plan: MeasuredPlan, points: Sequence[Measured], num_tokens: int) -> int:
    """Return how many blocks the planner loads beside the computation of the rest.

    The first splits without a load say how fast the machine computes at the moment.
    """
    usual = Calibrated(plan, points)
    tier = split_tier(plan)
    now = [
        p.ttft_seconds / usual.plan_at(tier, p.num_tokens).recompute_seconds
        for p in points
        if p.way == SPLIT and p.num_loaded_blocks == 0 and p.repeat == 0
    ]
    slowdown = statistics.median(now) if now else 1.0
    return Calibrated(plan, points, slowdown).plan_at(tier, num_tokens, plan.num_stages).num_blocks


def judge(plan: MeasuredPlan, points: Sequence[Measured], complete: bool) -> Verdict:
    """Compare what was measured with what the calibrated model says.

    Raises:
        ValueError: too few lengths were measured to fit a model.
    """
    calibrated = Calibrated(plan, points)
    comparisons = _comparisons(calibrated, points)
    judged = [c for c in comparisons if not c.fitted]
    spread = statistics.median(c.spread for c in judged) if judged else 0.0
    return Verdict(
        complete=complete,
        comparisons=tuple(comparisons),
        crossovers=tuple(_crossover(calibrated, comparisons, tier) for tier in plan.tiers),
        regrets=tuple(_regrets(calibrated, comparisons)),
        splits=tuple(_split_gains(plan, points)),
        median_error=statistics.median(c.error for c in judged) if judged else None,
        allowed_error=max(ALLOWED_ERROR, SPREADS_ALLOWED * spread),
        calibrated=calibrated.coefficients(),
    )


def spread_of(values: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median; 0 for a single value."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float((high - low) / middle)


def _comparisons(calibrated: Calibrated, points: Sequence[Measured]) -> list[Comparison]:
    plan = calibrated.plan
    found = []
    for way in (RECOMPUTE, *plan.tiers):
        for num_tokens in plan.lengths:
            seconds = [p.ttft_seconds for p in points if (p.way, p.num_tokens) == (way, num_tokens)]
            if not seconds:
                continue
            serial = calibrated.plan_at(plan.tiers[0] if way == RECOMPUTE else way, num_tokens)
            predicted = serial.recompute_seconds if way == RECOMPUTE else serial.reload_seconds
            fitted = num_tokens in plan.fitted_lengths
            median, spread = statistics.median(seconds), spread_of(seconds)
            found.append(
                Comparison(way, num_tokens, fitted, len(seconds), median, spread, predicted)
            )
    return found


def _medians(comparisons: Sequence[Comparison], way: str) -> dict[int, float]:
    return {c.num_tokens: c.measured_seconds for c in comparisons if c.way == way}


def _crossover(calibrated: Calibrated, comparisons: Sequence[Comparison], tier: str) -> Crossover:
    compute, reload = _medians(comparisons, RECOMPUTE), _medians(comparisons, tier)
    lengths = [n for n in compute if n in reload]
    advantage = {n: math.log(compute[n] / reload[n]) for n in lengths}  # > 0: reload is faster
    measured: float | None = None
    for idx in range(len(lengths) - 1, -1, -1):
        here = lengths[idx]
        if advantage[here] <= 0:
            if idx + 1 < len(lengths):
                after = lengths[idx + 1]
                share = -advantage[here] / (advantage[after] - advantage[here])
                measured = math.exp((1 - share) * math.log(here) + share * math.log(after))
            break
        measured = float(here)
    return Crossover(tier, measured, calibrated.break_even_tokens(tier))


def _regrets(calibrated: Calibrated, comparisons: Sequence[Comparison]) -> list[Regret]:
    compute = _medians(comparisons, RECOMPUTE)
    found = []
    for tier in calibrated.plan.tiers:
        for num_tokens, reload in _medians(comparisons, tier).items():
            if num_tokens not in compute:
                continue
            most = (num_tokens - 1) // calibrated.plan.block_size
            num_blocks = calibrated.plan_at(tier, num_tokens).num_blocks
            measured = {0: compute[num_tokens], most: reload}
            best = min(measured.values())
            regret = measured[num_blocks] / best - 1 if num_blocks in measured else None
            names = {0: "recompute", most: "reload"}
            found.append(Regret(tier, num_tokens, names.get(num_blocks, "a part"), regret))
    return found


def _split_gains(plan: MeasuredPlan, points: Sequence[Measured]) -> list[SplitGain]:
    found = []
    for num_tokens in sorted({p.num_tokens for p in points if p.way == SPLIT}):
        most = (num_tokens - 1) // plan.block_size
        seconds = {
            (p.num_loaded_blocks, p.repeat): p.ttft_seconds
            for p in points
            if (p.way, p.num_tokens) == (SPLIT, num_tokens)
        }
        parts = [num for num, _ in seconds if num not in (0, most)]
        rounds = [
            (seconds[0, r], seconds[most, r], seconds[parts[0], r])
            for r in range(plan.num_repeats)
            if parts and {(0, r), (most, r), (parts[0], r)} <= seconds.keys()
        ]
        if not rounds:
            continue
        gain = statistics.median(min(pure[:2]) / pure[2] for pure in rounds)
        recompute, reload, split = (statistics.median(way) for way in zip(*rounds, strict=True))
        found.append(
            SplitGain(num_tokens, most, parts[0], len(rounds), split, recompute, reload, gain)
        )
    return found


def split_tier(plan: MeasuredPlan) -> str:
    """Return the tier that splits load from."""
    return "nvme" if "nvme" in plan.stores else plan.stores[0]
