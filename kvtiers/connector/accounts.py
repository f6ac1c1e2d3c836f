"""What the scheduler's side counts and logs of its decisions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtiers.connector.requests import RequestState
from kvtiers.connector.shape import EngineShape
from kvtiers.control.answers import Answer, LoadDone
from kvtiers.control.reload import ABSENT
from kvtiers.model.config import Config
from kvtiers.model.messages import DRAM, WorkerReport
from kvtiers.observe.decisions import Decision, DecisionLog, DecisionOutcome
from kvtiers.observe.metrics import (
    BYTES_COPIED,
    COPY_SECONDS,
    HIT_TOKENS,
    LOOKUP_TOKENS,
    REQUESTS,
    TOKENS_RELOADED,
    WORKER_EVENTS,
    Counters,
)


class Accounts:
    """Counters and the decision log of one engine; it decides nothing."""

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
        known = answer.match.sources[:, :num_blocks]
        slowest = (known * (known != ABSENT)).max(axis=0)
        counts = np.bincount(slowest, minlength=len(self._tiers)).tolist()
        return {
            name: num * self._block_size
            for name, num in zip(self._tiers, counts, strict=True)
            if num
        }

    def admitted(self, state: RequestState, answer: Answer, epoch: int) -> None:
        """Count a lookup that the engine has acted on, and log the decision behind it."""
        plan, match = answer.plan, answer.match
        hits = self.tokens_by_tier(answer, match.num_blocks)
        self.counters.add(LOOKUP_TOKENS, (), state.num_asked)
        for name, tokens in hits.items():
            self.counters.add(HIT_TOKENS, (name,), tokens)
        if plan is None:
            return
        self.counters.add(REQUESTS, ("reload" if answer.num_blocks else "recompute",))
        num_local = match.start * self._block_size
        self.decisions.record(
            Decision(
                time=self._clock(),
                request_id=state.request_id,
                epoch=epoch,
                num_tokens=state.num_asked + num_local,
                num_local_tokens=num_local,
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
            )
        )
        if not answer.num_blocks:
            self.decisions.finish(state.request_id, DecisionOutcome(0, 0))

    def loaded(self, load: LoadDone, state: RequestState | None) -> None:
        """Close the decision of a reload that is over; `state`: None once its request ended."""
        outcome = DecisionOutcome(load.num_loaded, load.num_failed, load.seconds)
        self.decisions.finish(load.request_id, outcome)
        if load.num_failed:  # the engine keeps what came before the first failed block
            tokens = {name: num * self._block_size for name, num in load.kept.items()}
        else:
            tokens = {} if state is None else state.sources
        for name, num in tokens.items():
            self.counters.add(TOKENS_RELOADED, (name,), num)

    def reported(self, report: WorkerReport) -> None:
        """Count what ranks' links did, and what ranks gave up on."""
        for link in report.links:
            self.counters.add(BYTES_COPIED, (link.name,), link.nbytes)
            self.counters.add(COPY_SECONDS, (link.name,), link.seconds)
        for event, num in report.counters.items():
            self.counters.add(WORKER_EVENTS, (event,), num)

    def close(self) -> None:
        """Close the decision log."""
        self.decisions.close()
