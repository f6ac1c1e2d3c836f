"""Whether a victim of preemption is copied down and back, or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.cost.links import Links, offload_link
from kvtiers.cost.loads import Loads
from kvtiers.cost.prefill import PrefillModel

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

# Of a victim's last blocks, how many may be computed again rather than copied: they are the first
# that others write into.
_LEFT_BEHIND: Final = (0, 1, *(num << by for by in range(20) for num in (2, 3)))

# What was copied down is left there only if computing takes less than this share of the reload:
# the victim alone would gain, a step or two, and who computes takes room from all others.
_RELOAD_SHARE: Final = 0.1

# Of a step, what each request must gain before a victim is not copied as a whole: predictions
# are no better than that, and what lies below can be hit by others.
_STEP_SHARE: Final = 0.02


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
        admitted_share: of the blocks that the engine hands out, those of admissions, of late; the
            others are of requests that grow.
        joined_tokens: that its first step then computes beside those of `num_step_tokens`, of
            prompts, and of others that are admitted with it: for each guess, or for none.
        returning: whether the victim is about to return, after it was swapped.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_step_tokens: int = 0
    kept_tokens: tuple[int, ...] = (0,)
    admitted_share: float = 0.0
    joined_tokens: tuple[int, ...] = ()
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

    @property
    def num_stored_blocks(self) -> int:
        """Leading blocks that lie below already."""
        return len(self.stored_sources)

    def guesses(self) -> tuple[Int64s, Int64s]:
        """Return what it may meet when it returns, guess by guess: blocks that it finds in HBM, and
        tokens that its first step computes for others, beside those of each step."""
        kept = np.asarray(self.around.kept_tokens, np.int64)
        joined = np.asarray(self.around.joined_tokens or np.zeros_like(kept), np.int64)
        return np.clip(kept, 0, self.num_tokens - 1) // self.block_size, joined

    def prefixes(self) -> Int64s:
        """Return how many of its leading blocks may lie below when it returns: all full ones, or
        all but some of the last, or those that do already."""
        stored, num_new = self.num_stored_blocks, self.num_new_blocks
        if self.around.returning or not num_new:
            return np.array([stored], np.int64)
        left = [num for num in _LEFT_BEHIND if num < num_new] + [num_new] * bool(stored)
        return self.num_full_blocks - np.array(left, np.int64)


@dataclass(frozen=True, slots=True)
class PreemptPlan:
    """What to do with a victim, and what both ways were predicted to cost.

    Costs are seconds by which requests together end later: the victim and those around it.

    Attributes:
        swap: copy what is not yet below, and reload it later; otherwise compute it again.
        swap_cost_seconds: what the way down holds up delays all, the way back the victim; or what
            HBM does not keep is computed after all, where that is better.
        recompute_cost_seconds: its steps delay all, and so does a copy at its end.
        num_blocks: leading ones that are to lie below, if it is swapped; the others are computed
            again.
    """

    swap: bool
    swap_cost_seconds: float
    recompute_cost_seconds: float
    reason: PreemptReason
    num_blocks: int


def plan_preempt(
    victim: Victim,
    links: Links,
    prefill: PrefillModel,
    mode: PreemptMode = PreemptMode.COST,
    notice_seconds: float = 0.0,
    step_seconds: float = 0.0,
) -> PreemptPlan:
    """Choose what delays requests less.

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
    around, chosen = victim.around, victim.prefixes()
    if mode is PreemptMode.SWAP or victim.num_sequences > 1:
        chosen = chosen[:1]
    back, again = _return_seconds(victim, chosen, links, prefill, notice_seconds)
    num_delayed = 1 + around.num_others
    later = num_delayed * _later_seconds(
        victim, victim.num_full_blocks - chosen, links, step_seconds
    )
    costs = back + later + num_delayed * _stalls_seconds(victim, chosen, links, step_seconds)
    worth = num_delayed * _STEP_SHARE * step_seconds
    best = int(np.argmin(costs)) if costs.min() < costs[0] - worth else 0
    none = np.array([victim.num_new_blocks])
    swap_cost = float(costs[best])
    recompute_cost = again + num_delayed * float(
        _later_seconds(victim, none, links, step_seconds)[0]
    )
    if around.returning:  # its way down is gone
        swap = _RELOAD_SHARE * swap_cost < recompute_cost
    else:  # it is asked about once more if it is swapped: of equals that keeps a choice
        swap = swap_cost <= recompute_cost + worth and victim.num_full_blocks > 0
    reason = PreemptReason.SWAP_FASTER if swap else PreemptReason.RECOMPUTE_FASTER
    if mode is not PreemptMode.COST:
        swap, reason = mode is PreemptMode.SWAP, PreemptReason.MODE
    if victim.num_sequences > 1:
        swap, reason = True, PreemptReason.SEVERAL_SEQUENCES
    return PreemptPlan(swap, swap_cost, recompute_cost, reason, int(chosen[best]))


