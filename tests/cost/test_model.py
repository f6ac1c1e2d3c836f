"""Promises of `kvtiers.cost.model`."""

from __future__ import annotations

import numpy as np
import pytest

from kvtiers.cost.links import Links, StoreKind, offload_link, read_link, reload_link
from kvtiers.cost.loads import Loads
from kvtiers.cost.model import TRIAL_BLOCKS, CostModel
from kvtiers.cost.planner import PlanPolicy, PlanReason, Prompt
from kvtiers.cost.preempt import PreemptMode, Victim
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.messages import Link

from .machine import BLOCK_NBYTES, BLOCK_SIZE, h100


def cost_model(mode: CostMode = CostMode.AUTO) -> CostModel:
    links = Links.seeded({"disk": StoreKind.NVME, "shared": StoreKind.LMDB})
    return CostModel(h100(), links, PlanPolicy(mode))


def plan_blocks(model: CostModel, num_blocks: int, source: int) -> int:
    prompt = Prompt(num_blocks * BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_NBYTES)
    sources, valid = np.full(num_blocks, source, np.uint8), np.ones(num_blocks + 1, bool)
    return model.plan(sources, valid, prompt).num_blocks


def test_load_prediction_is_the_plan_s():
    model = cost_model()
    model.links.submitted(read_link("shared"), 10**9)
    sources = np.repeat(np.array([0, 1, 2], np.uint8), [30, 20, 10])
    expected = Loads.of_prefixes(sources, BLOCK_NBYTES, model.links).seconds(model.links)[-1]
    assert model.predict_load_seconds([30, 20, 10], BLOCK_NBYTES) == pytest.approx(expected)
    assert model.predict_load_seconds([30], BLOCK_NBYTES) > 0
    assert model.predict_load_seconds([0, 0, 0], BLOCK_NBYTES) == 0


def test_slow_engine_steps_make_reload_worth_it():
    model = cost_model()
    assert plan_blocks(model, 512, source=1) == 0
    for n in (512, 1024, 2048, 4096, 8192) * 4:
        flops = model.step_flops([n], [0])
        model.observe_step(flops, n, flops / 20e12)
    assert plan_blocks(model, 512, source=1) == 512


def test_slow_link_makes_recompute_worth_it():
    model = cost_model()
    assert plan_blocks(model, 512, source=0) == 512
    nbytes = 512 * BLOCK_NBYTES
    model.observe_links([Link(reload_link(), 512, nbytes, nbytes / 1e9)] * 20)
    assert plan_blocks(model, 512, source=0) == 0


def test_step_operations_add_up_over_requests():
    model = cost_model()
    flops = model.prefill.shape.prefill_flops
    assert model.step_flops([1, 100], [500, 0]) == pytest.approx(flops(1, 500) + flops(100, 0))
    assert model.step_flops([], []) == 0


def test_mode_of_the_policy_counts():
    assert plan_blocks(cost_model(CostMode.ALWAYS), 512, source=2) == 512
    assert plan_blocks(cost_model(CostMode.NEVER), 512, source=0) == 0


class TestStalledLinks:
    def plan(self, model: CostModel, sources: list[int]) -> int:
        prompt = Prompt(len(sources) * BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_NBYTES)
        valid = np.ones(len(sources) + 1, bool)
        return model.plan(np.array(sources, np.uint8), valid, prompt).num_blocks

    def fast_disk(self, mode: CostMode = CostMode.AUTO) -> CostModel:
        model = cost_model(mode)
        nbytes = 512 * BLOCK_NBYTES
        model.observe_links([Link(read_link("disk"), 512, nbytes, nbytes / 30e9)] * 20)
        return model

    def test_blocks_of_a_stalled_store_are_not_loaded_and_those_before_them_are(self):
        model, sources = self.fast_disk(), [0] * 200 + [1] * 100 + [0] * 200
        assert self.plan(model, sources) == 500
        model.links.stalled(read_link("disk"), 0.0)
        assert self.plan(model, sources) == 200
        assert self.plan(model, [1] * 500) == 0

    def test_a_trial_loads_a_few_blocks_and_its_end_decides(self):
        model, sources = self.fast_disk(), [0] * 200 + [1] * 300
        model.links.stalled(read_link("disk"), 0.0)
        model.links.revisit(1000.0)
        prompt = Prompt(len(sources) * BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_NBYTES)
        found = model.plan(np.array(sources, np.uint8), np.ones(501, bool), prompt)
        assert (found.num_blocks, found.reason) == (200 + TRIAL_BLOCKS, PlanReason.TRIAL)
        nbytes = TRIAL_BLOCKS * BLOCK_NBYTES
        model.observe_links([Link(read_link("disk"), TRIAL_BLOCKS, nbytes, nbytes / 25e9)])
        assert self.plan(model, sources) == 500

    def test_what_would_be_computed_anyway_is_not_tried(self):
        model = cost_model()
        model.links.stalled(read_link("disk"), 0.0)
        model.links.revisit(1000.0)
        assert self.plan(model, [1] * 100) == 0

    def test_preemption_and_values_use_what_is_known_now(self):
        model = cost_model()
        victim = Victim(32_768, BLOCK_SIZE, BLOCK_NBYTES)
        assert model.preempt(victim).swap
        assert not model.preempt(victim, PreemptMode.RECOMPUTE).swap
        before = model.seconds_saved(100_000, BLOCK_SIZE, BLOCK_NBYTES, 0)
        nbytes = 512 * BLOCK_NBYTES
        model.observe_links([Link(reload_link(), 512, nbytes, nbytes / 1e9)] * 20)
        model.observe_links([Link(offload_link(), 512, nbytes, nbytes / 1e9)] * 20)
        assert not model.preempt(victim).swap
        assert model.seconds_saved(100_000, BLOCK_SIZE, BLOCK_NBYTES, 0) < before

    def test_nothing_is_loaded_where_the_way_to_hbm_stalled(self):
        model = self.fast_disk()
        model.links.stalled(reload_link(), 0.0)
        assert self.plan(model, [1] * 300) == 0
        assert self.plan(model, [0] * 300) == 0

    def test_always_means_always(self):
        model = self.fast_disk(CostMode.ALWAYS)
        model.links.stalled(read_link("disk"), 0.0)
        assert self.plan(model, [1] * 300) == 300
