"""A request of the reference engine: what is asked for, and how far it has come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtiers.model.errors import ConfigError
from kvtiers.model.keys import prefix_hash_chain


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
            each, from the first on; each covers all before it too. Those behind the prompt's are
            of the output, so that a later turn of a conversation can hit it. Blocks that have
            none here get hashes that nothing ever hits.
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
            raise ConfigError(
                f"request id {self.request_id!r} contains '#', which tells the sequences of a "
                "group apart; leave it out"
            )


class State(StrEnum):
    """Where a request stands; it is in exactly one."""

    WAITING = "waiting"  # not admitted, or preempted and queued again; holds no blocks
    RUNNING = "running"  # in the batch: loading, prefilling or decoding; holds blocks
    SWAPPED = "swapped"  # paused; its blocks went to a lower tier
    FINISHED = "finished"  # over; blocks freed, or kept as prefix cache


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sequence of a request, prompt and output.

    Attributes:
        hash_tokens: tokens of a hashed block. hashes: of the full blocks of its known tokens.
        token_ids: None where tokens have no ids. num_known: tokens, prompt and output.
        num_most: known tokens at which it ends.
        names: hashes of full blocks where tokens have no ids; see `NewRequest.block_hashes`.
        num_computed: leading tokens whose KV is in `block_ids`, or is being loaded there.
        num_hashed: leading hashes that were offered to the prefix cache.
        num_named: leading runs of `block_ids` that kvtiers knows by name. num_told: leading
            hashed blocks that it knows to be computed.
        num_ever_computed: the most that `num_computed` has been; fewer are computed again.
        last_token_at: when it got its last token. over: whether it will get no more.
    """

    sequence_id: str
    hash_tokens: int
    hashes: list[bytes]
    token_ids: list[int] | None
    num_known: int
    num_most: int
    names: Sequence[bytes] = ()
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_hashed: int = 0
    num_named: int = 0
    num_told: int = 0
    num_ever_computed: int = 0
    last_token_at: float = 0.0
    over: bool = False

    @classmethod
    def of(cls, new: NewRequest, hash_tokens: int) -> TokenSequence:
        """Return the first sequence of a request: its prompt."""
        ids = None if new.prompt_token_ids is None else list(new.prompt_token_ids)
        num = new.num_prompt_tokens
        sequence = cls(
            new.request_id, hash_tokens, [], ids, num, num + new.max_tokens, new.block_hashes
        )
        sequence.extend_hashes()
        return sequence

    def fork(self, idx: int, num_prompt_tokens: int) -> TokenSequence:
        """Return another sequence with the same prompt."""
        ids = None if self.token_ids is None else self.token_ids[:num_prompt_tokens]
        hashes = self.hashes[: num_prompt_tokens // self.hash_tokens]
        return TokenSequence(
            f"{self.sequence_id}#{idx}",
            self.hash_tokens,
            hashes,
            ids,
            num_prompt_tokens,
            self.num_most,
            num_computed=num_prompt_tokens,
            num_hashed=self.num_hashed,
        )

    @property
    def num_missing(self) -> int:
        """Known tokens that are not computed; 1 for a decode."""
        return self.num_known - self.num_computed

    def append(self, tokens: Sequence[int]) -> None:
        """Take in generated tokens."""
        self.num_known += len(tokens)
        if self.token_ids is not None:
            self.token_ids += tokens
        self.extend_hashes()

    def lose_blocks(self) -> None:
        """Forget its blocks, and that anything is computed."""
        self.block_ids = []
        self.num_named = 0
        self.rewind(0)

    def rewind(self, num_computed: int) -> None:
        """Count at most `num_computed` tokens as computed; a whole number of hashed blocks."""
        num_blocks = num_computed // self.hash_tokens
        self.num_computed = min(self.num_computed, num_computed)
        self.num_hashed = min(self.num_hashed, num_blocks)
        self.num_told = min(self.num_told, num_blocks)

    def extend_hashes(self) -> None:
        """Hash the full blocks of known tokens that are not hashed yet."""
        first, end = len(self.hashes), self.num_known // self.hash_tokens
        if end <= first:
            return
        if self.token_ids is not None:
            parent = self.hashes[-1] if self.hashes else None
            ids = self.token_ids[first * self.hash_tokens : end * self.hash_tokens]
            self.hashes += prefix_hash_chain(ids, self.hash_tokens, parent=parent)
            return
        named = self.names[first:end]
        self.hashes += named
        for idx in range(first + len(named), end):
            name = f"{self.sequence_id} block {idx}".encode()
            self.hashes.append(hashlib.blake2b(name, digest_size=32).digest())


@dataclass(slots=True, eq=False)
class Request:
    """A request while it is served; for its times and counts see `Served`.

    Attributes:
        order: of its admission; the last one admitted is preempted first.
        sequences: one until the prompt is computed, then all of the group.
        spare_block_ids: reserved for the fork of a group; see `Admission.num_spare`.
        loading: ids of its sequences whose load runs between steps.
    """

    new: NewRequest
    sequences: list[TokenSequence]
    state: State = State.WAITING
    order: int = -1
    spare_block_ids: list[int] = field(default_factory=list)
    loading: set[str] = field(default_factory=set)
    admitted_at: float | None = None
    first_token_at: float | None = None
    num_local_tokens: int = 0
    num_reloaded_tokens: int = 0
    reloaded_by_tier: dict[str, int] = field(default_factory=dict)
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_recomputes: int = 0
    num_swaps: int = 0

    @property
    def request_id(self) -> str:
        """As the user calls it."""
        return self.new.request_id

    @property
    def live(self) -> list[TokenSequence]:
        """Sequences that will get more tokens."""
        if len(self.sequences) == 1:
            return self.sequences
        return [sequence for sequence in self.sequences if not sequence.over]

    @property
    def num_places(self) -> int:
        """Places that it takes in a batch."""
        forked = len(self.sequences) > 1
        return len(self.live) if forked else self.new.num_sequences

    @property
    def num_output_tokens(self) -> int:
        """Generated so far, over all sequences."""
        known = sum(sequence.num_known for sequence in self.sequences)
        return known - len(self.sequences) * self.new.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks in its tables; shared ones count for each sequence."""
        return sum(len(s.block_ids) for s in self.sequences) + len(self.spare_block_ids)
