"""Promises of `kvtiers.cost.preempt`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.links import LinkModel, Links, StoreKind, offload_link, read_link, reload_link
from kvtiers.cost.preempt import PreemptMode, PreemptReason, Victim, plan_preempt

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


def victim(num_tokens: int, stored: tuple[int, ...] = (), num_sequences: int = 1) -> Victim:
    return Victim(num_tokens, BLOCK_SIZE, BLOCK_NBYTES, stored, num_sequences)


def test_both_directions_count():
    """32k tokens, 4.3 GB: 0.09 s either way at 50 GB/s; one slow way is enough to compute."""
    assert plan_preempt(victim(32_768), links(), h100()).swap
    assert not plan_preempt(victim(32_768), links(down=1e9), h100()).swap
    assert not plan_preempt(victim(32_768), links(up=1e9), h100()).swap


def test_seconds_are_down_and_back_and_the_tokens_behind_the_last_block():
    tokens, nbytes = 2048 * BLOCK_SIZE + 7, 2048 * BLOCK_NBYTES
    found = plan_preempt(victim(tokens), links(down=40e9, up=20e9), h100())
    rest = float(h100().seconds(7, 2048 * BLOCK_SIZE))
    assert found.swap_seconds == pytest.approx(nbytes / 40e9 + nbytes / 20e9 + rest)
    assert found.recompute_seconds == pytest.approx(float(h100().seconds(tokens)))
    assert found.reason is PreemptReason.SWAP_FASTER


def test_what_is_stored_already_is_not_copied_down():
    slow_down = links(down=1e9)
    assert not plan_preempt(victim(32_768), slow_down, h100()).swap
    assert plan_preempt(victim(32_768, (2048,)), slow_down, h100()).swap
    in_store = plan_preempt(victim(32_768, (0, 2048)), slow_down, h100())
    assert in_store.swap_seconds > 2048 * BLOCK_NBYTES / 2e9


def test_short_sequences_are_computed_and_long_ones_swapped():
    seeded = Links(
        [],
        {offload_link(): LinkModel(5e-5, 1e-4, 50e9), reload_link(): LinkModel(5e-5, 1e-4, 50e9)},
    )
    found = [plan_preempt(victim(n), seeded, h100(step_seconds=0.0)).swap for n in (16, 131_072)]
    assert found == [False, True]


def test_a_queue_on_the_way_down_counts_and_on_the_way_back_does_not():
    busy = links()
    before = plan_preempt(victim(32_768), busy, h100()).swap_seconds
    busy.submitted(reload_link(), 10**12)
    assert plan_preempt(victim(32_768), busy, h100()).swap_seconds == before
    busy.submitted(offload_link(), 10**12)
    assert plan_preempt(victim(32_768), busy, h100()).swap_seconds == pytest.approx(before + 20.0)
    assert busy.queued_nbytes(reload_link()) == 10**12


@pytest.mark.parametrize("mode", PreemptMode)
def test_several_sequences_are_always_swapped(mode):
    found = plan_preempt(victim(32_768, num_sequences=4), links(down=1e6), h100(), mode)
    assert (found.swap, found.reason) == (True, PreemptReason.SEVERAL_SEQUENCES)


def test_the_user_may_force_either():
    slow, fast = links(down=1e6), links()
    forced = plan_preempt(victim(32_768), slow, h100(), PreemptMode.SWAP)
    assert (forced.swap, forced.reason) == (True, PreemptReason.MODE)
    forced = plan_preempt(victim(32_768), fast, h100(), PreemptMode.RECOMPUTE)
    assert (forced.swap, forced.reason) == (False, PreemptReason.MODE)


@given(
    num_tokens=st.integers(1, 100_000),
    share=st.floats(0, 1),
    down=st.floats(1e6, 1e12),
    up=st.floats(1e6, 1e12),
)
def test_the_cheaper_way_is_chosen(num_tokens, share, down, up):
    stored = int(share * (num_tokens // BLOCK_SIZE))
    found = plan_preempt(victim(num_tokens, (stored,)), links(down, up), h100())
    assert found.swap == (found.swap_seconds < found.recompute_seconds)
    assert min(found.swap_seconds, found.recompute_seconds) > 0
    less = plan_preempt(victim(num_tokens, (0,)), links(down, up), h100())
    assert found.swap_seconds <= less.swap_seconds


@pytest.mark.parametrize(("num_tokens", "stored"), [(100, (7,)), (100, (-1,)), (0, ())])
def test_senseless_victims_are_refused(num_tokens, stored):
    with pytest.raises(ValueError, match=r"stored|nothing to lose"):
        plan_preempt(victim(num_tokens, stored), Links.seeded({"d": StoreKind.NVME}), h100())


def test_the_way_back_costs_only_what_the_wait_does_not_cover():
    stored = victim(4096, (4096 // BLOCK_SIZE,))
    now = plan_preempt(stored, links(), h100())
    half = 0.5 * 4096 // BLOCK_SIZE * BLOCK_NBYTES / 50e9
    later = plan_preempt(replace(stored, away_seconds=half), links(), h100())
    much_later = plan_preempt(replace(stored, away_seconds=100.0), links(), h100())
    assert now.swap_seconds - later.swap_seconds == pytest.approx(half)
    assert now.swap_seconds - much_later.swap_seconds == pytest.approx(2 * half)
    assert much_later.recompute_seconds == now.recompute_seconds
