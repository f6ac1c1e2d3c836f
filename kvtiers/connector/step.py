"""What an engine and the scheduler's side say to each other, around one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Reload:
    """How much of a request can be reloaded.

    Attributes:
        num_tokens: beyond the engine's own; None means "ask again".
        asynchronous: load between steps; else within the step that computes the rest.
        by_tier: tier to tokens, each block counted for the slowest tier that it needs.
    """

    num_tokens: int | None
    asynchronous: bool
    by_tier: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine is about to run.

    Attributes:
        num_computed_tokens: request id to tokens computed once this step is done; for every
            request in it that begins, or completes a block.
        overwritten: engine blocks that the step fills.
        preempted: requests that lost their blocks since the last step.
        block_ids: gives a scheduled request's engine blocks, per KV group; it may be slow, and
            is only called for requests that completed a block.
        num_scheduled_tokens: tokens in the step.
        running: requests in the step; those in `num_computed_tokens` may be left out.
        num_copied_blocks: of requests in `preempted`, the leading blocks that are worth a copy, if
            not all of them are.
    """

    num_computed_tokens: dict[str, int]
    overwritten: Iterable[int]
    preempted: Iterable[str]
    block_ids: Callable[[str], BlockIds]
    num_scheduled_tokens: int
    running: Iterable[str] = ()
    num_copied_blocks: Mapping[str, int] = field(default_factory=dict)
