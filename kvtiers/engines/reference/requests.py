"""A request of the reference engine: what is asked for, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtiers.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What a user asks for.

    Attributes:
        request_id: unique for ever; without "#", which tells the sequences of a group apart.
        arrived_at: on the engine's clock.
        max_tokens: to generate, for each sequence; at least 1.
        prompt_token_ids: None where tokens have no ids, as in a replayed trace; then
            `num_prompt_tokens` says how many there are, and `block_hashes` what they are.
        block_hashes: of the sequence's full blocks of `EngineSettings.hash_tokens`, 16 or 32 bytes
            each, from the first on, each naming all before it too. More than the prompt's name
            the output, as far as they reach: a later turn of a conversation can hit it. Blocks
            beyond get names that nothing ever hits.
        priority: the smaller, the sooner, under `Policy.PRIORITY`.
        tenant: on whose account it counts; see `EngineSettings.tenant_share`.
        num_sequences: of its group, as in beam search: each begins with another of the likeliest
            first tokens. More than one can only be swapped.
        stop_token_ids: end a sequence when it generates one.
    """

    request_id: str
    arrived_at: float
    max_tokens: int
    prompt_token_ids: Sequence[int] | None = None
    num_prompt_tokens: int = 0
    block_hashes: Sequence[bytes] = ()
    priority: int = 0
    tenant: str = ""
    num_sequences: int = 1
    stop_token_ids: frozenset[int] = field(default=frozenset())

    def __post_init__(self) -> None:
        if self.prompt_token_ids is not None:
            object.__setattr__(self, "num_prompt_tokens", len(self.prompt_token_ids))
        if self.num_prompt_tokens < 1 or self.max_tokens < 1 or self.num_sequences < 1:
            raise ConfigError(
                f"request {self.request_id!r}: {self.num_prompt_tokens} prompt tokens, "
                f"{self.max_tokens} to generate, {self.num_sequences} sequences; each must be at "
                "least 1"
            )
        if "#" in self.request_id:
            raise ConfigError(f"request id {self.request_id!r} contains '#'")


class State(StrEnum):
    """Where a request stands; it is in exactly one."""

    WAITING = "waiting"  # not admitted, or preempted and queued again; holds no blocks
    RUNNING = "running"  # in the batch: loading, prefilling or decoding; holds blocks
    SWAPPED = "swapped"  # paused; its blocks went to a lower tier
    FINISHED = "finished"  # over; blocks freed, or kept as prefix cache
