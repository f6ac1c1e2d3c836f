"""What a log of decisions says of one request, and of all of them."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any, Final

import numpy as np

from kvtiers.bench.explain_words import sentence
from kvtiers.model.errors import ConfigError
from kvtiers.observe.decision_file import DecisionFile, LoggedDecision

NUM_WORST: Final = 10
MAX_PAIRS: Final = 20_000  # that a picture shows: the last ones
_MAX_NEAR_AMONG: Final = 10_000  # ids that are compared with an unknown one: the last ones
RELOAD, RECOMPUTE = "reload", "recompute"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision in words and numbers.

    Attributes:
        sentence: why. choice: what was chosen.
        errors: "load" and "ttft" to ``predicted / measured - 1``, where both are known.
        regret_seconds: see `regret_seconds`.
    """

    decision: LoggedDecision
    choice: str
    sentence: str
    errors: Mapping[str, float]
    regret_seconds: float | None

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON: the line as written, and what follows from it."""
        return {
            "line": self.decision.line,
            "decision": dict(self.decision.fields),
            "choice": self.choice,
            "sentence": self.sentence,
            "errors": dict(self.errors),
            "regret_seconds": self.regret_seconds,
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """What was predicted, and what was measured, in seconds."""

    request_id: str
    line: int
    predicted: float
    measured: float

    @property
    def late_seconds(self) -> float:
        """How much longer it took than was predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True, slots=True)
class Errors:
    """How far off predictions were.

    Attributes:
        median, p90: of ``|predicted - measured| / measured``.
        bias: median of ``predicted / measured - 1``; negative: it takes longer than predicted.
    """

    num: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A log in numbers.

    Attributes:
        num_by_decision: reload or recompute. num_by_reason: as the planner names it.
        num_blocks_by_tier: found there, after the local ones. num_tokens_by_tier: the same in
            tokens, of the lines that say how many a block has. num_tokens: asked for, and in HBM.
        num_failed_blocks: of those chosen.
        load, ttft: None where nothing was measured.
        regret_seconds: sum of what other choices had saved; see `regret_seconds`.
        regret_share: of the time to the first token that the best choices had taken.
        num_regretted: decisions that were not the best.
        auto_saves_seconds: in mode shadow, what auto was predicted to save.
        worst: loads that took the longest beyond their prediction.
    """

    num_decisions: int
    num_broken: int
    num_by_decision: Mapping[str, int]
    num_by_reason: Mapping[str, int]
    num_blocks_by_tier: Mapping[str, int]
    num_tokens_by_tier: Mapping[str, int]
    num_tokens: int
    num_local_tokens: int
    num_chosen_blocks: int
    num_loaded_blocks: int
    num_failed_blocks: int
    load: Errors | None
    ttft: Errors | None
    regret_seconds: float
    regret_share: float
    num_regretted: int
    auto_saves_seconds: float
    worst: tuple[Pair, ...]
    pairs: Mapping[str, tuple[Pair, ...]] = field(repr=False, default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON, without the pairs."""
        plain = asdict(self)
        del plain["pairs"]
        return plain


def explain(log: DecisionFile, request_id: str) -> list[Explanation]:
    """Return what was decided for a request, in order: again after each preemption.

    Raises:
        ConfigError: nothing was; names requests with similar ids.
    """
    found: list[Explanation] = []
    others: deque[str] = deque(maxlen=_MAX_NEAR_AMONG)
    for decision in log:
        if decision.request_id == request_id:
            found.append(explanation(decision))
        else:
            others.append(decision.request_id)
    if not found:
        raise ConfigError(_unknown(log, request_id, tuple(dict.fromkeys(others))))
    return found


def explanation(decision: LoggedDecision) -> Explanation:
    """Return one decision in words and numbers."""
    pairs = _pairs(decision)
    return Explanation(
        decision=decision,
        choice=_choice(decision),
        sentence=sentence(decision),
        errors={name: pair.predicted / pair.measured - 1 for name, pair in pairs.items()},
        regret_seconds=regret_seconds(decision),
    )


def regret_seconds(decision: LoggedDecision) -> float | None:
    """Estimate how much sooner the first token had come with another choice.

    What the chosen one took is its prediction with the load as it was measured, but no more than
    the first token took; what the others had taken is what was predicted of them, since nobody
    tried. So errors in the prediction of computing mostly cancel.

    Returns:
        seconds, >= 0; None where nothing was predicted.
    """
    taken = _taken_seconds(decision)
    if taken is None:
        return None
    return taken - min([taken, *_others_seconds(decision)])


def summarize(log: DecisionFile) -> Summary:
    """Return a log in numbers; reads it once, and keeps only numbers."""
    tally = _Tally()
    for decision in log:
        tally.add(decision)
    return tally.summary(log.num_broken)


