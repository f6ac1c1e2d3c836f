"""KV groups that are ranges of layers: the order of a load, its deadline, what is kept of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtiers.control.outlook import Outlook
from kvtiers.control.settings import GroupSettings
from kvtiers.cost.planner import PlanReason, ReloadPlan
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel, PrefillSpeed
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.outcome import Outcome

from .scenes import DISK, Scene, chain, dram

NUM_RANGES, NUM_BLOCKS = 3, 4


def scene_of(*stores, slots: int = 64, num_ranges: int = NUM_RANGES) -> Scene:
    settings = dram(slots, *stores)
    groups = (GroupSettings(),) * num_ranges
    return Scene(replace(settings, groups=groups, num_layer_ranges=num_ranges))


def ranges() -> list:
    return [chain("p", NUM_BLOCKS, group) for group in range(NUM_RANGES)]


def order_of(scene: Scene, job_id):
    return next(order for order in scene.step().before if order.job_id == job_id)


@pytest.mark.parametrize("in_step", [False, True])
def test_a_step_gets_range_by_range_and_a_waiting_request_block_by_block(in_step):
    scene = scene_of()
    keys = ranges()
    scene.offload(*keys)
    order = order_of(scene, scene.load(*keys, in_step=in_step))
    expected = [k for group in keys for k in group]
    if not in_step:
        expected = [group[i] for i in range(NUM_BLOCKS) for group in keys]
    assert order.block_keys() == expected


def test_what_came_before_the_first_lost_block_of_any_range_is_kept():
    scene = scene_of()
    keys = ranges()
    scene.offload(*keys)
    job = scene.load(*keys)
    order = order_of(scene, job)
    rows = {
        row: Outcome.TIMED_OUT
        for row, key in enumerate(order.block_keys())
        if key in (keys[1][2], keys[2][2], keys[2][3])
    }
    done = scene.answer(job, rows)
    assert (done.num_loaded, done.num_failed) == (2, 2)
    assert done.kept == {"dram": 2}


def test_groups_of_the_engine_itself_keep_nothing():
    scene = Scene(replace(dram(64), groups=(GroupSettings(),) * NUM_RANGES))
    keys = ranges()
    scene.offload(*keys)
    job = scene.load(*keys)
    scene.step()
    done = scene.answer(job, {7: Outcome.TIMED_OUT})
    assert (done.num_loaded, done.num_failed) == (NUM_RANGES * NUM_BLOCKS - 1, 1)
    assert done.kept == {}


def test_a_block_that_another_load_still_brings_is_not_at_hand():
    scene = scene_of(DISK)
    keys = ranges()
    scene.offload(*keys)
    match = scene.controller.match(keys, 0, NUM_BLOCKS)
    assert scene.controller.at_hand(keys, match)
    entry = scene.controller.dram.get(keys[2][1])
    scene.controller.dram.doom(entry)
    again = scene.controller.match(keys, 0, NUM_BLOCKS)
    assert again.sources[2, 1] == 1
    assert scene.controller.at_hand(keys, again)  # it lies on the disk
    scene.load(*keys, request="other")  # which brings it to DRAM
    coming = scene.controller.match(keys, 0, NUM_BLOCKS)
    assert coming.sources[2, 1] == 0
    assert not scene.controller.at_hand(keys, coming)
    scene.step()
    scene.settle()


def test_a_load_that_a_step_waits_for_comes_back_at_once_where_it_cannot_be_staged():
    """It must not wait for slots until its deadline: the whole engine would."""
    scene = scene_of(DISK, slots=8, num_ranges=2)
    keys = [chain("p", 2, group) for group in range(2)]
    scene.offload(*keys)
    for group in keys:
        for key in group:
            scene.controller.dram.doom(scene.controller.dram.get(key))
    held = scene.controller.dram.take_window(8)
    job = scene.load(*keys, in_step=True)
    orders = scene.controller.take_orders(1, (job,), scene.now)
    (order,) = [order for order in orders.before if order.job_id == job]
    assert order.sources.tolist() == [0] * 4
    scene.controller.dram.give_window(held)


PLAN = ReloadPlan(4, 2.0, 3.0, 2.0, 0.2, PlanReason.ALWAYS, 4, 2.0, compute_seconds=1.0)


@pytest.mark.parametrize(
    ("mode", "in_step", "known", "deadline"),
    [
        (CostMode.ALWAYS, False, True, 10.0),
        (CostMode.ALWAYS, True, True, 1.1 * 2.0 + 0.25),
        (CostMode.AUTO, True, True, 1.1 * 2.0 + 0.25),
        (CostMode.ALWAYS, True, False, 10.0),
    ],
)
def test_a_step_waits_no_longer_than_computing_would_take(mode, in_step, known, deadline):
    scene = scene_of()
    cost = scene.controller.cost
    cost.policy = replace(cost.policy, mode=mode, margin=0.1)
    cost.prefill = PrefillModel.of(PrefillSpeed(0.01, 1e12), FALLBACK_SHAPE, 1024)
    for _ in range(6 if known else 0):
        cost.observe_step(1e12, 100, 0.1)
    keys = ranges()
    scene.offload(*keys)
    job = scene.controller.jobs.get(scene.load(*keys, in_step=in_step))
    job.deadline_seconds = 10.0
    outlook: Outlook = scene.controller.outlook
    outlook.expect(job, PLAN, in_step=in_step)
    assert job.deadline_seconds == pytest.approx(deadline)
