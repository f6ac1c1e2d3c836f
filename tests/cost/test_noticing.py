"""Promises of `kvtiers.cost.noticing`: small, robust, and about the engine as it is now."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.noticing import Noticing
from kvtiers.cost.planner import PlanPolicy, Prompt, ReloadPlan, plan_reload
from kvtiers.model.cost_mode import CostMode

from .machine import BLOCK_NBYTES, BLOCK_SIZE, DISK, DRAM_ONLY, bare_link, h100, one_disk


def taught(seconds: float, times: int = 10, *, computes: bool = False) -> Noticing:
    noticing = Noticing()
    for _ in range(5):
        noticing.step_took(0.02)
    for _ in range(times):
        noticing.observe(seconds, computes=computes)
    return noticing


def test_nothing_measured_means_a_poll_and_half_a_step():
    noticing = Noticing()
    idle = noticing.seconds(computes=False)
    assert 0 < idle < 0.002
    assert noticing.seconds(computes=True) == idle, "no step is known yet"
    noticing.step_took(0.04)
    assert noticing.seconds(computes=True) == pytest.approx(idle + 0.02)


def test_idle_and_busy_engines_are_learnt_apart():
    noticing = taught(0.004)
    for _ in range(10):
        noticing.observe(0.014, computes=True)
    assert noticing.seconds(computes=False) == pytest.approx(0.004)
    assert noticing.seconds(computes=True) == pytest.approx(0.014)


def test_busy_wait_follows_the_length_of_steps():
    noticing = taught(0.012, computes=True)
    before = noticing.seconds(computes=True)
    for _ in range(5):
        noticing.step_took(0.2)
    assert noticing.seconds(computes=True) > 8 * before


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("num_stalls", [1, 2, 3])
@pytest.mark.parametrize("times", [0, 10])
def test_stalls_change_nothing(times, num_stalls, computes):
    noticing = taught(0.003, times, computes=computes)
    before = noticing.seconds(computes=computes)
    for _ in range(min(num_stalls, 2 if times == 0 else 3)):
        noticing.observe(10.0, computes=computes)
    assert noticing.seconds(computes=computes) == pytest.approx(before)


@pytest.mark.parametrize("computes", [False, True])
def test_lasting_change_is_believed_after_four_loads(computes):
    noticing = taught(0.003, computes=computes)
    for _ in range(4):
        noticing.observe(0.015, computes=computes)
    assert noticing.seconds(computes=computes) == pytest.approx(0.015)


@given(
    waits=st.lists(st.tuples(st.floats(allow_nan=True), st.booleans()), max_size=40),
    steps=st.lists(st.floats(0, 10), max_size=10),
)
def test_never_negative_and_bounded_whatever_is_measured(waits, steps):
    noticing = Noticing()
    for step in steps:
        noticing.step_took(step)
    for seconds, computes in waits:
        noticing.observe(seconds, computes=computes)
    idle, busy = (noticing.seconds(computes=c) for c in (False, True))
    assert 0 <= idle <= 0.05
    assert idle <= busy <= 0.05 + 2 * max(steps, default=0.0)
    assert math.isfinite(busy)


class TestPlan:
    """A load that is done waits until the scheduler hears of it."""

    def load(self, source: int, **options: float) -> ReloadPlan:
        prompt = Prompt(8193, 0, BLOCK_SIZE, BLOCK_NBYTES, **options)
        sources, valid = np.full(512, source, np.uint8), np.zeros(513, bool)
        valid[512] = True
        links = one_disk(bare_link(12e9))
        return plan_reload(sources, valid, prompt, links, h100(), PlanPolicy(CostMode.ALWAYS))

    @pytest.mark.parametrize("source", [DRAM_ONLY, DISK])
    def test_it_adds_to_a_load_between_steps_and_not_to_computing(self, source):
        at_once, later = self.load(source), self.load(source, notice_seconds=0.007)
        assert later.load_seconds == pytest.approx(at_once.load_seconds + 0.007)
        assert later.chosen_seconds == pytest.approx(at_once.chosen_seconds + 0.007)
        assert later.recompute_seconds == at_once.recompute_seconds

    def test_a_step_that_waits_for_its_load_is_told_at_once(self):
        at_once = self.load(DRAM_ONLY)
        short = self.load(DRAM_ONLY, notice_seconds=0.007, in_step_seconds=1.0)
        long = self.load(DRAM_ONLY, notice_seconds=0.007, in_step_seconds=0.001)
        assert short.load_seconds == at_once.load_seconds
        assert long.load_seconds == pytest.approx(at_once.load_seconds + 0.007)

    def test_what_comes_from_a_disk_is_never_part_of_a_step(self):
        disk = self.load(DISK, notice_seconds=0.007, in_step_seconds=10.0)
        assert disk.load_seconds == pytest.approx(self.load(DISK).load_seconds + 0.007)

    def test_a_short_prompt_is_computed_where_noticing_takes_longer(self):
        links = one_disk(bare_link(12e9))
        prompt = Prompt(1025, 0, BLOCK_SIZE, BLOCK_NBYTES)
        sources, valid = np.ones(64, np.uint8), np.ones(65, bool)

        def num_blocks(notice_seconds: float) -> int:
            waiting = replace(prompt, notice_seconds=notice_seconds)
            return plan_reload(sources, valid, waiting, links, h100(), PlanPolicy()).num_blocks

        assert num_blocks(0.0) == 64
        assert num_blocks(0.02) == 0
