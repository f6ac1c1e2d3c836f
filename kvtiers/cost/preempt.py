"""Whether a victim of preemption is copied down and back, or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtiers.cost.links import Links, offload_link
from kvtiers.cost.loads import Loads
from kvtiers.cost.prefill import PrefillModel


class PreemptMode(StrEnum):
    """Who decides."""

    COST = "cost"  # the prediction
    SWAP = "swap"  # the user: always copy
    RECOMPUTE = "recompute"  # the user: always compute, where that is possible


class PreemptReason(StrEnum):
    """Why a victim is swapped or computed again."""

    SEVERAL_SEQUENCES = "several_sequences"  # they share blocks and cannot be computed again
    MODE = "mode"  # the user says so
    SWAP_FASTER = "swap_faster"
    RECOMPUTE_FASTER = "recompute_faster"


@dataclass(frozen=True, slots=True)
class Victim:
    """A request that gives way.

    Attributes:
        num_tokens: prompt and generated so far.
        block_size: tokens of a block. block_nbytes: bytes of one on a rank, over all KV groups.
        num_stored_by_source: of its full leading blocks, those that lie below HBM already: index 0
            in DRAM, 1 + store index in stores; may be shorter than there are stores.
        num_sequences: of its group; more than one in beam search.
        away_seconds: until it is wanted back, as far as is known. By then what was copied down
            could be on its way back, but to where its blocks will be nobody knows: only what is
            longer than this wait costs anything.
    """

    num_tokens: int
    block_size: int
    block_nbytes: int
    num_stored_by_source: Sequence[int] = ()
    num_sequences: int = 1
    away_seconds: float = 0.0

    @property
    def num_full_blocks(self) -> int:
        """Blocks that can be copied; what is left of its tokens is computed in any case."""
        return self.num_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class PreemptPlan:
    """What to do with a victim, and what both ways were predicted to take.

    Attributes:
        swap: copy what is not yet below, and reload it later; otherwise compute it again.
        swap_seconds: down, back, and the tokens behind the last full block.
        recompute_seconds: of all tokens.
    """

    swap: bool
    swap_seconds: float
    recompute_seconds: float
    reason: PreemptReason


def plan_preempt(
    victim: Victim,
    links: Links,
    prefill: PrefillModel,
    mode: PreemptMode = PreemptMode.COST,
) -> PreemptPlan:
    """Choose what costs less time; ties are computed again, which leaves links free.

    Down counts the queue of the link as it is now; back does not, for that is later.

    Raises:
        ValueError: more blocks are stored than the victim has, or it has no token.
    """
    num_stored = sum(victim.num_stored_by_source)
    if num_stored > victim.num_full_blocks or min(victim.num_stored_by_source, default=0) < 0:
        raise ValueError(f"{num_stored} of {victim.num_full_blocks} full blocks are stored")
    if victim.num_tokens < 1:
        raise ValueError(f"a victim of {victim.num_tokens} tokens has nothing to lose")
    swap_seconds = _swap_seconds(victim, num_stored, links, prefill)
    recompute_seconds = float(prefill.seconds(victim.num_tokens))
    swap, reason = swap_seconds < recompute_seconds, PreemptReason.RECOMPUTE_FASTER
    if swap:
        reason = PreemptReason.SWAP_FASTER
    if mode is not PreemptMode.COST:
        swap, reason = mode is PreemptMode.SWAP, PreemptReason.MODE
    if victim.num_sequences > 1:
        swap, reason = True, PreemptReason.SEVERAL_SEQUENCES
    return PreemptPlan(swap, swap_seconds, recompute_seconds, reason)


def _swap_seconds(victim: Victim, num_stored: int, links: Links, prefill: PrefillModel) -> float:
    num_blocks = victim.num_full_blocks
    down, num_down = links[offload_link()], num_blocks - num_stored
    queued = links.queued_nbytes(offload_link())
    seconds = float(down.seconds(num_down, num_down * victim.block_nbytes, queued))
    by_source = list(victim.num_stored_by_source) or [0]
    by_source[0] += num_down
    idle = links.without_queues()
    back = Loads.of_counts(by_source, victim.block_nbytes, idle).seconds(idle)
    context = min(num_blocks * victim.block_size, victim.num_tokens - 1)
    return (
        seconds
        + max(0.0, float(back[0]) - victim.away_seconds)
        + float(prefill.seconds(victim.num_tokens - context, context))
    )
