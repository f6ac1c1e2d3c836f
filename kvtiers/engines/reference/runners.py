"""The interface between the reference engine and what runs its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.worker import Loaded
from kvtiers.model.messages import StepOrders, WorkerReport


class SequenceWork(NamedTuple):
    """Tokens of one sequence to compute in a step; a tuple, for there are millions.

    Attributes:
        sequence_id: the request's, or "REQUEST#i" of a group's sequence.
        token_ids: the sequence's known ones, all of them; None where tokens have no ids.
        start, num_tokens: compute the tokens ``start .. start + num_tokens - 1``; those beyond
            the known ones are for the runner to guess, and to accept or not.
        num_known: tokens of the sequence that are known.
        block_ids: of the sequence, from token 0, as far as its last new token.
        num_samples: tokens to return from the last known position: 0 for a chunk that ends before
            it, 1, or as many of the likeliest as the group has sequences.
    """

    sequence_id: str
    token_ids: Sequence[int] | None
    start: int
    num_tokens: int
    num_known: int
    block_ids: Sequence[int]
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """All that a step computes.

    Attributes:
        copies: (from, to) blocks whose KV is copied first: the last blocks of forked sequences.
        idle_until: of a step without tokens: until when to wait for a load; None: for any time.
    """

    sequences: Sequence[SequenceWork]
    copies: Sequence[tuple[int, int]] = ()
    idle_until: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has brought.

    Attributes:
        tokens: sequence id to the tokens it got: the speculative ones that were accepted, then
            the sampled one; of a prompt of a group, the likeliest ones, best first. Ids are 0
            where tokens have none.
        compute_seconds: of the model alone, without waiting for loads; 0 without tokens.
        pure: whether the step waited for nothing else, so that its time is the engine's own.
        loaded: reloads that are settled. report: for the scheduler's side of kvtiers.
    """

    tokens: Mapping[str, Sequence[int]]
    compute_seconds: float
    pure: bool = True
    loaded: Loaded = field(default_factory=Loaded)
    report: WorkerReport | None = None


class Runner(Protocol):
    """Runs steps: on a model in torch, or on a virtual clock."""

    @property
    def now(self) -> float:
        """Seconds on its clock, which nobody else moves."""
        ...

    @property
    def connector(self) -> SchedulerConnector | None:
        """The scheduler's side of kvtiers, connected; None without kvtiers."""
        ...

    def run(self, work: StepWork, orders: StepOrders | None) -> StepResult:
        """Do one step; orders are None without kvtiers."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Let time pass on the clock."""
        ...

    def close(self) -> None:
        """Release what it holds; idempotent."""
        ...
