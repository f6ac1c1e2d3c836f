"""Promises of `kvtiers.cost.preempt`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.links import LinkModel, Links, StoreKind, offload_link, read_link, reload_link
from kvtiers.cost.preempt import PreemptMode, PreemptReason, Victim, plan_preempt
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel, PrefillSpeed

from .machine import BLOCK_NBYTES, BLOCK_SIZE, bare_link, h100


def links(down: float = 50e9, up: float = 50e9, disk: float = 2e9) -> Links:
    return Links(
        ["disk"],
        {
            offload_link(): bare_link(down),
            reload_link(): bare_link(up),
            read_link("disk"): bare_link(disk),
        },
    )


def victim(
    num_tokens: int, stored: tuple[int, ...] = (), num_sequences: int = 1, num_running: int = 0
) -> Victim:
    return Victim(num_tokens, BLOCK_SIZE, BLOCK_NBYTES, stored, num_sequences, num_running)


def test_the_way_back_decides_and_the_bytes_down_do_not():
    """32k tokens, 4.3 GB: 0.09 s at 50 GB/s. Down they are copied in any case."""
    assert plan_preempt(victim(32_768), links(), h100()).swap
    assert plan_preempt(victim(32_768), links(down=1e9), h100()).swap
    assert not plan_preempt(victim(32_768), links(up=1e9), h100()).swap


def test_alone_a_swap_costs_the_way_back_and_the_tokens_behind_the_last_block():
    tokens, nbytes = 2048 * BLOCK_SIZE + 7, 2048 * BLOCK_NBYTES
    found = plan_preempt(victim(tokens), links(down=40e9, up=20e9), h100(), notice_seconds=0.5)
    rest = float(h100().seconds(7, 2048 * BLOCK_SIZE))
    assert found.swap_cost_seconds == pytest.approx(nbytes / 20e9 + rest + 0.5)
    assert found.recompute_cost_seconds == pytest.approx(float(h100().seconds(tokens)))
    assert found.reason is PreemptReason.SWAP_FASTER


def test_what_runs_waits_for_what_is_computed_and_not_for_what_is_loaded():
    alone, slow = victim(32_768), links(up=1e9)
    busy = replace(alone, num_running=30)
    one, many = (plan_preempt(it, slow, h100()) for it in (alone, busy))
    assert (one.swap, many.swap) == (False, True)
    assert many.swap_cost_seconds == one.swap_cost_seconds
    more = many.recompute_cost_seconds - one.recompute_cost_seconds
    usual = float(h100().seconds(1)) * 32_768 / h100().max_tokens_per_step
    assert more == pytest.approx(30 * (one.recompute_cost_seconds - usual))


def test_computing_that_fits_beside_reading_the_weights_delays_nobody():
    prefill = PrefillModel.of(PrefillSpeed(0.0, 8e14, flops_per_byte=240.0), FALLBACK_SHAPE, 8192)
    short, long = (
        plan_preempt(victim(num, num_running=30), links(), prefill) for num in (16, 1024)
    )
    assert short.recompute_cost_seconds == pytest.approx(float(prefill.seconds(16)), rel=0.01)
    assert long.recompute_cost_seconds > 10 * float(prefill.seconds(1024))


def test_all_wait_for_the_latency_of_the_way_down_unless_all_is_stored():
    models = dict(links())
    models[offload_link()] = LinkModel(10e-3, 0.0, 50e9)
    far = Links(["disk"], models)
    copied, stored = (
        plan_preempt(victim(4096, blocks, num_running=9), far, h100())
        for blocks in ((), (4096 // BLOCK_SIZE,))
    )
    assert copied.swap_cost_seconds - stored.swap_cost_seconds == pytest.approx(10 * 10e-3)


def test_what_is_in_a_store_comes_back_from_there():
    found = plan_preempt(victim(32_768, (0, 2048)), links(), h100())
    assert found.swap_cost_seconds > 2048 * BLOCK_NBYTES / 2e9


def test_short_sequences_are_computed_and_long_ones_swapped():
    seeded = Links(
        [],
        {offload_link(): LinkModel(5e-4, 1e-4, 50e9), reload_link(): LinkModel(5e-4, 1e-4, 50e9)},
    )
    found = [plan_preempt(victim(n), seeded, h100(step_seconds=0.0)).swap for n in (16, 131_072)]
    assert found == [False, True]


def test_a_queue_on_the_way_down_counts_and_on_the_way_back_does_not():
    busy = links()
    before = plan_preempt(victim(32_768), busy, h100()).swap_cost_seconds
    busy.submitted(reload_link(), 10**12)
    assert plan_preempt(victim(32_768), busy, h100()).swap_cost_seconds == before
    busy.submitted(offload_link(), 10**12)
    after = plan_preempt(victim(32_768), busy, h100()).swap_cost_seconds
    assert after == pytest.approx(before + 20.0)
    assert busy.queued_nbytes(reload_link()) == 10**12


@pytest.mark.parametrize("mode", PreemptMode)
def test_several_sequences_are_always_swapped(mode):
    found = plan_preempt(victim(32_768, num_sequences=4), links(down=1e6), h100(), mode)
    assert (found.swap, found.reason) == (True, PreemptReason.SEVERAL_SEQUENCES)


def test_the_user_may_force_either():
    slow, fast = links(up=1e6), links()
    forced = plan_preempt(victim(32_768), slow, h100(), PreemptMode.SWAP)
    assert (forced.swap, forced.reason) == (True, PreemptReason.MODE)
    forced = plan_preempt(victim(32_768), fast, h100(), PreemptMode.RECOMPUTE)
    assert (forced.swap, forced.reason) == (False, PreemptReason.MODE)


@given(
    num_tokens=st.integers(1, 100_000),
    share=st.floats(0, 1),
    down=st.floats(1e6, 1e12),
    up=st.floats(1e6, 1e12),
    running=st.integers(0, 300),
)
def test_the_cheaper_way_is_chosen(num_tokens, share, down, up, running):
    stored = int(share * (num_tokens // BLOCK_SIZE))
    found = plan_preempt(victim(num_tokens, (stored,), 1, running), links(down, up), h100())
    assert found.swap == (found.swap_cost_seconds < found.recompute_cost_seconds)
    assert min(found.swap_cost_seconds, found.recompute_cost_seconds) > 0
    less = plan_preempt(victim(num_tokens, (0,), 1, running), links(down, up), h100())
    assert found.swap_cost_seconds <= less.swap_cost_seconds


@pytest.mark.parametrize(("num_tokens", "stored"), [(100, (7,)), (100, (-1,)), (0, ())])
def test_senseless_victims_are_refused(num_tokens, stored):
    with pytest.raises(ValueError, match=r"stored|nothing to lose"):
        plan_preempt(victim(num_tokens, stored), Links.seeded({"d": StoreKind.NVME}), h100())
