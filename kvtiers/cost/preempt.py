"""Whether a victim of preemption is copied down and back, or computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

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
class Surroundings:
    """What a victim leaves behind, as far as its engine knows.

    Attributes:
        num_running, num_waiting: other requests, in the batch and in the queue. What the device
            does for the victim, and what it waits for, delays them all.
        num_step_tokens: that a step computes in any case: of those that run.
        kept_tokens: of the victim's leading tokens, those whose KV will still be in HBM when there
            is room for it again: several guesses, each as likely.
        joined_tokens: that its first step then computes beside those of `num_step_tokens`, since
            others are admitted with it: one for each guess, or for none.
        admitted_share: of the blocks that the engine hands out, those of admissions, of late; the
            others are of requests that grow.
        returning: whether the victim is about to return, after it was swapped.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_step_tokens: int = 0
    kept_tokens: tuple[int, ...] = (0,)
    joined_tokens: tuple[int, ...] = ()
    admitted_share: float = 0.0
    returning: bool = False

    @property
    def num_others(self) -> int:
        """All of them."""
        return self.num_running + self.num_waiting

    @property
    def crowding(self) -> float:
        """Chance that somebody waits for the victim's blocks when it is over.

        It is the youngest of those that run: all others end before it, and each end lets one in.
        """
        return min(1.0, self.num_waiting / max(1, self.num_running))


