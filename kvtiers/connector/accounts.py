"""What the scheduler's side counts and logs of its decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvtiers.connector.requests import RequestState
from kvtiers.connector.shape import EngineShape
from kvtiers.connector.step import Reload
from kvtiers.control.answers import Answer, LoadDone
from kvtiers.control.controller import Controller
from kvtiers.model.config import Config
from kvtiers.model.messages import DRAM, WorkerReport
from kvtiers.observe.decisions import Decision, DecisionLog, DecisionOutcome
from kvtiers.observe.metrics import (
    BYTES_COPIED,
    COPY_SECONDS,
    HIT_TOKENS,
    LOOKUP_TOKENS,
    PINNED_BLOCKS,
    PREDICTION_ERROR,
    PREDICTIONS,
    REQUESTS,
    TIER_BLOCKS,
    TIER_CAPACITY_BLOCKS,
    TOKENS_RELOADED,
    WORKER_EVENTS,
    Counters,
)


class Accounts:
    """Counters and the decision log of one engine; decides nothing."""

    def __init__(
        self, config: Config, shape: EngineShape, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self.counters = counters
        self.decisions = DecisionLog(path=config.cost.decision_log)
        self.decisions.open()
        self._mode = config.cost.mode
        self._block_size = shape.block_size
        self._tiers = (DRAM, *(store.name for store in config.stores))
        self._clock = clock

    def tokens_by_tier(self, answer: Answer, num_blocks: int) -> dict[str, int]:
        """Attribute each of the first blocks of an answer to the slowest tier that it needs."""
        if not num_blocks:
            return {}
        sources = answer.match.slowest_sources[:num_blocks]
        counts = np.bincount(sources, minlength=len(self._tiers)).tolist()
        return {
            name: num * self._block_size
            for name, num in zip(self._tiers, counts, strict=True)
            if num
        }

    def admitted(self, state: RequestState, answer: Answer, epoch: int, load: Reload) -> None:
        """Count a lookup that the engine has acted on, and log the decision behind it."""
        plan, match = answer.plan, answer.match
        hits = self.tokens_by_tier(answer, match.num_blocks)
        self.counters.add(LOOKUP_TOKENS, (), state.num_asked)
        for name, tokens in hits.items():
            self.counters.add(HIT_TOKENS, (name,), tokens)
        self.ended(state.request_id)
        if plan is None:
            return
        self.counters.add(REQUESTS, (_decision(answer.num_blocks or 0),))
        num_local = match.start * self._block_size
        self.decisions.record(
            Decision(
                time=self._clock(),
                request_id=state.request_id,
                epoch=epoch,
                num_tokens=state.num_asked + num_local,
                num_local_tokens=num_local,
                block_size=self._block_size,
                num_hit_blocks={n: t // self._block_size for n, t in hits.items()},
                predicted_seconds={
                    "reload": plan.reload_seconds,
                    "recompute": plan.recompute_seconds,
                    "chosen": plan.chosen_seconds,
                    "load": plan.load_seconds,
                    "auto": plan.auto_seconds,
                },
                num_chosen_blocks=answer.num_blocks or 0,
                mode=self._mode,
                reason=plan.reason.value,
                in_step=bool(load.num_tokens) and not load.asynchronous,
            )
        )

    def loaded(self, load: LoadDone, state: RequestState | None, *, in_step: bool) -> None:
        """Note the result of a reload.

        Args:
            state: None once its request ended.
            in_step: whether it was a load within a step. Such is answered at the step's end, so
                that it is not known when it was done.
        """
        seconds = None if in_step else load.seconds
        outcome = DecisionOutcome(load.num_loaded, load.num_failed, seconds)
        decision = self.decisions.open_decision(load.request_id)
        self.decisions.note(load.request_id, outcome)
        if decision is not None and not load.num_failed and not in_step:
            self._compare("load", decision, decision.predicted_seconds["load"], load.seconds)
        if load.num_failed:  # the engine keeps what came before the first failed block
            tokens = {name: num * self._block_size for name, num in load.kept.items()}
        else:
            tokens = {} if state is None else state.sources
        for name, num in tokens.items():
            self.counters.add(TOKENS_RELOADED, (name,), num)

    def first_token(self, request_id: str) -> None:
        """Close the decision of a request whose first token has come."""
        decision = self.decisions.open_decision(request_id)
        if decision is None:
            return
        seconds = self._clock() - decision.time
        outcome = replace(decision.outcome or DecisionOutcome(0, 0), ttft_seconds=seconds)
        self.decisions.finish(request_id, outcome)
        if not outcome.num_failed_blocks:
            self._compare("ttft", decision, decision.predicted_seconds["chosen"], seconds)

    def ended(self, request_id: str) -> None:
        """Close a decision that is still open, with what is known."""
        decision = self.decisions.open_decision(request_id)
        if decision is not None:
            self.decisions.finish(request_id, decision.outcome or DecisionOutcome(0, 0))

    def reported(self, report: WorkerReport) -> None:
        """Count what ranks' links did, and what ranks gave up on."""
        for link in report.links:
            self.counters.add(BYTES_COPIED, (link.name,), link.nbytes)
            self.counters.add(COPY_SECONDS, (link.name,), link.seconds)
        for event, num in report.counters.items():
            self.counters.add(WORKER_EVENTS, (event,), num)

    def set_gauges(self, controller: Controller) -> None:
        """Set the gauges to the present state of tiers and pins."""
        for name, (blocks, capacity) in controller.usage().items():
            self.counters.set(TIER_BLOCKS, (name,), blocks)
            self.counters.set(TIER_CAPACITY_BLOCKS, (name,), capacity)
        self.counters.set(PINNED_BLOCKS, (), controller.dram.num_pins)

    def close(self) -> None:
        """Close the decision log."""
        self.decisions.close()

    def _compare(
        self, what: str, decision: Decision, predicted_seconds: float, seconds: float
    ) -> None:
        if seconds > 0:
            labels = (what, _decision(decision.num_chosen_blocks))
            self.counters.add(PREDICTIONS, labels)
            self.counters.add(PREDICTION_ERROR, labels, abs(predicted_seconds - seconds) / seconds)


def _decision(num_blocks: int) -> str:
    return "reload" if num_blocks else "recompute"
