"""A bounded log of what was decided for each request, what was predicted and what came of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import numbers
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY: Final = 4096


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """What came of a decision.

    Attributes:
        num_loaded_blocks, num_failed_blocks: of the blocks chosen.
        measured_seconds: what ``predicted_seconds["load"]`` predicted; None if unknown.
        ttft_seconds: what ``predicted_seconds["chosen"]`` predicted; None if unknown.
    """

    num_loaded_blocks: int
    num_failed_blocks: int
    measured_seconds: float | None = None
    ttft_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """One plan for one request.

    Attributes:
        time: seconds, of whichever clock the caller uses throughout.
        request_id: as the engine names it. epoch: of the cache.
        num_tokens: of the prompt. num_local_tokens: of those, in HBM already.
        num_hit_blocks: tier name to leading blocks found there, after the local ones.
        predicted_seconds: alternative to predicted time to first token, such as "reload",
            "recompute", "chosen"; and "load", what of the chosen one is the reload alone.
        num_chosen_blocks: blocks to reload; 0 means recompute.
        mode, reason: as the planner names them.
        outcome: None until something came of the decision.
        block_size: tokens of a block; 0 if the caller does not say.
        in_step: whether the reload runs within the engine step that computes the rest.
    """

    time: float
    request_id: str
    epoch: int
    num_tokens: int
    num_local_tokens: int
    num_hit_blocks: Mapping[str, int]
    predicted_seconds: Mapping[str, float]
    num_chosen_blocks: int
    mode: str
    reason: str
    outcome: DecisionOutcome | None = None
    block_size: int = 0
    in_step: bool = False

    def to_json(self) -> str:
        """Return one line of JSON, without its end; numbers that JSON lacks become null."""
        return json.dumps(_plain(self), separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class DecisionSummary:
    """What a log holds, in numbers.

    Attributes:
        num_open: decisions without an outcome.
        num_lost: open decisions that were pushed out or superseded since the start.
        num_finished: finished decisions in the ring, which the rest is about.
        num_by_reason: reason to decisions.
        num_loaded_blocks, num_failed_blocks: sums of the outcomes.
        median_relative_error: of the predictions that were measured; None if there are none.
    """

    num_open: int
    num_lost: int
    num_finished: int
    num_by_reason: Mapping[str, int] = field(default_factory=dict)
    num_loaded_blocks: int = 0
    num_failed_blocks: int = 0
    median_relative_error: float | None = None


class DecisionLog:
    """Keep the last finished decisions in memory and, if wanted, all of them in a file.

    A request has at most one open decision. Another one for it (after a preemption, or planned
    again) takes its place.

    Args:
        capacity: finished decisions kept, and open ones at most.
        path: file to which every finished decision is appended as one line of JSON; None for
            none. If it cannot be written, the log says so once and does without.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, path: Path | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"a log of {capacity} decisions holds nothing")
        self._capacity = capacity
        self._path = path
        self._sink: TextIO | None = None
        self._open: dict[str, Decision] = {}
        self._finished: deque[Decision] = deque(maxlen=capacity)
        self._num_lost = 0

    def open(self) -> None:
        """Open the file, if there is to be one. Does nothing if it is open."""
        if self._path is None or self._sink is not None:
            return
        if self._path.exists() and not self._path.is_file():  # opening a FIFO would wait for ever
            logger.warning("decisions are not written to %s: it is no regular file", self._path)
            return
        try:
            self._sink = self._path.open("a", encoding="ascii", buffering=1)
        except OSError as error:
            logger.warning("decisions are not written to %s: %s", self._path, error)

    def close(self) -> None:
        """Close the file, if it is open; decisions in memory stay."""
        sink, self._sink = self._sink, None
        if sink is None:
            return
        try:
            sink.close()
        except OSError as error:
            logger.warning("last decisions may be missing from %s: %s", self._path, error)

    def record(self, decision: Decision) -> None:
        """Take in a decision that has no outcome yet."""
        if self._open.pop(decision.request_id, None) is not None:
            self._num_lost += 1
        elif len(self._open) >= self._capacity:
            del self._open[next(iter(self._open))]
            self._num_lost += 1
        self._open[decision.request_id] = decision

    def note(self, request_id: str, outcome: DecisionOutcome) -> None:
        """Keep what came of an open decision so far."""
        decision = self._open.get(request_id)
        if decision is not None:
            self._open[request_id] = dataclasses.replace(decision, outcome=outcome)

    def finish(self, request_id: str, outcome: DecisionOutcome) -> Decision | None:
        """Add the outcome to a request's open decision; None if it has none (any more)."""
        decision = self._open.pop(request_id, None)
        if decision is None:
            return None
        finished = dataclasses.replace(decision, outcome=outcome)
        self._finished.append(finished)
        self._write(finished)
        return finished

    def open_decision(self, request_id: str) -> Decision | None:
        """Return a request's decision that is not finished; None if there is none."""
        return self._open.get(request_id)

    def finished(self) -> tuple[Decision, ...]:
        """Return the last finished decisions, oldest first."""
        return tuple(self._finished)

    def summary(self) -> DecisionSummary:
        """Return the log in numbers."""
        outcomes = [d.outcome for d in self._finished if d.outcome is not None]
        errors = list(_relative_errors(self._finished))
        return DecisionSummary(
            num_open=len(self._open),
            num_lost=self._num_lost,
            num_finished=len(self._finished),
            num_by_reason=dict(Counter(decision.reason for decision in self._finished)),
            num_loaded_blocks=sum(outcome.num_loaded_blocks for outcome in outcomes),
            num_failed_blocks=sum(outcome.num_failed_blocks for outcome in outcomes),
            median_relative_error=statistics.median(errors) if errors else None,
        )

    def _write(self, decision: Decision) -> None:
        if self._sink is None:
            return
        try:
            self._sink.write(decision.to_json() + "\n")
        except OSError as error:
            logger.warning("decisions are no longer written to %s: %s", self._path, error)
            self._abandon()

    def _abandon(self) -> None:
        """Give up the file; what it still buffers is lost, and that was said already."""
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
        except OSError as error:
            logger.debug("closing %s: %s", self._path, error)


def _relative_errors(decisions: Iterable[Decision]) -> Iterable[float]:
    """Yield ``|predicted - measured| / measured`` of the decisions that were measured."""
    for decision in decisions:
        predicted = decision.predicted_seconds.get("load")
        measured = decision.outcome.measured_seconds if decision.outcome else None
        if predicted is not None and measured is not None and measured > 0:
            yield abs(predicted - measured) / measured


def _plain(value: object) -> object:
    """Return a value that JSON can carry: NaN and infinity become None, numpy's numbers plain."""
    if isinstance(value, Decision | DecisionOutcome):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
