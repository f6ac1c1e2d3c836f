"""Promises of `kvtiers.cost.preempt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.links import LinkModel, Links, StoreKind, offload_link, read_link, reload_link
from kvtiers.cost.preempt import (
    PreemptMode,
    PreemptReason,
    Surroundings,
    Victim,
    plan_preempt,
)
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel, PrefillSpeed

from .machine import BLOCK_NBYTES, BLOCK_SIZE, bare_link, h100

ALONE = Surroundings()
ALL = PreemptMode.SWAP  # of which all blocks are copied


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
    num_tokens: int,
    stored: Sequence[int] = (),
    num_sequences: int = 1,
    around: Surroundings = ALONE,
) -> Victim:
    return Victim(num_tokens, BLOCK_SIZE, BLOCK_NBYTES, stored, num_sequences, around)


def test_both_directions_count():
    """32k tokens, 4.3 GB: 0.09 s either way at 50 GB/s; one slow way is enough to compute."""
    assert plan_preempt(victim(32_768), links(), h100()).swap
    assert not plan_preempt(victim(32_768), links(down=1e9), h100()).swap
    assert not plan_preempt(victim(32_768), links(up=1e9), h100()).swap


def test_alone_a_swap_costs_down_and_back_and_the_tokens_behind_the_last_block():
    tokens, nbytes = 2048 * BLOCK_SIZE + 7, 2048 * BLOCK_NBYTES
    found = plan_preempt(victim(tokens), links(down=40e9, up=20e9), h100(), notice_seconds=0.5)
    rest = float(h100().seconds(7, 2048 * BLOCK_SIZE))
    assert found.swap_cost_seconds == pytest.approx(nbytes / 40e9 + nbytes / 20e9 + rest + 0.5)
    assert found.recompute_cost_seconds == pytest.approx(float(h100().seconds(tokens)))
    assert found.reason is PreemptReason.SWAP_FASTER


def test_others_wait_for_what_is_computed_and_copied_down_but_not_for_what_is_loaded():
    stored = victim(32_768, [0] * 2048)
    slow = links(up=1e9)
    one, some, many = (
        plan_preempt(replace(stored, around=Surroundings(num)), slow, h100()) for num in (0, 20, 30)
    )
    assert one.swap_cost_seconds == one.recompute_cost_seconds  # for it would be computed
    assert some.swap_cost_seconds < some.recompute_cost_seconds
    last = 10 * h100().added_seconds(1, 32_767)
    assert many.swap_cost_seconds == pytest.approx(some.swap_cost_seconds + last)
    more = many.recompute_cost_seconds - one.recompute_cost_seconds
    assert more == pytest.approx(30 * h100().added_seconds(32_768))
    copied = replace(stored, stored_sources=(), around=Surroundings(30))
    down = 2048 * BLOCK_NBYTES / 50e9
    found = plan_preempt(copied, slow, h100(), ALL)
    assert found.swap_cost_seconds == pytest.approx(many.swap_cost_seconds + 31 * down)


def stall_of(num_blocks: int, num_running: int, down: Links, step: float) -> float:
    """What a copy of so many blocks delays each, whatever the way back."""
    around, num_tokens = Surroundings(num_running), num_blocks * BLOCK_SIZE
    copied, stored = (
        plan_preempt(victim(num_tokens, below, 1, around), down, h100(), ALL, step_seconds=step)
        for below in ((), [0] * num_blocks)
    )
    return (copied.swap_cost_seconds - stored.swap_cost_seconds) / (1 + num_running)


def test_a_copy_that_a_step_covers_delays_nobody_if_a_single_request_goes_on():
    """The last block, which is not copied, is the first that is wanted."""
    nbytes = 256 * BLOCK_NBYTES
    assert stall_of(256, 1, links(), nbytes / 50e9) == pytest.approx(0)
    assert stall_of(256, 1, links(), 0.5 * nbytes / 50e9) > 0


def test_of_many_another_wants_a_block_at_once():
    """Of 30 others one wants a second block in 84 % of the steps in which one wants a first."""
    latency = 0.01
    down = Links(
        [], {offload_link(): LinkModel(latency, 0.0, 1e15), reload_link(): bare_link(1e15)}
    )
    another = 1 - (1 - 1 / BLOCK_SIZE) ** 29
    assert another == pytest.approx(0.846, abs=0.001)
    assert stall_of(256, 30, down, 1.0) == pytest.approx(another * latency, rel=1e-3)


def test_steps_wait_for_the_blocks_that_they_write_into_and_not_for_the_rest():
    """32 decodes write into two blocks a step; of a copy of 50 steps, each waits for two blocks."""
    num_written = 2.0
    share = 1 - (1 - 1 / BLOCK_SIZE) ** 32
    wait = num_written / share * BLOCK_NBYTES / 50e9
    another = 1 - (1 - 1 / BLOCK_SIZE) ** 31
    step = (512 * BLOCK_NBYTES / 50e9 - another * wait - 50 * share * wait) / 51
    found = stall_of(512, 32, links(), step)
    assert found == pytest.approx(another * wait + 50 * share * wait, rel=1e-6)


def test_few_decodes_write_into_a_block_in_one_step_of_a_few():
    """Eight take a block of 16 tokens in 40 % of steps; only those wait for a link's latency."""
    slow = LinkModel(0.01, 0.0, 1e9)
    down = Links([], {offload_link(): slow, reload_link(): bare_link(50e9)})
    share, another = (1 - (1 - 1 / BLOCK_SIZE) ** num for num in (8, 7))
    copied = 0.01 + 512 * BLOCK_NBYTES / 1e9
    each = share * 0.01 + max(share, 8 / BLOCK_SIZE) * BLOCK_NBYTES / 1e9
    first = another * each / share
    whole = first + (copied - first - 0.01) * each / (each + 0.01)
    assert stall_of(512, 8, down, 0.01) == pytest.approx(whole, rel=0.01)
    assert share == pytest.approx(0.40, abs=0.01)


