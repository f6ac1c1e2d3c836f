"""Loads that come layer range by layer range, inside the step that computes the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.engines.reference.one_request import OneRequestEngine
from kvtiers.model.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Split:
    """A prompt, and how many of its leading blocks are loaded; the rest is computed."""

    num_tokens: int
    num_blocks: int


def measure_split(
    engine: OneRequestEngine, prompt: Sequence[int], split: Split
) -> tuple[float, int]:
    """Load the first blocks of a prompt from a store, and compute the rest at the same time.

    Where the load takes much longer than the computation, kvtiers runs it before the step.

    Args:
        engine: idle, with ranges of layers and one store, which holds the prompt.

    Returns:
        seconds to the first token, and that token.

    Raises:
        ProtocolError: a block did not come, or the engine has no tiers.
    """
    if engine.scheduler is None:
        raise ProtocolError("a split needs an engine with tiers")
    result = engine.generate(prompt, max_reloaded_blocks=split.num_blocks)
    engine.settle()
    missing = split.num_blocks - result.num_reloaded_tokens // engine.settings.block_size
    if missing:
        raise ProtocolError(f"{missing} blocks of a split were not loaded")
    return result.ttft_seconds, result.token_ids[0]