class _Tally:
    """Adds decisions up."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._errors: dict[str, list[float]] = {"load": [], "ttft": []}
        self._pairs: dict[str, deque[Pair]] = {
            name: deque(maxlen=MAX_PAIRS) for name in self._errors
        }
        self._worst: list[tuple[float, int, Pair]] = []
        self._regret = self._best = self._auto_saves = 0.0

    def add(self, decision: LoggedDecision) -> None:
        self._decisions[RELOAD if decision.num_chosen_blocks else RECOMPUTE] += 1
        self._reasons[decision.reason] += 1
        self._blocks.update(decision.num_hit_blocks)
        if decision.block_size:
            for tier, num in decision.num_hit_blocks.items():
                self._tokens[tier] += num * decision.block_size
        self._counts["tokens"] += decision.count("num_tokens") or 0
        self._counts["local"] += decision.count("num_local_tokens") or 0
        self._counts["chosen"] += decision.num_chosen_blocks
        self._counts["loaded"] += decision.num_loaded_blocks
        self._counts["failed"] += decision.num_failed_blocks
        for name, pair in _pairs(decision).items():
            self._errors[name].append(pair.predicted / pair.measured - 1)
            self._pairs[name].append(pair)
            if name == "load":
                self._keep_worst(pair)
        self._add_regret(decision)

    def _keep_worst(self, pair: Pair) -> None:
        entry = (pair.late_seconds, -pair.line, pair)
        if len(self._worst) < NUM_WORST:
            heapq.heappush(self._worst, entry)
        else:
            heapq.heappushpop(self._worst, entry)

    def _add_regret(self, decision: LoggedDecision) -> None:
        regret, taken = regret_seconds(decision), _taken_seconds(decision)
        if regret is not None and taken is not None:
            self._regret += regret
            self._best += taken - regret
            self._counts["regretted"] += regret > 0
        predicted = decision.predicted_seconds
        if decision.mode == "shadow" and {"chosen", "auto"} <= predicted.keys():
            self._auto_saves += predicted["chosen"] - predicted["auto"]

    def summary(self, num_broken: int) -> Summary:
        counts = self._counts
        return Summary(
            num_decisions=self._decisions.total(),
            num_broken=num_broken,
            num_by_decision=dict(self._decisions.most_common()),
            num_by_reason=dict(self._reasons.most_common()),
            num_blocks_by_tier=dict(self._blocks.most_common()),
            num_tokens_by_tier=dict(self._tokens.most_common()),
            num_tokens=counts["tokens"],
            num_local_tokens=counts["local"],
            num_chosen_blocks=counts["chosen"],
            num_loaded_blocks=counts["loaded"],
            num_failed_blocks=counts["failed"],
            load=_errors(self._errors["load"]),
            ttft=_errors(self._errors["ttft"]),
            regret_seconds=self._regret,
            regret_share=self._regret / self._best if self._best > 0 else 0.0,
            num_regretted=counts["regretted"],
            auto_saves_seconds=self._auto_saves,
            worst=tuple(pair for _, _, pair in sorted(self._worst, reverse=True)),
            pairs={name: tuple(pairs) for name, pairs in self._pairs.items()},
        )


def _errors(relative: list[float]) -> Errors | None:
    if not relative:
        return None
    sizes = np.abs(relative)
    return Errors(
        len(relative),
        float(np.median(sizes)),
        float(np.quantile(sizes, 0.9)),
        float(np.median(relative)),
    )


def _pairs(decision: LoggedDecision) -> dict[str, Pair]:
    """Return what was both predicted and measured."""
    found = {}
    ttft = None if decision.num_failed_blocks else decision.ttft_seconds
    measured = {"load": ("load", decision.load_seconds), "ttft": ("chosen", ttft)}
    for name, (alternative, seconds) in measured.items():
        predicted = decision.predicted_seconds.get(alternative)
        if predicted is not None and seconds is not None and seconds > 0:
            found[name] = Pair(decision.request_id, decision.line, predicted, seconds)
    return found


def _taken_seconds(decision: LoggedDecision) -> float | None:
    """Return what the chosen one took, by prediction, with the load as it was measured.

    A load within the engine's step is measured with that step; the first token bounds both.
    """
    chosen = decision.predicted_seconds.get("chosen")
    load = _pairs(decision).get("load")
    if chosen is None or load is None:
        return chosen
    taken = chosen + load.late_seconds
    ttft = decision.ttft_seconds
    return taken if ttft is None or ttft <= 0 else min(taken, ttft)


def _others_seconds(decision: LoggedDecision) -> Iterable[float]:
    """Yield what was predicted of the alternatives that were not chosen."""
    predicted = decision.predicted_seconds
    if decision.num_chosen_blocks and RECOMPUTE in predicted:
        yield predicted[RECOMPUTE]
    all_of_it = predicted.get(RELOAD) == predicted.get("chosen")
    if RELOAD in predicted and not (decision.num_chosen_blocks and all_of_it):
        yield predicted[RELOAD]


def _choice(decision: LoggedDecision) -> str:
    hits, chosen = sum(decision.num_hit_blocks.values()), decision.num_chosen_blocks
    if not chosen:
        return "recompute everything"
    tokens = f" ({chosen * decision.block_size:,} tokens)" if decision.block_size else ""
    return f"reload {chosen} of {hits} blocks{tokens}, compute the rest"


def _unknown(log: DecisionFile, request_id: str, others: tuple[str, ...]) -> str:
    if not others:
        return f"{log.path}: holds no decision (yet), so none of request {request_id!r}"
    near = [other for other in others if request_id and request_id in other][-3:]
    near = near or get_close_matches(request_id, others, n=3, cutoff=0.5) or list(others[-3:])
    names = ", ".join(repr(name) for name in near)
    more = ", among others" if len(others) > len(near) else ""
    return f"{log.path}: no decision of request {request_id!r}; there are {names}{more}"