def later_of(num_running: int, num_waiting: int, admitted_share: float, step: float) -> float:
    """By how much each is delayed at the end of a victim of 256 blocks, if it is not swapped."""
    num_others = num_running + num_waiting
    around = Surroundings(num_running, num_waiting, 0, (0,), admitted_share)
    copied, stored = (
        plan_preempt(victim(4096, below, 1, around), links(), h100(), step_seconds=step)
        for below in ((), [0] * 256)
    )
    return (copied.recompute_cost_seconds - stored.recompute_cost_seconds) / (1 + num_others)


def test_computing_again_costs_a_copy_at_the_end_which_who_is_admitted_then_waits_for():
    """What is swapped is not copied down once more when its request ends."""
    down = 256 * BLOCK_NBYTES / 50e9
    assert later_of(16, 16, 1.0, 0.0) == pytest.approx(down)
    assert later_of(16, 100, 1.0, 0.0) == pytest.approx(down)
    assert later_of(16, 4, 1.0, 0.0) == pytest.approx(down / 4)  # it ends when nobody waits
    assert later_of(16, 0, 1.0, 0.0) == pytest.approx(0)


def test_what_nobody_is_admitted_to_is_waited_for_as_others_grow():
    """16 decodes write into a block a step: a step of as long as that takes waits for half."""
    down, step = 256 * BLOCK_NBYTES / 50e9, BLOCK_NBYTES / 50e9
    assert later_of(16, 16, 0.0, step) == pytest.approx(down / 2)
    assert later_of(16, 16, 0.5, step) == pytest.approx(down * 3 / 4)
    assert later_of(16, 16, 0.0, 1e9) == pytest.approx(0)


def test_what_lies_below_is_only_loaded_where_that_is_better_when_it_returns():
    """If HBM may keep all or nothing, a swapped victim is computed in one case and loaded in the
    other; one that is computed again has no choice."""
    stored, wait = victim(32_768, [0] * 2048), 1.0
    kept, lost, either = (
        plan_preempt(
            replace(stored, around=Surroundings(20, kept_tokens=guesses)),
            links(),
            h100(),
            notice_seconds=wait,
        )
        for guesses in ((32_760,), (0,), (0, 32_760))
    )
    assert kept.swap_cost_seconds == kept.recompute_cost_seconds
    assert wait < lost.swap_cost_seconds < 0.1 * lost.recompute_cost_seconds
    mean = (kept.recompute_cost_seconds + lost.recompute_cost_seconds) / 2
    assert either.recompute_cost_seconds == pytest.approx(mean)
    mean = (kept.swap_cost_seconds + lost.swap_cost_seconds) / 2
    assert either.swap_cost_seconds == pytest.approx(mean)


