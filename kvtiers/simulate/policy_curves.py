"""Hit curves of replacement rules, played on a trace without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtiers.control.policy import make_policy
from kvtiers.control.tier import Residence, Tier
from kvtiers.model.keys import BlockKey, block_key
from kvtiers.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class PolicyCurve:
    """What one tier hits under a replacement rule.

    Attributes:
        tokens: of the tier, ascending. rates: shares of the prompt tokens.
    """

    policy: str
    tokens: tuple[float, ...]
    rates: tuple[float, ...]


def policy_curve(
    trace: Trace, policy: str, tokens: Sequence[float], told: Callable[[int, int], None]
) -> PolicyCurve:
    """Return the hit rates of one tier under a rule, at every capacity.

    Args:
        tokens: capacities, ascending. told: called with how many were played, and of how many.
    """
    prompts = prompt_keys(trace)
    rates: list[float] = []
    for capacity in tokens:
        told(len(rates), len(tokens))
        num_blocks = max(1, int(capacity // trace.block_size))
        rates.append(hit_rate(trace, tier_hits(prompts, policy, num_blocks)))
    told(len(rates), len(tokens))
    return PolicyCurve(policy, tuple(tokens), tuple(rates))


def tier_hits(prompts: Sequence[Sequence[BlockKey]], policy: str, num_blocks: int) -> Iterator[int]:
    """Yield how many leading blocks of each prompt a tier has; then the tier takes the others."""
    tier = Tier("dram", num_blocks, make_policy(policy, num_blocks))
    for blocks in prompts:
        entries = []
        for key in blocks:
            entry = tier.get(key)
            if entry is None:
                break
            entries.append(entry)
        yield len(entries)
        tier.touch(reversed(entries))
        parent = blocks[len(entries) - 1] if entries else None
        for position in range(len(entries), len(blocks)):
            new = tier.get(blocks[position]) or tier.reserve(blocks[position], parent)
            if new is None:
                break
            if new.residence is Residence.RESERVED:
                new.position = position
                tier.commit(new)
            parent = blocks[position]
        tier.take_left()


def prompt_keys(trace: Trace) -> list[list[BlockKey]]:
    """Return the blocks of each prompt as keys that are spread evenly, as block hashes are."""
    keys: dict[int, BlockKey] = {}
    for request in trace.requests:
        for block_id in request.block_ids.tolist():
            if block_id not in keys:
                spread = (block_id * 0x9E3779B97F4A7C15 % 2**128).to_bytes(16, "little")
                keys[block_id] = block_key(spread, 0)
    return [[keys[block_id] for block_id in it.block_ids.tolist()] for it in trace.requests]


def hit_rate(trace: Trace, hits: Iterator[int]) -> float:
    """Return the share of all prompt tokens that are hit.

    Args:
        hits: leading blocks that are hit, one number per request.
    """
    found = sum(
        min(num_blocks * trace.block_size, request.num_prompt_tokens)
        for num_blocks, request in zip(hits, trace.requests, strict=True)
    )
    return found / max(1, trace.num_prompt_tokens)
