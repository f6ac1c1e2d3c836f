"""Promises of `kvtiers.cost.planner` that hold for every machine and request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.links import LinkModel, Links, read_link, reload_link
from kvtiers.cost.loads import Loads
from kvtiers.cost.planner import (
    Objective,
    PlanPolicy,
    Prompt,
    plan_reload,
)
from kvtiers.cost.prefill import PrefillModel
from kvtiers.model.cost_mode import CostMode

from .machine import (
    h100,
)


@st.composite
def situations(draw):
    """Return sources, valid, prompt, links and prefill of a random machine and request."""
    num_blocks = draw(st.integers(0, 60))
    sources = np.array(draw(st.lists(st.integers(0, 2), min_size=num_blocks, max_size=num_blocks)))
    valid = np.array(
        draw(st.lists(st.booleans(), min_size=num_blocks + 1, max_size=num_blocks + 1))
    )
    local = draw(st.integers(0, 20))
    block_size = draw(st.sampled_from([1, 16, 256]))
    tail = draw(st.integers(0, 1000))
    num_tokens = max(1, (local + num_blocks) * block_size + tail)
    seconds = st.floats(0, 1e-2)
    rates = st.floats(1e6, 1e12)
    names = (reload_link(), read_link("a"), read_link("b"))
    links = Links(
        ["a", "b"], {n: LinkModel(draw(seconds), draw(seconds), draw(rates)) for n in names}
    )
    for name in names:
        links.submitted(name, draw(st.integers(0, 10**9)))
    prefill = h100(step_seconds=draw(seconds))
    prefill = PrefillModel(
        draw(seconds), draw(st.floats(1e10, 1e15)), prefill.shape, draw(st.integers(1, 10_000))
    )
    prompt = Prompt(
        num_tokens,
        local,
        block_size,
        draw(st.integers(1, 10**8)),
        notice_seconds=draw(st.floats(0, 0.1)),
        in_step_seconds=draw(st.sampled_from([0.0, 0.01, 1.0])),
    )
    return sources.astype(np.uint8), valid, prompt, links, prefill


def ttft_of(situation, num_blocks: int) -> float:
    """Return the predicted TTFT of one choice, written down without vectors."""
    sources, _, prompt, links, prefill = situation
    cached = (prompt.num_local_blocks + num_blocks) * prompt.block_size
    context = min(cached, prompt.num_tokens - 1)
    rest = float(prefill.seconds(prompt.num_tokens - context, context))
    chosen = sources[:num_blocks].tolist()
    from_stores = 0.0
    for idx, store in enumerate(links.stores):
        link, count = read_link(store), chosen.count(idx + 1)
        nbytes = count * prompt.block_nbytes
        from_stores += float(links[link].seconds(count, nbytes, links.queued_nbytes(link)))
    hbm = links[reload_link()]
    nbytes = num_blocks * prompt.block_nbytes
    to_hbm = float(hbm.seconds(num_blocks, nbytes, links.queued_nbytes(reload_link())))
    if from_stores > 0:
        from_stores += float(hbm.seconds(1, prompt.block_nbytes))
    load = max(to_hbm, from_stores)
    in_step = not any(chosen) and load < prompt.in_step_seconds
    return load + (0.0 if in_step or not chosen else prompt.notice_seconds) + rest


@given(situation=situations(), margin=st.floats(0, 1))
def test_plan_is_never_worse_than_either_pure_choice(situation, margin):
    found = plan_reload(*situation, PlanPolicy(CostMode.AUTO, margin))
    assert found.chosen_seconds <= found.recompute_seconds
    assert found.chosen_seconds * (1 - margin) <= found.reload_seconds
    exact = plan_reload(*situation, PlanPolicy(CostMode.AUTO, 0.0))
    assert exact.chosen_seconds <= min(exact.recompute_seconds, exact.reload_seconds)


@given(situation=situations())
def test_plan_is_the_best_of_all_cut_points(situation):
    sources, valid, *_ = situation
    cuts = [0] + [m for m in range(1, len(sources) + 1) if valid[m]]
    times = [ttft_of(situation, m) for m in cuts]
    found = plan_reload(*situation, PlanPolicy(CostMode.AUTO, 0.0))
    assert found.num_blocks in cuts
    assert found.chosen_seconds == pytest.approx(min(times), rel=1e-9)
    assert found.recompute_seconds == pytest.approx(times[0], rel=1e-9)
    assert found.reload_seconds == pytest.approx(times[-1], rel=1e-9)


@given(situation=situations(), mode=st.sampled_from(CostMode), margin=st.floats(0, 1))
def test_every_plan_is_a_valid_cut_with_finite_times(situation, mode, margin):
    _, valid, *_ = situation
    found = plan_reload(*situation, PlanPolicy(mode, margin))
    for blocks in (found.num_blocks, found.auto_num_blocks):
        assert blocks == 0 or valid[blocks]
    times = (found.reload_seconds, found.recompute_seconds, found.chosen_seconds)
    assert all(0 < t < float("inf") for t in (*times, found.auto_seconds))


@given(situation=situations(), objective=st.sampled_from(Objective), stages=st.integers(1, 80))
def test_no_objective_or_overlap_is_worse_than_computing_or_loading_all(
    situation, objective, stages
):
    policy = PlanPolicy(CostMode.AUTO, 0.0, objective, num_load_stages=stages)
    found = plan_reload(*situation, policy)
    assert found.num_blocks == 0 or situation[1][found.num_blocks]
    assert 0 < found.compute_seconds <= found.chosen_seconds * (1 + 1e-12)
    if objective is Objective.TTFT:
        assert found.chosen_seconds <= min(found.recompute_seconds, found.reload_seconds)
    if objective is Objective.THROUGHPUT:
        none = plan_reload(*situation, PlanPolicy(CostMode.NEVER))
        assert found.compute_seconds <= none.compute_seconds * (1 + 1e-12)


@given(situation=situations(), stages=st.integers(1, 80))
def test_overlap_never_takes_longer_than_load_then_compute(situation, stages):
    serial, overlapped = (
        plan_reload(*situation, PlanPolicy(CostMode.ALWAYS, 0.0, num_load_stages=n))
        for n in (1, stages)
    )
    assert overlapped.chosen_seconds <= serial.chosen_seconds * (1 + 1e-12)
    noticed = serial.chosen_seconds - situation[2].notice_seconds  # nobody waits for that in a step
    assert overlapped.chosen_seconds >= 0.5 * noticed * (1 - 1e-12)
    assert overlapped.recompute_seconds == pytest.approx(serial.recompute_seconds, rel=1e-12)


@given(situation=situations(), stages=st.integers(2, 80), num_running=st.integers(0, 20))
def test_a_load_runs_within_a_step_if_it_saves_more_than_it_holds_up(
    situation, stages, num_running
):
    sources, valid, prompt, links, prefill = situation
    prompt = replace(prompt, num_running=num_running)
    policy = PlanPolicy(CostMode.ALWAYS, 0.0, num_load_stages=stages)
    found = plan_reload(sources, valid, prompt, links, prefill, policy)
    apart = plan_reload(sources, valid, replace(prompt, overlaps=False), links, prefill, policy)
    assert not apart.in_step
    assert found.num_blocks == apart.num_blocks
    forced = plan_reload(sources, valid, replace(prompt, num_running=0), links, prefill, policy)
    if found.in_step:  # more of them in the step never make it right
        assert forced.in_step
        assert found.chosen_seconds < apart.chosen_seconds
        saved = apart.chosen_seconds - found.chosen_seconds
        assert saved * (1 + 1e-9) >= max(0.5, num_running) * found.load_seconds / stages
    else:
        assert found.chosen_seconds == apart.chosen_seconds


@given(situation=situations(), stages=st.integers(2, 80))
def test_no_step_waits_where_throughput_counts(situation, stages):
    policy = PlanPolicy(CostMode.ALWAYS, 0.0, Objective.THROUGHPUT, num_load_stages=stages)
    assert not plan_reload(*situation, policy).in_step


@given(situation=situations(), factor=st.floats(1.0, 100.0))
def test_a_faster_link_never_makes_a_plan_slower(situation, factor):
    sources, valid, prompt, links, prefill = situation
    faster = Links(
        links.stores,
        {
            name: LinkModel(
                model.latency_seconds,
                model.seconds_per_piece,
                factor * model.bandwidth_bytes_per_second,
            )
            for name, model in links.items()
        },
    )
    for name in links:
        faster.submitted(name, links.queued_nbytes(name))
    policy = PlanPolicy(CostMode.AUTO, 0.0)
    slow = plan_reload(sources, valid, prompt, links, prefill, policy)
    fast = plan_reload(sources, valid, prompt, faster, prefill, policy)
    assert fast.chosen_seconds <= slow.chosen_seconds * (1 + 1e-12)
    assert fast.recompute_seconds == slow.recompute_seconds


@given(situation=situations(), more=st.integers(1, 10_000))
def test_a_longer_prompt_never_takes_less(situation, more):
    sources, valid, prompt, links, prefill = situation
    longer = replace(prompt, num_tokens=prompt.num_tokens + more)
    policy = PlanPolicy(CostMode.AUTO, 0.0)
    short = plan_reload(sources, valid, prompt, links, prefill, policy)
    long = plan_reload(sources, valid, longer, links, prefill, policy)
    assert long.chosen_seconds >= short.chosen_seconds * (1 - 1e-12)


@given(situation=situations())
def test_longer_loads_never_take_less(situation):
    sources, _, prompt, links, _ = situation
    seconds = Loads.of_prefixes(sources, prompt.block_nbytes, links).seconds(links)
    assert seconds[0] == 0
    assert np.all(np.diff(seconds) >= -1e-12 * seconds[1:])


@given(situation=situations())
def test_questions_change_nothing(situation):
    policy = PlanPolicy(CostMode.AUTO, 0.0)
    sources, valid = situation[0].copy(), situation[1].copy()
    assert plan_reload(*situation, policy) == plan_reload(*situation, policy)
    assert np.array_equal(situation[0], sources)
    assert np.array_equal(situation[1], valid)