def _stalls_seconds(
    victim: Victim, num_below: Int64s, links: Links, step_seconds: float
) -> Float64s:
    """Return for how long steps wait for blocks that are on their way down, for each number of
    leading blocks that are to lie below."""
    num_new, way = num_below - victim.num_stored_blocks, links[offload_link()]
    queued = links.queued_nbytes(offload_link())
    down = way.seconds(num_new, num_new * victim.block_nbytes, queued).tolist()
    left = (victim.num_full_blocks - num_below).tolist()
    share, each = _wait_for_written(victim, links)
    another = _share_of_steps(victim, victim.around.num_running - 1)
    per_step = max(1, victim.around.num_running) / victim.block_size
    waits = []
    for seconds, num_left in zip(down, left, strict=True):
        num_steps = num_left / per_step  # which write into blocks that are not copied
        first = another * max(0.0, 1.0 - num_steps) * min(each, seconds)
        rest = max(0.0, seconds - first - step_seconds * (1.0 + num_steps))
        waits.append(first + _waits_seconds(share * min(each, rest), rest, step_seconds))
    return np.array([0.0] * len(waits) if victim.around.returning else waits)


def _waits_seconds(each: float, left: float, step_seconds: float) -> float:
    """Return for how long steps wait while a copy still takes some time, if each waits so long."""
    num_steps, rest = divmod(left, each + step_seconds) if left else (0.0, 0.0)
    return num_steps * each + min(each, rest)


def _later_seconds(victim: Victim, num_new: Int64s, links: Links, step_seconds: float) -> Float64s:
    """Return for how much longer others wait for the copy of all blocks when the victim is over:
    for those that would lie below already had they been copied before.

    Who is admitted then waits for the copy itself, and all others with it; what is left is taken
    step by step, as when a victim is swapped.
    """
    around, way = victim.around, links[offload_link()]
    down = way.seconds(num_new, num_new * victim.block_nbytes) - way.latency_seconds
    share, each = _wait_for_written(victim, links)
    grown = share * each / (share * each + step_seconds)
    waits = around.admitted_share + (1.0 - around.admitted_share) * grown
    return np.asarray(around.crowding * waits * np.maximum(0.0, down))


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


def _return_seconds(
    victim: Victim, num_below: Int64s, links: Links, prefill: PrefillModel, notice_seconds: float
) -> tuple[Float64s, float]:
    """Return by how much the way back delays the victim and all others, in the mean of all guesses:
    for each number of leading blocks that lie below, and where all that is lost is computed."""
    kept, joined = victim.guesses()
    computed = _compute_seconds(victim, kept, joined, prefill)
    reached = np.maximum(num_below[:, None], kept)
    loaded = _load_seconds(victim, num_below, kept, links) + notice_seconds
    loaded = loaded + _compute_seconds(victim, reached, joined, prefill)
    if not victim.around.returning:  # then there is a choice
        loaded = np.minimum(loaded, computed)
    return loaded.mean(axis=1), float(computed.mean())


def _compute_seconds(
    victim: Victim, num_there: Int64s, num_joined: Int64s, prefill: PrefillModel
) -> Float64s:
    """Return by how much computing all behind some blocks delays the victim and all others."""
    around = victim.around
    context = np.minimum(num_there * victim.block_size, victim.num_tokens - 1)
    num_lost, others = victim.num_tokens - context, around.num_step_tokens + num_joined
    added = prefill.added_seconds(num_lost, context, others)
    return np.asarray(prefill.seconds(num_lost, context) + around.num_others * added)


def _load_seconds(victim: Victim, num_below: Int64s, kept: Int64s, links: Links) -> Float64s:
    """Return what loading of blocks that lie below those takes that HBM has not kept."""
    sources = np.zeros(victim.num_full_blocks, np.int64)
    sources[: victim.num_stored_blocks] = victim.stored_sources
    counts = []
    for source in range(int(sources.max(initial=0)) + 1):
        before = np.concatenate(([0], np.cumsum(sources == source)))
        first = np.minimum(kept, num_below[:, None])
        counts.append((before[num_below[:, None]] - before[first]).ravel())
    idle = links.without_queues()
    seconds = Loads.of_counts(counts, victim.block_nbytes, idle).seconds(idle)
    return np.asarray(seconds.reshape(len(num_below), len(kept)))
