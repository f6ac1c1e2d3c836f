"""Prompts, what an engine answered to them, and whether two answers are the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvtiers.bench.random_model import TINY

Prompt = tuple[int, ...]

#: Log-probabilities of one request in two batches, chunkings or hit patterns differ by less.
#: Measured on fp32: see test_engine_baseline.py.
LOGPROB_TOLERANCE = 2e-4


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got: its tokens, and how the engine says it came by its prefix."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    #: "length", "abort" (the tokens until then), "error", or None while it runs.
    finish_reason: str | None = None
    #: Prompt tokens that the first admission found in the engine's own prefix cache.
    num_local_cached_tokens: int = 0
    #: Prompt tokens that the first admission expected from a connector. Not corrected when the
    #: load fails: no proof of loading.
    num_external_cached_tokens: int = 0
    #: Counted in in-process engines only.
    num_preemptions: int = 0


Answers = dict[str, Answer]


def differences(
    expected: Mapping[str, Answer],
    actual: Mapping[str, Answer],
    tolerance: float = LOGPROB_TOLERANCE,
) -> list[str]:
    """Return one line for each request whose tokens or log-probabilities differ."""
    lines = [f"{name} is missing" for name in expected.keys() - actual.keys()]
    lines += [f"{name} was not expected" for name in actual.keys() - expected.keys()]
    for name in expected.keys() & actual.keys():
        want, have = expected[name], actual[name]
        if want.token_ids != have.token_ids:
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(want.token_ids, have.token_ids, strict=False))
                    if a != b
                ),
                min(len(want.token_ids), len(have.token_ids)),
            )
            lines.append(
                f"{name}: tokens differ from position {at}: "
                f"expected {want.token_ids[at : at + 4]}, got {have.token_ids[at : at + 4]} "
                f"({len(want.token_ids)} and {len(have.token_ids)} tokens)"
            )
        elif (noise := logprob_noise(want, have)) > tolerance:
            lines.append(f"{name}: log-probabilities differ by {noise:.1e}")
    return sorted(lines)


def logprob_noise(one: Answer, other: Answer) -> float:
    """Return the largest difference of log-probabilities at equal positions."""
    return max(
        (abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=False)), default=0.0
    )


def random_prompt(num_tokens: int, seed: int, vocab_size: int = TINY.vocab_size) -> Prompt:
    """Return a prompt of random tokens; a longer one of the same seed extends a shorter one."""
    source = random.Random(seed)
    return tuple(source.randrange(vocab_size) for _ in range(num_tokens))
