"""Runs the reference engine's steps on a virtual clock, which a model of their times moves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.cost.steps import StepModel
from kvtiers.engines.reference.modelled_media import NO_HAND_OVER, HandOver, ModelledLasting
from kvtiers.engines.reference.modelled_rank import ModelledRank
from kvtiers.engines.reference.runners import SequenceWork, StepResult, StepWork
from kvtiers.model.messages import StepOrders, TransferKind

_TICK_SECONDS: Final = 0.0005  # between two looks of an idle engine, as the torch runner's
_NO_TOKEN: Final = (0,)


class ModelledRunner:
    """Nothing is computed or copied; time passes as if it were.

    Args:
        rank: takes kvtiers' orders; None without kvtiers. lasting: its shared stores.
        acceptance: chance that a speculative token is accepted. seed: of the random numbers.
        hand_over: what reloads take beside their links.
    """

    def __init__(
        self,
        steps: StepModel,
        rank: ModelledRank | None = None,
        lasting: ModelledLasting | None = None,
        acceptance: float = 0.7,
        seed: int = 0,
        hand_over: HandOver = NO_HAND_OVER,
    ) -> None:
        self._steps = steps
        self._hand_over = hand_over
        self._rank = rank
        self._lasting = lasting
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self._now = 0.0
        self._connector: SchedulerConnector | None = None

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    @property
    def connector(self) -> SchedulerConnector | None:
        """The scheduler's side of kvtiers, connected; None without kvtiers."""
        return self._connector

    @property
    def shared_usage(self) -> dict[str, tuple[int, int]]:
        """Frames that shared stores hold, and how many they may, by store."""
        return {} if self._lasting is None else self._lasting.usage

    def connect(self, connector: SchedulerConnector) -> None:
        """Take the scheduler's side of kvtiers, whose clock is this one."""
        self._connector = connector

    def run(self, work: StepWork, orders: StepOrders | None) -> StepResult:
        """Let a step's time pass, and answer what ended meanwhile."""
        rank = self._rank
        if orders is not None:
            num_loads = sum(it.kind is TransferKind.RELOAD for it in orders.before)
            self._now += self._hand_over.before_step(num_loads, computes=bool(work.sequences))
        began = self._now
        if rank is not None and orders is not None:
            self._now = rank.begin_step(orders, began)
        ready = self._now
        num_new = [it.num_tokens for it in work.sequences]
        seconds = self._steps.seconds(num_new, [it.start for it in work.sequences])
        self._now += seconds
        if rank is not None and orders is not None:
            rank.end_step(orders, self._now)
        if not work.sequences:
            self._idle(work.idle_until)
        tokens = self._sample_all(work.sequences, sum(num_new))
        if rank is None or orders is None:
            return StepResult(tokens, seconds)
        loaded, report = rank.take(self._now, frozenset(orders.sync_loads))
        return StepResult(tokens, seconds, ready == began, loaded, report)

    def wait_until(self, seconds: float) -> None:
        """Move the clock on."""
        self._now = max(self._now, seconds)

    def close(self) -> None:
        """Close the scheduler's side of kvtiers; idempotent."""
        if self._connector is not None:
            self._connector.close()
        self._connector = None

    def _idle(self, until: float | None) -> None:
        """Wait for the next event; where there is none, or an answer lies ready, for a tick."""
        event = None if self._rank is None else self._rank.next_event
        if event is None or (self._lasting is not None and self._lasting.pending):
            event = self._now + _TICK_SECONDS
        self._now = max(self._now, event if until is None else min(event, until))

    def _sample_all(
        self, sequences: Sequence[SequenceWork], num_tokens: int
    ) -> dict[str, tuple[int, ...]]:
        if num_tokens == len(sequences):  # decodes, most of which guess nothing: one token each
            return {
                it.sequence_id: _NO_TOKEN * it.num_samples for it in sequences if it.num_samples
            }
        return {it.sequence_id: self._sample(it) for it in sequences if it.num_samples}

    def _sample(self, work: SequenceWork) -> tuple[int, ...]:
        if work.num_samples > 1:
            return _NO_TOKEN * work.num_samples
        num_guesses = work.start + work.num_tokens - work.num_known
        if num_guesses <= 0:
            return _NO_TOKEN
        num = 0
        while num < num_guesses and self._random.random() < self._acceptance:
            num += 1
        return _NO_TOKEN * (num + 1)