@dataclass(frozen=True, slots=True)
class Victim:
    """A request that gives way.

    Attributes:
        num_tokens: prompt and generated so far.
        block_size: tokens of a block. block_nbytes: bytes of one on a rank, over all KV groups.
        stored_sources: of its leading blocks that lie below HBM already, block by block, where:
            0 in DRAM, 1 + store index in a store.
        num_sequences: of its group; more than one in beam search.
        around: whom it leaves behind.
    """

    num_tokens: int
    block_size: int
    block_nbytes: int
    stored_sources: Sequence[int] = ()
    num_sequences: int = 1
    around: Surroundings = Surroundings()

    @property
    def num_full_blocks(self) -> int:
        """Blocks that can be copied; what is left of its tokens is computed in any case."""
        return self.num_tokens // self.block_size

    @property
    def num_new_blocks(self) -> int:
        """Blocks that lie nowhere below yet."""
        return self.num_full_blocks - len(self.stored_sources)

    def returns(self) -> Counter[tuple[int, int]]:
        """Return how many blocks it may find in HBM, and how many tokens its first step may compute
        for those that are admitted with it; and how many guesses say so."""
        most, kept = self.num_tokens - 1, self.around.kept_tokens
        joined = self.around.joined_tokens or (0,) * len(kept)
        return Counter(
            (max(0, min(num, most)) // self.block_size, others)
            for num, others in zip(kept, joined, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PreemptPlan:
    """What to do with a victim, and what both ways were predicted to cost.

    Costs are seconds by which requests together end later: the victim and those around it.

    Attributes:
        swap: copy what is not yet below, and reload it later; otherwise compute it again.
        swap_cost_seconds: what the way down holds up delays all, the way back the victim; or what
            HBM does not keep is computed after all, where that is better.
        recompute_cost_seconds: its steps delay all, and so does a copy at its end.
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
    step_seconds: float = 0.0,
) -> PreemptPlan:
    """Choose what delays requests less; ties are computed again, which leaves links free.

    A victim gives way because its blocks are wanted, and whoever writes into them before they are
    copied waits until those are: a step, and all requests with it. The first block to be wanted is
    the last, which is not full and not copied. One that is computed again is copied when it is
    over, if not before, and others may wait for that as well.

    Down counts the queue of the link as it is now; back does not, for that is later. A victim that
    was swapped is asked about once more when it returns, as one that is stored already and of
    which HBM has kept what it has.

    Args:
        notice_seconds: that a load which is done waits until it is noticed.
        step_seconds: of the engine's steps of late.

    Raises:
        ValueError: more blocks are stored than the victim has, or it has no token.
    """
    if victim.num_tokens < 1:
        raise ValueError(f"a victim of {victim.num_tokens} tokens has nothing to lose")
    if victim.num_new_blocks < 0:
        raise ValueError(
            f"{len(victim.stored_sources)} of {victim.num_full_blocks} full blocks are stored"
        )
    returns, back, again = victim.returns(), 0.0, 0.0
    for (num_kept, num_joined), num_guesses in returns.items():
        computed = _again_seconds(victim, num_kept, num_joined, prefill)
        loaded = _back_seconds(victim, num_kept, links, prefill) + notice_seconds
        again += computed * num_guesses / returns.total()
        best = loaded if victim.around.returning else min(loaded, computed)
        back += best * num_guesses / returns.total()
    num_delayed = 1 + victim.around.num_others
    swap_cost = num_delayed * _stall_seconds(victim, links, step_seconds) + back
    recompute_cost = again + num_delayed * _later_seconds(victim, links, step_seconds)
    swap = swap_cost < recompute_cost or (swap_cost == recompute_cost and not victim.around.returning)
    reason = PreemptReason.RECOMPUTE_FASTER
    if swap:
        reason = PreemptReason.SWAP_FASTER
    if mode is not PreemptMode.COST:
        swap, reason = mode is PreemptMode.SWAP, PreemptReason.MODE
    if victim.num_sequences > 1:
        swap, reason = True, PreemptReason.SEVERAL_SEQUENCES
    return PreemptPlan(swap, swap_cost, recompute_cost, reason)


def _stall_seconds(victim: Victim, links: Links, step_seconds: float) -> float:
    """Return for how long steps wait for blocks that are on their way down."""
    num_new, way = victim.num_new_blocks, links[offload_link()]
    queued = links.queued_nbytes(offload_link())
    down = float(way.seconds(num_new, num_new * victim.block_nbytes, queued))
    another = _share_of_steps(victim, victim.around.num_running - 1)
    share, each = _wait_for_written(victim, links)
    first = another * min(each, down)
    left = max(0.0, down - first - step_seconds)
    each = share * min(each, left)
    num_steps, rest = divmod(left, each + step_seconds) if left else (0.0, 0.0)
    return first + num_steps * each + min(each, rest)


def _later_seconds(victim: Victim, links: Links, step_seconds: float) -> float:
    """Return for how much longer others wait for the copy of all blocks when the victim is over:
    for those that would lie below already had it been swapped.

    Who is admitted then waits for the copy itself, and all others with it; what is left is taken
    step by step, as when a victim is swapped.
    """
    around, way = victim.around, links[offload_link()]
    num_new = victim.num_new_blocks
    down = float(way.seconds(num_new, num_new * victim.block_nbytes)) - way.latency_seconds
    share, each = _wait_for_written(victim, links)
    grown = share * each / (share * each + step_seconds)
    waits = around.admitted_share + (1.0 - around.admitted_share) * grown
    return around.crowding * waits * max(0.0, down)


def _wait_for_written(victim: Victim, links: Links) -> tuple[float, float]:
    """Return in which share of steps those that run write into blocks, and the seconds until these
    are copied.

    Into one in one step of a few, if they are few, and into several in each, if they are many.
    These are copied ahead of all others: the rest goes on meanwhile, and while the step computes.
    """
    num_running, way = max(1, victim.around.num_running), links[offload_link()]
    share = _share_of_steps(victim, num_running)
    num_written = max(1.0, num_running / victim.block_size / share)
    return share, float(way.seconds(num_written, num_written * victim.block_nbytes))


def _share_of_steps(victim: Victim, num_running: int) -> float:
    """Return in which share of steps one of several begins a block."""
    return 1.0 - (1.0 - 1.0 / victim.block_size) ** max(0, num_running)


def _again_seconds(
    victim: Victim, num_kept: int, num_joined: int, prefill: PrefillModel
) -> float:
    """Return by how much computing what is lost delays the victim and all others."""
    around, context = victim.around, num_kept * victim.block_size
    num_lost, num_others = victim.num_tokens - context, around.num_step_tokens + num_joined
    added = float(prefill.added_seconds(num_lost, context, num_others))
    return float(prefill.seconds(num_lost, context)) + around.num_others * added


def _back_seconds(victim: Victim, num_kept: int, links: Links, prefill: PrefillModel) -> float:
    """Return by how much loading what is lost, and computing the tokens behind the last block,
    delays the victim."""
    by_source = np.bincount(np.asarray(victim.stored_sources[num_kept:], np.int64), minlength=1)
    by_source[0] += victim.num_full_blocks - max(num_kept, len(victim.stored_sources))
    idle = links.without_queues()
    back = Loads.of_counts(by_source.tolist(), victim.block_nbytes, idle).seconds(idle)
    context = min(victim.num_full_blocks * victim.block_size, victim.num_tokens - 1)
    return float(back[0]) + float(prefill.seconds(victim.num_tokens - context, context))