def test_what_hbm_keeps_is_neither_computed_nor_loaded():
    """A long victim that lost a little is computed, however fast its copy would be."""
    lost, kept = (
        plan_preempt(victim(32_768, (), 1, Surroundings(20, 0, 20, (num,))), links(), h100())
        for num in (0, 32_768 - 64)
    )
    assert (lost.swap, kept.swap) == (True, False)
    context = 32_768 - 64
    again = float(h100().seconds(64, context)) + 20 * h100().added_seconds(64, context, 20)
    assert kept.recompute_cost_seconds == pytest.approx(again)
    around = Surroundings(20, 0, 20)
    lost, kept = (
        plan_preempt(
            victim(32_768, (), 1, replace(around, kept_tokens=(num,))), links(), h100(), ALL
        )
        for num in (0, 32_768 - 64)
    )
    saved = (2048 - 4) * BLOCK_NBYTES / 50e9
    assert lost.swap_cost_seconds - kept.swap_cost_seconds == pytest.approx(saved)


def test_its_last_token_is_computed_whatever_hbm_keeps():
    found = plan_preempt(victim(4096, (), 1, Surroundings(kept_tokens=(10**9,))), links(), h100())
    context = 4096 - BLOCK_SIZE
    assert found.recompute_cost_seconds == pytest.approx(float(h100().seconds(16, context)))


def test_computing_that_fits_beside_reading_the_weights_delays_nobody():
    prefill = PrefillModel.of(PrefillSpeed(0.0, 8e14, flops_per_byte=240.0), FALLBACK_SHAPE, 8192)
    short, shared, long = (
        plan_preempt(victim(num, (), 1, Surroundings(30, 0, others)), links(), prefill)
        for num, others in ((128, 30), (128, 400), (1024, 30))
    )
    alone = float(prefill.seconds(128))
    assert short.recompute_cost_seconds == pytest.approx(alone, rel=0.05)  # attention
    every_token = 30 * float(prefill.marginal_seconds(128))
    assert shared.recompute_cost_seconds == pytest.approx(alone + every_token)
    assert long.recompute_cost_seconds > 10 * float(prefill.seconds(1024))


def test_what_is_in_a_store_comes_back_from_there():
    found = plan_preempt(victim(32_768, [1] * 2048, 1, Surroundings(30)), links(), h100())
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
    around=st.builds(
        Surroundings,
        st.integers(0, 300),
        st.integers(0, 300),
        st.integers(0, 9000),
        st.lists(st.integers(0, 200_000), min_size=1, max_size=16).map(tuple),
        st.floats(0, 1),
    ),
    joined=st.integers(0, 9000),
)
def test_the_cheaper_way_is_chosen(num_tokens, share, down, up, around, joined):
    num_full = num_tokens // BLOCK_SIZE
    stored, way = int(share * num_full), links(down, up)
    around = replace(around, joined_tokens=(joined,) * len(around.kept_tokens))
    mine = victim(num_tokens, [0] * stored, 1, around)
    found = plan_preempt(mine, way, h100())
    cheaper = found.swap_cost_seconds <= found.recompute_cost_seconds
    assert found.swap == (cheaper and num_full > 0)
    assert min(found.swap_cost_seconds, found.recompute_cost_seconds) > 0
    assert stored <= found.num_blocks <= num_full
    whole = plan_preempt(mine, way, h100(), ALL)
    assert whole.num_blocks == num_full
    assert found.swap_cost_seconds <= whole.swap_cost_seconds
    assert found.recompute_cost_seconds == whole.recompute_cost_seconds
    bare = plan_preempt(victim(num_tokens, (), 1, around), way, h100(), ALL)
    assert whole.swap_cost_seconds <= bare.swap_cost_seconds


def weighing(step_seconds: float = 1e-4) -> PrefillModel:
    """An engine beside whose weights 240 tokens cost nothing."""
    speed = PrefillSpeed(step_seconds, 8e14, flops_per_byte=240.0)
    return PrefillModel.of(speed, FALLBACK_SHAPE, 8192)


def far(latency: float) -> Links:
    down = LinkModel(latency, 0.0, 50e9)
    return Links([], {offload_link(): down, reload_link(): bare_link(50e9)})


def test_the_last_blocks_are_left_behind_where_others_would_wait_for_their_copy():
    """32 others take two blocks a step: eight last blocks are four steps, in which a copy over a
    link that is far away ends; and what is behind them is computed beside the weights."""
    mine, step = victim(1024, (), 1, Surroundings(32, 0, 32)), 0.01
    near, away = (
        plan_preempt(mine, far(latency), weighing(), step_seconds=step) for latency in (0.0, 0.03)
    )
    assert near.swap
    assert away.swap
    assert near.num_blocks > 60
    assert 48 <= away.num_blocks <= 58
    whole = plan_preempt(mine, far(0.03), weighing(), ALL, step_seconds=step)
    assert whole.num_blocks == 64
    assert whole.swap_cost_seconds > 0.8 * 33 * 0.03
    assert away.swap_cost_seconds < 0.01


