"""What the reference engine tells of its steps and of the requests that it has served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request is over."""

    LENGTH = "length"  # it has `max_tokens`
    STOP = "stop"  # it generated a stop token
    ABORTED = "aborted"  # the user gave it up


@dataclass(frozen=True, slots=True)
class Served:
    """One request, from its arrival to its end; times are those of the engine's clock.

    Attributes:
        admitted_at, first_token_at: None if that never happened.
        token_ids: generated, one list a sequence; empty where tokens have no ids.
        num_local_tokens: of the prompt, found in HBM at the first admission.
        num_reloaded_tokens: those that kvtiers brought, over all admissions.
        reloaded_by_tier: those of the prompt that it brought at the first admission, by tier.
        num_computed_tokens: computed over its life, what was computed again included.
        num_recomputed_tokens: of those, what it had computed before a preemption.
        num_recomputes, num_swaps: preemptions of either kind.
    """

    request_id: str
    tenant: str
    reason: FinishReason
    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    finished_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    token_ids: Sequence[Sequence[int]]
    num_local_tokens: int
    num_reloaded_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_recomputes: int
    num_swaps: int
    reloaded_by_tier: Mapping[str, int] = field(default_factory=dict)

    @property
    def ttft_seconds(self) -> float | None:
        """From the arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of an output token after the first; None with fewer than two tokens."""
        if self.first_token_at is None or self.num_output_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_output_tokens - 1)

    @property
    def e2e_seconds(self) -> float:
        """From the arrival to the end."""
        return self.finished_at - self.arrived_at


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of the engine after a step.

    Attributes:
        kv_use: share of the KV blocks that requests hold.
        num_running: requests in the batch, those that wait for a load included.
        num_loading: of those, the ones whose load is under way.
        num_preemptions, num_swaps: since the start; swaps are among the preemptions.
    """

    kv_use: float
    num_waiting: int
    num_running: int
    num_loading: int
    num_swapped: int
    num_preemptions: int
    num_swaps: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened in one step.

    Attributes:
        started_at, seconds: on the engine's clock; a step without tokens waits for loads.
        num_tokens: request id to tokens computed. num_output_tokens: that requests got.
        itl_seconds: per sequence that got a token which was not its first, the time since its
            last one, divided among the tokens it got.
        admitted, resumed: request ids that left the waiting or the swapped queue.
        preempted: ids that lost their blocks, swapped ones included. swapped: of those.
        first_tokens: ids whose first token this step brought. finished: who is over.
        advice: what to do where the engine thrashes, most useful first; empty where it does not.
    """

    number: int
    started_at: float
    seconds: float
    num_tokens: Mapping[str, int]
    num_output_tokens: int
    itl_seconds: Sequence[float]
    admitted: Sequence[str]
    resumed: Sequence[str]
    preempted: Sequence[str]
    swapped: Sequence[str]
    first_tokens: Sequence[str]
    finished: Sequence[Served]
    gauges: Gauges
    advice: Sequence[str] = field(default=())
