"""The cost model: plans reloads, and learns from measured steps and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.cost.links import Links, read_link, reload_link
from kvtiers.cost.loads import Loads
from kvtiers.cost.noticing import Noticing
from kvtiers.cost.planner import (
    Bools,
    PlanPolicy,
    PlanReason,
    Prompt,
    ReloadPlan,
    plan_reload,
)
from kvtiers.cost.preempt import PreemptMode, PreemptPlan, Victim, plan_preempt
from kvtiers.cost.prefill import PrefillModel
from kvtiers.cost.trust import Standing
from kvtiers.cost.value import seconds_saved
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.messages import Link, UInt8s

Float64s = npt.NDArray[np.float64]

TRIAL_BLOCKS: Final = 8  # enough to tell a stall from a link; 16 MiB of Llama-3.1-8B


class CostModel:
    """What reloading and recomputing take on this machine, as known now.

    Attributes:
        prefill: the engine's speed. links: the links' speeds and queues.
        policy: how predictions become a choice. noticing: what a load waits once it is done.
    """

    def __init__(self, prefill: PrefillModel, links: Links, policy: PlanPolicy) -> None:
        self.prefill = prefill
        self.links = links
        self.policy = policy
        self.noticing = Noticing()

    def plan(self, sources: UInt8s, valid: Bools, prompt: Prompt) -> ReloadPlan:
        """Choose how many leading blocks to reload; see `plan_reload`.

        In mode AUTO no block is planned that a stalled link would have to bring, and only a few
        over a link on trial; see `Links.stalled`.
        """
        lost = self._first_behind(sources, Standing.LOST)
        tried = self._first_behind(sources, Standing.ON_TRIAL)
        if self.policy.mode is not CostMode.AUTO or min(lost, tried) == len(sources):
            return plan_reload(sources, valid, prompt, self.links, self.prefill, self.policy)
        cuts = np.arange(len(valid))
        valid = valid & (cuts <= lost)
        plan = plan_reload(sources, valid, prompt, self.links, self.prefill, self.policy)
        if plan.num_blocks <= tried:
            return plan
        few = valid & (cuts <= tried + TRIAL_BLOCKS)
        always = replace(self.policy, mode=CostMode.ALWAYS, num_load_stages=1)
        trial = plan_reload(sources, few, prompt, self.links, self.prefill, always)
        return replace(trial, reason=PlanReason.TRIAL)

    def plan_all(self, sources: UInt8s, valid: Bools, prompt: Prompt) -> ReloadPlan:
        """Plan to reload all that is there, whatever the mode, and predict what that takes."""
        policy = replace(self.policy, mode=CostMode.ALWAYS)
        return plan_reload(sources, valid, prompt, self.links, self.prefill, policy)

    def preempt(self, victim: Victim, mode: PreemptMode = PreemptMode.COST) -> PreemptPlan:
        """Choose between swapping a victim and computing it again; see `plan_preempt`."""
        notice = self.noticing.seconds(computes=victim.around.num_running > 0)
        step = self.noticing.step_seconds
        return plan_preempt(victim, self.links, self.prefill, mode, notice, step)

    def seconds_saved(
        self, positions: npt.ArrayLike, block_size: int, block_nbytes: int, source: int
    ) -> Float64s:
        """Return what one reused block saves; see `kvtiers.cost.value.seconds_saved`."""
        return seconds_saved(positions, block_size, block_nbytes, source, self.links, self.prefill)

    def _first_behind(self, sources: UInt8s, standing: Standing) -> int:
        """Return the first block that a link of a standing has to bring; else their number."""
        names = (reload_link(), *map(read_link, self.links.stores))
        barred = [idx for idx, name in enumerate(names) if self._standing(name) is standing]
        if not barred:
            return len(sources)
        if 0 in barred:  # every block takes the way to HBM
            return 0
        found = np.isin(sources, barred)
        return int(np.argmax(found)) if found.any() else len(sources)

    def _standing(self, name: str) -> Standing:
        """Return what a link may be used for now: nothing else while a trial is under way."""
        standing = self.links.standing(name)
        tried = standing is Standing.ON_TRIAL and self.links.queued_nbytes(name) > 0
        return Standing.LOST if tried else standing

    def predict_load_seconds(self, num_blocks_by_source: Sequence[int], block_nbytes: int) -> float:
        """Return the seconds until a reload has all its blocks in HBM.

        Args:
            num_blocks_by_source: index 0 for DRAM, 1 + store index for stores; may be shorter
                than there are stores.
            block_nbytes: bytes of a block on one rank.
        """
        loads = Loads.of_counts(num_blocks_by_source, block_nbytes, self.links)
        return float(loads.seconds(self.links)[0])

    def step_flops(self, num_new_tokens: Sequence[int], num_context_tokens: Sequence[int]) -> float:
        """Return the operations of one engine step, from each request's tokens in it."""
        return float(self.prefill.shape.prefill_flops(num_new_tokens, num_context_tokens).sum())

    def observe_step(
        self, step_flops: float, step_tokens: int, seconds: float, kv_elements_read: float = 0.0
    ) -> None:
        """Learn from one engine step; see `PrefillModel.observe`."""
        self.prefill.observe(step_flops, step_tokens, seconds, kv_elements_read)
        self.noticing.step_took(seconds)

    def observe_batch(
        self, num_new_tokens: Sequence[int], num_context_tokens: Sequence[int], seconds: float
    ) -> None:
        """Learn from one engine step, from each request's tokens in it."""
        shape, num_tokens = self.prefill.shape, sum(num_new_tokens)
        attention, read = shape.step_sums(num_new_tokens, num_context_tokens)
        flops = float(shape.linear_flops(num_tokens)) + attention
        self.observe_step(flops, num_tokens, seconds, read)

    def observe_links(self, links: Sequence[Link]) -> None:
        """Learn from what links did."""
        for link in links:
            self.links.observe(link)
