"""The one object that predicts times: it plans reloads and learns from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtiers.cost.links import Links, read_link, reload_link
from kvtiers.cost.planner import (
    Bools,
    PlanPolicy,
    Prompt,
    ReloadPlan,
    pipelined_seconds,
    plan_reload,
)
from kvtiers.cost.prefill import PrefillModel
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.messages import Link, UInt8s


class CostModel:
    """What reloading and recomputing take on this machine, as known now.

    Attributes:
        prefill: the engine's speed. links: the links' speeds and queues.
        policy: how predictions become a choice.
    """

    def __init__(self, prefill: PrefillModel, links: Links, policy: PlanPolicy) -> None:
        self.prefill = prefill
        self.links = links
        self.policy = policy

    def plan(self, sources: UInt8s, valid: Bools, prompt: Prompt) -> ReloadPlan:
        """Choose how many leading blocks to reload; see `plan_reload`.

        In mode AUTO, none that a link without trust would have to bring; see `Links.stalled`.
        """
        if self.policy.mode is CostMode.AUTO:
            valid = self._trusted(sources, valid)
        return plan_reload(sources, valid, prompt, self.links, self.prefill, self.policy)

    def _trusted(self, sources: UInt8s, valid: Bools) -> Bools:
        """Return the cut points whose blocks all lie on links that are trusted."""
        names = (reload_link(), *map(read_link, self.links.stores))
        lost = [idx for idx, name in enumerate(names) if not self.links.trusted(name)]
        if not lost:
            return valid
        barred = np.isin(sources, lost) if 0 not in lost else np.ones(len(sources), np.bool_)
        first = int(np.argmax(barred)) if barred.any() else len(sources)
        return np.asarray(valid & (np.arange(len(valid)) <= first), dtype=np.bool_)

    def predict_load_seconds(self, num_blocks_by_source: Sequence[int], block_nbytes: int) -> float:
        """Return the seconds until a reload has all its blocks in HBM.

        Args:
            num_blocks_by_source: index 0 for DRAM, 1 + store index for stores; may be shorter
                than there are stores.
            block_nbytes: bytes of a block on one rank.
        """
        num_blocks = np.array([sum(num_blocks_by_source)], dtype=np.int64)
        from_store = {
            store: np.array([count], dtype=np.int64)
            for store, count in zip(self.links.stores, num_blocks_by_source[1:], strict=False)
        }
        return float(pipelined_seconds(num_blocks, from_store, block_nbytes, self.links)[0])

    def step_flops(self, num_new_tokens: Sequence[int], num_context_tokens: Sequence[int]) -> float:
        """Return the operations of one engine step, from each request's tokens in it."""
        return float(self.prefill.shape.prefill_flops(num_new_tokens, num_context_tokens).sum())

    def observe_step(self, step_flops: float, step_tokens: int, seconds: float) -> None:
        """Learn from one engine step; see `PrefillModel.observe`."""
        self.prefill.observe(step_flops, step_tokens, seconds)

    def observe_links(self, links: Sequence[Link]) -> None:
        """Learn from what links did."""
        for link in links:
            self.links.observe(link)