@pytest.mark.parametrize("latency", [0.0, 2e-4, 4e-4, 6e-4, 1e-3, 3e-3])
def test_what_gains_each_less_than_a_fiftieth_of_a_step_is_copied_as_a_whole(latency):
    mine, step = victim(1024, (), 1, Surroundings(32, 0, 32)), 0.01
    whole = plan_preempt(mine, far(latency), weighing(), ALL, step_seconds=step)
    free = plan_preempt(mine, far(latency), weighing(), step_seconds=0.0)
    found = plan_preempt(mine, far(latency), weighing(), step_seconds=step)
    assert found.swap
    saved = whole.swap_cost_seconds - found.swap_cost_seconds
    assert (found.num_blocks < 64) == (saved > 33 * 0.02 * step)
    assert found.num_blocks == 64 or saved > 0
    assert free.num_blocks < 64


def test_nothing_is_left_behind_where_no_room_is_left_beside_the_weights():
    """Steps in which others return compute their tokens; these would be computed as well."""
    around = Surroundings(32, 0, 32, (0,), joined_tokens=(400,))
    room, none = (
        plan_preempt(victim(8192, (), 1, it), far(3e-4), weighing(), step_seconds=0.01)
        for it in (replace(around, joined_tokens=(0,)), around)
    )
    assert none.num_blocks > room.num_blocks


def test_who_returns_with_others_shares_the_room_beside_the_weights_with_them():
    around = Surroundings(32, 0, 32, (0, 0), joined_tokens=(0, 100))
    alone, joined, either = (
        plan_preempt(
            victim(160, (), 1, replace(around, joined_tokens=tokens)), links(), weighing()
        ).recompute_cost_seconds
        for tokens in ((0, 0), (100, 100), (0, 100))
    )
    own, every_token = (float(weighing().seconds(160)), 32 * weighing().marginal_seconds(160))
    assert alone < own + 0.1 * every_token  # attention
    assert own + 0.3 * every_token < joined < own + 0.5 * every_token
    assert either == pytest.approx((alone + joined) / 2)


def test_of_equals_a_swap_keeps_the_choice():
    """HBM is taken to keep all: nothing will be loaded, whatever lies below."""
    around = Surroundings(8, 0, 8, (10_000,))
    found = plan_preempt(victim(1030, [0] * 64, 1, around), links(), weighing())
    assert found.swap_cost_seconds == found.recompute_cost_seconds
    assert found.swap
    assert not plan_preempt(victim(BLOCK_SIZE - 1, (), 1, around), links(), weighing()).swap


@pytest.mark.parametrize(("up", "reloads"), [(50e9, True), (5e8, True), (5e7, False)])
def test_who_returns_leaves_what_lies_below_only_if_computing_is_far_cheaper(up, reloads):
    """128 tokens, 16.8 MB, are computed beside the weights; loading them takes up to 0.34 s."""
    around = Surroundings(8, 0, 8, returning=True)
    found = plan_preempt(victim(130, [0] * 8, 1, around), links(up=up), weighing())
    load = 8 * BLOCK_NBYTES / up
    assert found.swap_cost_seconds == pytest.approx(
        load + float(weighing().seconds(2, 128)) + 8 * weighing().added_seconds(2, 128, 8)
    )
    assert found.swap == reloads
    assert (found.recompute_cost_seconds < load) == (up < 50e9)


def test_who_returns_copies_nothing():
    """What it had left behind when it gave way is computed."""
    found = plan_preempt(
        victim(1024, [0] * 60, 1, Surroundings(8, 0, 8, returning=True)), far(10.0), weighing()
    )
    assert found.num_blocks == 60
    assert found.swap_cost_seconds < 1


@pytest.mark.parametrize(("num_tokens", "stored"), [(100, 7), (0, 0)])
def test_senseless_victims_are_refused(num_tokens, stored):
    with pytest.raises(ValueError, match=r"stored|nothing to lose"):
        plan_preempt(victim(num_tokens, [0] * stored), Links.seeded({"d": StoreKind.NVME}), h100())
