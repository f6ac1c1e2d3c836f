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
        num_running: other requests that compute in every step: what the device does for this one
            delays them all.
    """

    num_tokens: int
    block_size: int
    block_nbytes: int
    num_stored_by_source: Sequence[int] = ()
    num_sequences: int = 1
    num_running: int = 0

    @property
    def num_full_blocks(self) -> int:
        """Blocks that can be copied; what is left of its tokens is computed in any case."""
        return self.num_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class PreemptPlan:
    """What to do with a victim, and what both ways were predicted to cost.

    Costs are seconds by which requests together end later: the victim and those that run.

    Attributes:
        swap: copy what is not yet below, and reload it later; otherwise compute it again.
        swap_cost_seconds: the way down delays all, the way back the victim.
        recompute_cost_seconds: its steps delay all.
    """

    swap: bool
    swap_cost_seconds: float
    recompute_cost_seconds: float
    reason: PreemptReason


def plan_preempt(
    victim: Victim,
    links: Links,
    prefill: PrefillModel,
    mode: PreemptMode = PreemptMode.COST,
    notice_seconds: float = 0.0,
) -> PreemptPlan:
    """Choose what delays requests less; ties are computed again, which leaves links free.

    A victim gives way because its blocks are wanted at once, and whoever writes into them waits
    until they are copied: the step, with all that it serves. Of that wait only the job's latency
    and what is queued ahead of it are the swap's. The bytes are copied in any case, at the latest
    when the request ends, and the same requests wait for them then.

    Down counts the queue of the link as it is now; back does not, for that is later.

    Args:
        notice_seconds: that a load which is done waits until it is noticed.

    Raises:
        ValueError: more blocks are stored than the victim has, or it has no token.
    """
    num_stored = sum(victim.num_stored_by_source)
    if num_stored > victim.num_full_blocks or min(victim.num_stored_by_source, default=0) < 0:
        raise ValueError(f"{num_stored} of {victim.num_full_blocks} full blocks are stored")
    if victim.num_tokens < 1:
        raise ValueError(f"a victim of {victim.num_tokens} tokens has nothing to lose")
    down = _down_seconds(victim, num_stored, links)
    back = _back_seconds(victim, num_stored, links, prefill) + notice_seconds
    swap_cost = (1 + victim.num_running) * down + back
    again = float(prefill.seconds(victim.num_tokens))
    recompute_cost = again + victim.num_running * _held_up_seconds(victim, prefill)
    swap, reason = swap_cost < recompute_cost, PreemptReason.RECOMPUTE_FASTER
    if swap:
        reason = PreemptReason.SWAP_FASTER
    if mode is not PreemptMode.COST:
        swap, reason = mode is PreemptMode.SWAP, PreemptReason.MODE
    if victim.num_sequences > 1:
        swap, reason = True, PreemptReason.SEVERAL_SEQUENCES
    return PreemptPlan(swap, swap_cost, recompute_cost, reason)


def _down_seconds(victim: Victim, num_stored: int, links: Links) -> float:
    """Return what of the wait for the way down is the swap's: the job, and not its bytes."""
    num_jobs = min(1, victim.num_full_blocks - num_stored)
    down, queued = links[offload_link()], links.queued_nbytes(offload_link())
    return float(down.seconds(num_jobs, 0, queued))


def _back_seconds(victim: Victim, num_stored: int, links: Links, prefill: PrefillModel) -> float:
    by_source = list(victim.num_stored_by_source) or [0]
    by_source[0] += victim.num_full_blocks - num_stored
    idle = links.without_queues()
    back = Loads.of_counts(by_source, victim.block_nbytes, idle).seconds(idle)
    context = min(victim.num_full_blocks * victim.block_size, victim.num_tokens - 1)
    return float(back[0]) + float(prefill.seconds(victim.num_tokens - context, context))


def _held_up_seconds(victim: Victim, prefill: PrefillModel) -> float:
    """Return by how much others' tokens are later: their steps run anyway, and multiply as long as
    they read the weights in any case."""
    num_steps = -(-victim.num_tokens // prefill.max_tokens_per_step)
    usual = num_steps * float(prefill.seconds(1))
    return max(0.0, float(prefill.seconds(victim.num_tokens)) - usual)
