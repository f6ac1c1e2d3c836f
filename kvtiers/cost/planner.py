"""How many leading blocks of a request to reload."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtiers.cost.links import Links, read_link, reload_link
from kvtiers.cost.prefill import PrefillModel
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.messages import UInt8s

Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class PlanReason(StrEnum):
    """Why a plan reloads as many blocks as it does."""

    NO_HIT = "no_hit"  # no block below HBM, or no cut point after one
    RELOAD_ALL = "reload_all"  # AUTO: the largest reload is the fastest
    RELOAD_PART = "reload_part"  # AUTO: some blocks are faster to compute than to reload
    RECOMPUTE_FASTER = "recompute_faster"  # AUTO: no reload is faster than none
    WITHIN_MARGIN = "within_margin"  # AUTO: a reload is faster, by less than the margin
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
    """

    num_tokens: int
    num_local_blocks: int
    block_size: int
    block_nbytes: int


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """How predictions become a choice.

    Attributes:
        mode: see `CostMode`.
        margin: share of the recompute time that a reload must save, 0 <= margin <= 1.
    """

    mode: CostMode = CostMode.AUTO
    margin: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 1:
            raise ValueError(f"margin {self.margin} is not in 0..1")


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
    """

    num_blocks: int
    reload_seconds: float
    recompute_seconds: float
    chosen_seconds: float
    load_seconds: float
    reason: PlanReason
    auto_num_blocks: int
    auto_seconds: float


def plan_reload(
    sources: UInt8s,
    valid: Bools,
    prompt: Prompt,
    links: Links,
    prefill: PrefillModel,
    policy: PlanPolicy,
) -> ReloadPlan:
    """Choose the number of blocks to reload that gives the earliest first token.

    Load, then compute (the serial form): the time at every boundary is evaluated, since steps and
    pipelining make it neither convex nor concave. Ties go to fewer blocks.

    Args:
        sources: one per leading block after the local ones: 0 for DRAM, else 1 + store index.
        valid: ``[len(sources) + 1]``, whether ``m`` blocks may be reloaded; 0 always may.

    Raises:
        ValueError: lengths that disagree, blocks beyond the prompt's end, an unknown store.
    """
    _check(sources, valid, prompt, links)
    loads = load_seconds(sources, prompt.block_nbytes, links)
    ttft_seconds = loads + _rest_seconds(len(sources), prompt, prefill)
    allowed = valid.copy()
    allowed[0] = True
    most = int(np.flatnonzero(allowed)[-1])
    best = int(np.argmin(np.where(allowed, ttft_seconds, np.inf)))
    auto, reason = _auto(ttft_seconds, best, most, policy.margin)
    num_blocks = auto
    if most > 0 and policy.mode is not CostMode.AUTO:
        num_blocks = 0 if policy.mode is CostMode.NEVER else most
        reason = PlanReason(policy.mode.value)
    return ReloadPlan(
        num_blocks=num_blocks,
        reload_seconds=float(ttft_seconds[most]),
        recompute_seconds=float(ttft_seconds[0]),
        chosen_seconds=float(ttft_seconds[num_blocks]),
        load_seconds=float(loads[num_blocks]),
        reason=reason,
        auto_num_blocks=auto,
        auto_seconds=float(ttft_seconds[auto]),
    )


def load_seconds(sources: UInt8s, block_nbytes: int, links: Links) -> Float64s:
    """Return the seconds to reload the first m blocks, for every m from 0 to ``len(sources)``.

    See `pipelined_seconds` for the formula.
    """
    from_store = {}
    for source in np.flatnonzero(np.bincount(sources)):
        if source > 0:
            from_store[links.stores[source - 1]] = _leading_counts(sources == source)
    return pipelined_seconds(np.arange(len(sources) + 1), from_store, block_nbytes, links)


def pipelined_seconds(
    num_blocks: npt.NDArray[np.int64],
    num_from_store: dict[str, npt.NDArray[np.int64]],
    block_nbytes: int,
    links: Links,
) -> Float64s:
    """Return the seconds of reloads ``store -> slot -> HBM``, block by block.

    The slower stage rules; where stores rule, the last block still has to go from its slot to
    HBM. Stores are added up: two of them are commonly files on the same disk.

    Args:
        num_blocks: of each reload. num_from_store: how many of them come from each store.
    """
    link = reload_link()
    to_hbm = links[link].seconds(
        num_blocks, num_blocks * float(block_nbytes), links.queued_nbytes(link)
    )
    from_stores = np.zeros(len(num_blocks))
    for store, counts in num_from_store.items():
        link = read_link(store)
        from_stores += links[link].seconds(
            counts, counts * float(block_nbytes), links.queued_nbytes(link)
        )
    last_block = float(links[reload_link()].seconds(1, block_nbytes))
    by_stores = np.where(from_stores > 0, from_stores + last_block, 0.0)
    return np.asarray(np.maximum(to_hbm, by_stores), dtype=np.float64)


def _leading_counts(mask: Bools) -> npt.NDArray[np.int64]:
    """Return how many of the first m entries are set, for every m from 0 to ``len(mask)``."""
    counts = np.zeros(len(mask) + 1, dtype=np.int64)
    np.cumsum(mask, out=counts[1:])
    return counts


def _rest_seconds(num_blocks: int, prompt: Prompt, prefill: PrefillModel) -> Float64s:
    """Return the seconds to compute what m reloaded blocks leave, for m from 0 to num_blocks.

    An engine computes at least the last token, whose logits it needs.
    """
    cached = (prompt.num_local_blocks + np.arange(num_blocks + 1)) * prompt.block_size
    context = np.minimum(cached, prompt.num_tokens - 1)
    return prefill.seconds(prompt.num_tokens - context, context)


def _auto(ttft_seconds: Float64s, best: int, most: int, margin: float) -> tuple[int, PlanReason]:
    """Return what mode AUTO chooses, and why."""
    if most == 0:
        return 0, PlanReason.NO_HIT
    if best == 0:
        return 0, PlanReason.RECOMPUTE_FASTER
    if ttft_seconds[best] > (1.0 - margin) * ttft_seconds[0]:
        return 0, PlanReason.WITHIN_MARGIN
    return best, PlanReason.RELOAD_ALL if best == most else PlanReason.RELOAD_PART


def _check(sources: UInt8s, valid: Bools, prompt: Prompt, links: Links) -> None:
    num_blocks = len(sources)
    if len(valid) != num_blocks + 1:
        raise ValueError(f"{num_blocks} blocks have {len(valid)} cut points, not one more")
    end = (prompt.num_local_blocks + num_blocks) * prompt.block_size
    if end > prompt.num_tokens or prompt.num_tokens < 1:
        raise ValueError(f"blocks end at token {end} of a prompt of {prompt.num_tokens}")
    if num_blocks and int(sources.max()) > len(links.stores):
        raise ValueError(f"source {int(sources.max())} of {len(links.stores)} stores")
