"""A request of a fake engine, and the tokens and KV that a faultless engine gives it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtiers.model.keys import prefix_hash_chain

NUM_LAYERS = 2
NUM_TOKEN_IDS = 50
BEYOND = 64  # tokens past the end that an engine may compute before it notices

UInt64s = npt.NDArray[np.uint64]


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"  # blocks held, an asynchronous load under way
    RUNNING = "running"
    FINISHED = "finished"


class Oracle:
    """What a faultless engine makes of a prompt: each token follows from all before it.

    Attributes:
        tokens: prompt and continuation. kv: uint64 [layers, positions], what a position's KV is.
    """

    def __init__(self, prompt: Sequence[int], num_more: int) -> None:
        self.tokens = list(prompt)
        rows = []
        digest = b""
        for position in range(len(prompt) + num_more):
            if position == len(self.tokens):
                self.tokens.append(digest[8] % NUM_TOKEN_IDS)
            seed = digest + self.tokens[position].to_bytes(4, "big")
            digest = hashlib.blake2b(seed, digest_size=16).digest()
            rows.append(
                [hashlib.blake2b(digest + bytes([i]), digest_size=8).digest() for i in range(2)]
            )
        self.kv = np.frombuffer(b"".join(b for row in rows for b in row), np.uint64)
        self.kv = self.kv.reshape(-1, NUM_LAYERS).T.copy()


@dataclass(eq=False, repr=False)
class FakeRequest:
    """A request with vLLM's attribute names.

    Attributes:
        block_size: tokens per block, for the hashes. max_tokens: outputs before it ends.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    block_size: int
    skip_reading_prefix_cache: bool = False
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    num_drafts: int = 0
    num_in_flight_tokens: int = 0
    num_stale_tokens: int = 0
    drop_stale: bool = False
    num_preemptions: int = 0
    tokens: list[int] = field(init=False)
    oracle: Oracle = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_token_ids)
        self.oracle = Oracle(self.prompt_token_ids, self.max_tokens + BEYOND)
        self._update_hashes()

    def __repr__(self) -> str:
        return (
            f"{self.request_id}: {self.status.value}, {self.num_computed_tokens} of "
            f"{self.num_tokens} tokens, {len(self.block_ids)} blocks"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are known to the scheduler."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Of those, the ones that were generated."""
        return len(self.tokens) - len(self.prompt_token_ids)

    @property
    def num_tokens_wanted(self) -> int:
        """Tokens that the next step could compute, drafts included."""
        known = self.num_tokens + self.num_drafts + self.num_placeholders
        return known - self.num_computed_tokens

    @property
    def sure_to_end(self) -> bool:
        """Whether what is in flight ends it, so that another step would be for nothing."""
        least = self.num_computed_tokens + 2 - self.num_placeholders
        return self.num_placeholders > 0 and least >= len(self.prompt_token_ids) + self.max_tokens

    def append(self, tokens: Sequence[int]) -> None:
        """Take in outputs, at most as many as are wanted; they must be the right ones."""
        tokens = list(tokens)[: self.max_tokens - self.num_output_tokens]
        expected = self.oracle.tokens[self.num_tokens : self.num_tokens + len(tokens)]
        assert tokens == expected, f"{self.request_id}: {tokens} at {self.num_tokens}"
        self.tokens += tokens
        self._update_hashes()

    def _update_hashes(self) -> None:
        done = len(self.block_hashes)
        parent = self.block_hashes[-1] if done else None
        rest = self.tokens[done * self.block_size :]
        self.block_hashes += prefix_hash_chain(rest, self.block_size, parent=parent)
