"""Plans how many leading blocks of a request to reload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.cost.links import Links
from kvtiers.cost.loads import PIPED, Frames, Loads, WindowKV
from kvtiers.cost.prefill import PrefillModel
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.messages import UInt8s

_ONE_THAT_MAY_COME: Final = 0.5

Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Objective(StrEnum):
    """What a plan makes as small as it can; the values of ``cost.objective``."""

    TTFT = "ttft"  # time to the first token: this request's, and what it delays others
    THROUGHPUT = "throughput"  # time of the resource it needs longest: with others at hand,
    # device and links all work at once, and the busiest one bounds how many requests are served
    BALANCED = "balanced"  # the mean of both


class PlanReason(StrEnum):
    """Why a plan reloads as many blocks as it does."""

    NO_HIT = "no_hit"  # no block below HBM, or no cut point after one
    RELOAD_ALL = "reload_all"  # AUTO: the largest reload is the fastest
    RELOAD_PART = "reload_part"  # AUTO: some blocks are faster to compute than to reload
    RECOMPUTE_FASTER = "recompute_faster"  # AUTO: no reload is faster than none
    PAST_DEADLINE = "past_deadline"  # AUTO: every reload that is faster ends too late
    WITHIN_MARGIN = "within_margin"  # AUTO: a reload is faster, by less than the margin
    TRIAL = "trial"  # AUTO: a few blocks, to see how a link is that stalled
    ALWAYS = "always"  # the mode says so
    NEVER = "never"  # the mode says so
    SHADOW = "shadow"  # the mode says so; see `ReloadPlan.auto_num_blocks`


@dataclass(frozen=True, slots=True)
class Prompt:
    """The request that a plan is for.

    Attributes:
        num_tokens: of the whole prompt (after a preemption: with what was generated).
        num_local_blocks: leading blocks that HBM holds already.
        block_size: tokens of a block.
        block_nbytes: bytes of a block on one rank, over all KV groups.
        wait_seconds: until the device has time for the request; a load can begin at once.
        notice_seconds: that a load which is done waits until it is noticed.
        in_step_seconds: loads from DRAM alone that take less run within the step that computes
            the rest, and need not be noticed.
        stalled_seconds: for how long a load under way has brought nothing. It is expected to
            bring nothing for as long again.
        others_ready_seconds: of other requests whose loads are under way, how long until each
            needs the device. What this one computes then delays them, and counts. In a burst of
            requests that each knew only themselves, the few that compute would hold up all that
            loaded: up to 31 % of mean TTFT in `tests/cost/test_regret.py`, and none with this.
        windows: KV groups of which only the last blocks are loaded; part of `block_nbytes`.
        frames: how blocks come from stores.
        overlaps: whether the load may run within the step that computes the rest, where the
            engine can do that at all (`PlanPolicy.num_load_stages`).
        num_waiting: requests behind this one that the engine has not asked about yet. It asks while
            a step has tokens left: each step that this one fills keeps all of them from loading
            and from computing, and counts. In bursts of prompts longer than a step, plans that
            do not know of them take up to half as long again (`tests/cost/test_regret.py`).
        num_running: other requests that compute in every step. What a step waits for a load, they
            wait too; if there are none, one that may come counts half.
    """

    num_tokens: int
    num_local_blocks: int
    block_size: int
    block_nbytes: int
    wait_seconds: float = 0.0
    notice_seconds: float = 0.0
    in_step_seconds: float = 0.0
    stalled_seconds: float = 0.0
    others_ready_seconds: tuple[float, ...] = ()
    windows: tuple[WindowKV, ...] = ()
    frames: Frames = PIPED
    overlaps: bool = True
    num_waiting: int = 0
    num_running: int = 0

    def after(self, num_blocks: int, stalled_seconds: float) -> Prompt:
        """Return the rest of a prompt of whose reload so many blocks have come.

        For planning anew: what has come is kept, and the rest is loaded on or computed. The
        blocks and cut points of that plan are those behind; the job's own bytes must have left
        the links' queues.

        Args:
            stalled_seconds: since the last block came.
        """
        num_local = self.num_local_blocks + num_blocks
        return replace(self, num_local_blocks=num_local, stalled_seconds=stalled_seconds)


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """How predictions become a choice.

    Attributes:
        mode: see `CostMode`.
        margin: share of the recompute time (as the objective counts it) that a reload must save,
            0 <= margin <= 1.
        objective: what is compared.
        deadline_seconds: mode AUTO plans no load that takes longer; > 0, may be infinite.
        num_load_stages: parts in which a load can be handed over within the step that computes the
            rest, in the order in which it needs them: the number of layers where it waits layer by
            layer. 1: loads run before that step.
    """

    mode: CostMode = CostMode.AUTO
    margin: float = 0.05
    objective: Objective = Objective.TTFT
    deadline_seconds: float = math.inf
    num_load_stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 1:
            raise ValueError(f"margin {self.margin} is not in 0..1")
        if not self.deadline_seconds > 0:
            raise ValueError(f"a deadline of {self.deadline_seconds} s leaves no time to load")
        if self.num_load_stages < 1:
            raise ValueError(f"a load in {self.num_load_stages} stages never comes")


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """How many leading blocks to reload, and what the alternatives were predicted to take.

    All seconds are predicted times to the first token, load and computation together.

    Attributes:
        num_blocks: blocks to reload, after the local ones; 0 means recompute.
        reload_seconds: with as many blocks reloaded as possible.
        recompute_seconds: with nothing reloaded.
        chosen_seconds: with `num_blocks` reloaded.
        load_seconds: of `chosen_seconds`, what the reload alone takes.
        reason: why `num_blocks`.
        auto_num_blocks: what mode AUTO reloads; equals `num_blocks` in that mode.
        auto_seconds: with `auto_num_blocks` reloaded.
        compute_seconds: of `chosen_seconds`, what the device works.
        in_step: whether the load is to run within the step that computes the rest.
    """

    num_blocks: int
    reload_seconds: float
    recompute_seconds: float
    chosen_seconds: float
    load_seconds: float
    reason: PlanReason
    auto_num_blocks: int
    auto_seconds: float
    compute_seconds: float = 0.0
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class _Times:
    """One way to load, for every number of blocks.

    Attributes:
        ttft: seconds to the first token. scores: what the objective makes of it.
        worth: the scores, with what a step that waits costs the others in it.
    """

    ttft: Float64s
    scores: Float64s
    worth: Float64s


def plan_reload(
    sources: UInt8s,
    valid: Bools,
    prompt: Prompt,
    links: Links,
    prefill: PrefillModel,
    policy: PlanPolicy,
) -> ReloadPlan:
    """Choose the number of blocks to reload that serves the objective best.

    Every boundary is evaluated: steps and pipelining make the times neither convex nor concave,
    and loads that overlap the step have their optimum within. Ties go to fewer blocks.

    A load runs within the step where that is worth more to this request than it costs the others
    that the step serves: they wait for as long as it takes longer than its computation.

    Args:
        sources: one per leading block after the local ones: 0 for DRAM, else 1 + store index.
        valid: ``[len(sources) + 1]``, whether ``m`` blocks may be reloaded; 0 always may.

    Raises:
        ValueError: sizes do not match, a store does not exist, or blocks exceed the prompt.
    """
    _check(sources, valid, prompt, links)
    of_prefixes = Loads.of_prefixes(
        sources, prompt.block_nbytes, links, prompt.windows, prompt.frames
    )
    loads = of_prefixes.seconds(links)
    quick = np.logical_and.accumulate(sources == 0) & (loads[1:] < prompt.in_step_seconds)
    loads[1:] += prompt.stalled_seconds
    noticed = loads.copy()
    noticed[1:] += np.where(quick, 0.0, prompt.notice_seconds)
    computing = _computing(len(sources), prompt, prefill)
    busiest_link = of_prefixes.busiest_link_seconds(links)
    times, in_step = _best_times(noticed, loads, computing, busiest_link, prompt, policy)
    loads = np.where(in_step, loads, noticed)
    allowed = valid.copy()
    allowed[0] = True
    most = int(np.flatnonzero(allowed)[-1])
    auto, reason = _auto(times.scores, allowed, loads <= policy.deadline_seconds, policy.margin)
    num_blocks = auto
    if most > 0 and policy.mode is not CostMode.AUTO:
        num_blocks = 0 if policy.mode is CostMode.NEVER else most
        reason = PlanReason(policy.mode.value)
    return ReloadPlan(
        num_blocks=num_blocks,
        reload_seconds=float(times.ttft[most]),
        recompute_seconds=float(times.ttft[0]),
        chosen_seconds=float(times.ttft[num_blocks]),
        load_seconds=float(loads[num_blocks]),
        reason=reason,
        auto_num_blocks=auto,
        auto_seconds=float(times.ttft[auto]),
        compute_seconds=float(computing.rest[num_blocks]),
        in_step=bool(in_step[num_blocks]),
    )


@dataclass(frozen=True, slots=True)
class _Computing:
    """Seconds of computation, for every number of reloaded blocks.

    Attributes:
        rest: all that is left to compute. first_step: the first step of it.
        full_steps: of `rest`, steps that have no tokens left for others.
    """

    rest: Float64s
    first_step: Float64s
    full_steps: Float64s


def _best_times(
    noticed: Float64s,
    loads: Float64s,
    computing: _Computing,
    busiest_link: Float64s,
    prompt: Prompt,
    policy: PlanPolicy,
) -> tuple[_Times, Bools]:
    """Return the times of the better way to load each number of blocks, and where that is within
    the step.

    Args:
        noticed: seconds of loads before the step, until they are noticed. loads: within the step.
    """
    situation = computing, busiest_link, prompt, policy.objective
    before = _times(noticed, *situation, num_stages=1)
    if policy.num_load_stages == 1 or not prompt.overlaps:
        return before, np.zeros(len(loads), np.bool_)
    within = _times(loads, *situation, num_stages=policy.num_load_stages)
    in_step = np.asarray(within.worth < before.worth, dtype=np.bool_)
    ways = (
        (within.ttft, before.ttft),
        (within.scores, before.scores),
        (within.worth, before.worth),
    )
    return _Times(*(np.where(in_step, *pair) for pair in ways)), in_step


def _times(
    loads: Float64s,
    computing: _Computing,
    busiest_link: Float64s,
    prompt: Prompt,
    objective: Objective,
    *,
    num_stages: int,
) -> _Times:
    """Return what loading in some stages within the first step takes; 1: before it."""
    ttft = _ttft_seconds(loads, computing, prompt, num_stages)
    stalled = np.zeros_like(loads)
    if num_stages > 1:
        stalled = np.maximum(
            loads / num_stages, loads - computing.first_step * (1.0 - 1.0 / num_stages)
        )
    scores = ttft
    if prompt.others_ready_seconds:
        # A step that waits for a load has the device from the start.
        ready = loads if num_stages == 1 else np.zeros_like(loads)
        scores = ttft + delay_seconds(ready, ttft, prompt)
    scores = scores + prompt.num_waiting * computing.full_steps
    worth = scores + max(_ONE_THAT_MAY_COME, prompt.num_running) * stalled
    if objective is not Objective.TTFT:
        busiest = np.maximum(computing.rest + stalled, busiest_link)
        both = objective is Objective.BALANCED
        scores = 0.5 * (scores + busiest) if both else busiest
        worth = 0.5 * (worth + busiest) if both else busiest
    return _Times(ttft, scores, worth)


def _computing(num_blocks: int, prompt: Prompt, prefill: PrefillModel) -> _Computing:
    """Return the seconds to compute what m reloaded blocks leave, for m from 0 to num_blocks.

    An engine computes at least the last token, whose logits it needs.
    """
    cached = (prompt.num_local_blocks + np.arange(num_blocks + 1)) * prompt.block_size
    context = np.minimum(cached, prompt.num_tokens - 1)
    new = prompt.num_tokens - context
    rest = prefill.seconds(new, context)
    in_full_steps = new - new % prefill.max_tokens_per_step
    first_step = prefill.first_step_seconds(new, context)
    return _Computing(rest, first_step, rest * (in_full_steps / new))


def _ttft_seconds(
    loads: Float64s, computing: _Computing, prompt: Prompt, num_stages: int
) -> Float64s:
    """Return the times to the first token.

    The first step computes its stages (layers) one after another, each once its part of the load
    has come. With S equal stages, a load X and a first step C it ends when the last of these is
    true: the device became free and computed C; the first part came and all of C followed
    (``X / S + C``); the last part came and the last stage followed (``X + C / S``). In between
    neither can be the latest. With one stage that is load, then compute.
    """
    first_step = computing.first_step
    first_part = loads / num_stages + first_step
    last_part = loads + first_step / num_stages
    end = np.maximum(np.maximum(first_part, last_part), prompt.wait_seconds + first_step)
    return np.asarray(end + (computing.rest - first_step))


def delay_seconds(ready: Float64s, end: Float64s, prompt: Prompt) -> Float64s:
    """Return by how much others' first tokens are later together, for each m.

    The device serves requests in the order in which they become ready. One that becomes ready
    after this request, but before its end, waits for that end; what the device did before this
    request it would have waited for without it too.
    """
    others = np.sort(np.array(prompt.others_ready_seconds, dtype=np.float64))
    until = np.concatenate(([0.0], np.cumsum(others)))
    start = np.maximum(ready, prompt.wait_seconds)
    first, second, third = (np.searchsorted(others, times) for times in (ready, start, end))
    queued = (second - first) * (end - start)
    arriving = (third - second) * end - (until[third] - until[second])
    return np.asarray(queued + arriving)


def _auto(
    scores: Float64s, allowed: Bools, in_time: Bools, margin: float
) -> tuple[int, PlanReason]:
    """Return what mode AUTO chooses, and why."""
    most = int(np.flatnonzero(allowed)[-1])
    if most == 0:
        return 0, PlanReason.NO_HIT
    best = int(np.argmin(np.where(allowed & in_time, scores, np.inf)))
    if scores[best] > (1.0 - margin) * scores[0]:
        best = 0
    if best:
        return best, PlanReason.RELOAD_ALL if best == most else PlanReason.RELOAD_PART
    fastest = float(np.min(np.where(allowed, scores, np.inf)))
    if fastest >= scores[0]:
        return 0, PlanReason.RECOMPUTE_FASTER
    if fastest > (1.0 - margin) * scores[0]:
        return 0, PlanReason.WITHIN_MARGIN
    return 0, PlanReason.PAST_DEADLINE


def _check(sources: UInt8s, valid: Bools, prompt: Prompt, links: Links) -> None:
    num_blocks = len(sources)
    if len(valid) != num_blocks + 1:
        raise ValueError(f"{num_blocks} blocks have {len(valid)} cut points, not one more")
    end = (prompt.num_local_blocks + num_blocks) * prompt.block_size
    if end > prompt.num_tokens or prompt.num_tokens < 1:
        raise ValueError(f"blocks end at token {end} of a prompt of {prompt.num_tokens}")
    if num_blocks and int(sources.max()) > len(links.stores):
        raise ValueError(f"source {int(sources.max())} of {len(links.stores)} stores")
