"""Promises of `kvtiers.cost.links`."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.links import (
    LinkModel,
    Links,
    StoreKind,
    offload_link,
    read_link,
    reload_link,
    write_link,
)
from kvtiers.cost.trust import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, Standing
from kvtiers.model.messages import Link

counts = st.integers(0, 1_000_000)
GIB = 1 << 30


@given(blocks=counts, nbytes=counts, queued=counts)
def test_more_work_never_takes_less(blocks, nbytes, queued):
    link = LinkModel(1e-4, 1e-5, 1e9)
    seconds = link.seconds(blocks, nbytes, queued)
    assert seconds >= 0
    assert link.seconds(blocks + 1, nbytes, queued) > seconds
    assert link.seconds(blocks, nbytes + 1, queued) >= seconds
    assert link.seconds(blocks, nbytes, queued + 1) >= seconds


def test_a_queue_of_small_blocks_takes_longer_than_its_bytes():
    """R110: once a job has shown how large the engine's blocks are."""
    link = LinkModel(0.0, 1e-3, 1e9)
    assert link.seconds(1, 0, queued_nbytes=10**6) == pytest.approx(1e-3 + 1e-3)
    link.observe(10, 10 * 1000, float(link.seconds(10, 10 * 1000)))
    assert link.seconds(1, 0, queued_nbytes=10**6) == pytest.approx(1e-3 + 1e-3 + 1.0)


@given(piece=st.integers(1, 10**8), num=st.integers(1, 1000))
def test_larger_pieces_and_more_at_a_time_make_more_of_a_link(piece, num):
    link = LinkModel(1e-4, 1e-5, 1e9)
    bandwidth = link.effective_bandwidth(piece, num)
    assert bandwidth <= link.effective_bandwidth(2 * piece, num) * (1 + 1e-12)
    assert bandwidth <= link.effective_bandwidth(piece, num + 1) * (1 + 1e-12)
    assert bandwidth < 1e9


def test_a_link_without_cost_has_no_bound():
    assert LinkModel(0.0, 0.0, float("inf")).effective_bandwidth(1) == float("inf")


def test_no_blocks_take_no_time():
    assert LinkModel(1.0, 1.0, 1.0).seconds(0, 0, queued_nbytes=10**9) == 0


def test_terms_add_up():
    assert LinkModel(1.0, 0.5, 100.0).seconds(4, 300, 200) == pytest.approx(1 + 2 + 5)


def test_same_bytes_in_small_pieces_take_longer():
    """R110: 16-token pieces against 256-token pieces."""
    link = Links.seeded({})[reload_link()]
    nbytes = 64 << 20
    small, large = link.seconds(nbytes // 4096, nbytes), link.seconds(nbytes // (2 << 20), nbytes)
    assert small > 10 * large


def test_measured_bandwidth_updates_the_estimate():
    """R109: a disk of 0.5 GB/s where 2.4 were believed."""
    link = Links.seeded({"disk": StoreKind.NVME})[read_link("disk")]
    rng = np.random.default_rng(0)
    for _ in range(30):
        blocks = int(rng.integers(8, 2000))
        nbytes = blocks * (2 << 20)
        link.observe(blocks, nbytes, nbytes / 0.5e9 * rng.lognormal(0, 0.1))
    assert link.seconds(512, GIB) == pytest.approx(GIB / 0.5e9, rel=0.1)
    assert link.num_observed == 30


def test_one_stall_hardly_counts():
    link = LinkModel(1e-4, 1e-5, 2e9)
    for _ in range(30):
        link.observe(512, GIB, GIB / 2e9)
    before = link.seconds(512, GIB)
    link.observe(512, GIB, 60.0)
    assert link.seconds(512, GIB) / before < 1.1


def test_a_lasting_change_is_believed_within_seconds():
    """A disk of 2 GB/s that drops to a quarter, read once in 2 s: three jobs say so."""
    link = LinkModel(1e-4, 1e-5, 2e9)
    for _ in range(30):
        link.observe(512, GIB, GIB / 2e9)
    seconds = 0.0
    while float(link.seconds(512, GIB)) < 0.9 * GIB / 0.5e9:
        link.observe(512, GIB, GIB / 0.5e9)
        seconds += GIB / 0.5e9
    assert seconds < 10


def test_a_fit_of_several_sizes_finds_the_terms():
    link, truth = LinkModel(1e-4, 1e-5, 2e9), LinkModel(3e-3, 1e-4, 0.7e9)
    sizes = [(1, 4096), (1, GIB), (64, 1 << 20), (64, GIB), (1024, 1 << 22), (1024, GIB)]
    link.fit([Link("disk>dram", n, nbytes, float(truth.seconds(n, nbytes))) for n, nbytes in sizes])
    for n, nbytes in ((16, 1 << 24), (512, 1 << 30)):
        assert link.seconds(n, nbytes) == pytest.approx(float(truth.seconds(n, nbytes)), rel=0.05)


class TestStalls:
    name = read_link("disk")

    def links(self) -> Links:
        links = Links.seeded({"disk": StoreKind.NVME})
        for _ in range(5):
            links.observe(self.job(2.4e9))
        links.revisit(0.0)
        return links

    def job(self, bandwidth: float) -> Link:
        return Link(self.name, 512, GIB, GIB / bandwidth)

    def test_one_stall_is_enough_and_the_wait_ends_with_a_trial(self):
        links = self.links()
        links.stalled(self.name, 100.0)
        assert links.standing(self.name) is Standing.LOST
        assert links.standing(reload_link()) is Standing.HELD
        links.revisit(100.0 + FIRST_WAIT_SECONDS - 0.1)
        assert links.standing(self.name) is Standing.LOST
        links.revisit(100.0 + FIRST_WAIT_SECONDS)
        assert links.standing(self.name) is Standing.ON_TRIAL

    def test_a_trial_that_ends_well_gives_all_trust_back(self):
        links = self.links()
        links.stalled(self.name, 0.0)
        links.revisit(FIRST_WAIT_SECONDS)
        links.observe(self.job(1.0e9))
        assert links.standing(self.name) is Standing.HELD

    def waits(self, links: Links, num: int, *, stalls: bool) -> list[float]:
        """Return how long a link is avoided again and again, by stalls or by slow trials."""
        now, waits = 0.0, []
        links.stalled(self.name, now)
        for _ in range(num):
            began = now
            while links.standing(self.name) is Standing.LOST:
                now += 1.0
                links.revisit(now)
            waits.append(now - began)
            if stalls:
                links.stalled(self.name, now)
                links.stalled(self.name, now)  # of a job that ran beside it
            else:
                links.observe(self.job(0.024e9))
                links.revisit(now)
        return waits

    @pytest.mark.parametrize("stalls", [True, False])
    def test_trials_that_go_badly_double_the_wait_up_to_a_bound(self, stalls):
        waits = self.waits(self.links(), 10, stalls=stalls)
        assert waits[:3] == [5, 10, 20]
        assert waits[-1] == LONGEST_WAIT_SECONDS

    def test_trust_regained_makes_the_next_wait_short_again(self):
        links = self.links()
        assert self.waits(links, 4, stalls=True)[-1] == 40
        links.revisit(1000.0)
        links.observe(self.job(2.4e9))
        links.stalled(self.name, 1001.0)
        links.revisit(1001.0 + FIRST_WAIT_SECONDS)
        assert links.standing(self.name) is Standing.ON_TRIAL

    def test_a_link_found_slow_is_hoped_for_until_it_is_tried(self):
        links = self.links()
        at_best = float(links[self.name].seconds(512, GIB))
        for _ in range(10):
            links.observe(self.job(0.024e9))
        links.revisit(0.0)
        assert float(links[self.name].seconds(512, GIB)) > 50 * at_best
        for now in range(1, 200):
            links.revisit(float(now))
        assert float(links[self.name].seconds(512, GIB)) == pytest.approx(at_best, rel=0.01)

    def test_a_link_that_is_measured_is_what_was_measured(self):
        links = self.links()
        for now in range(100):
            links.observe(self.job(0.1e9))
            links.revisit(float(now))
        assert links[self.name].seconds(512, GIB) == pytest.approx(GIB / 0.1e9, rel=0.05)

    def test_a_link_at_its_best_is_not_made_faster(self):
        links = self.links()
        before = float(links[self.name].seconds(512, GIB))
        for now in range(0, 1000, 10):
            links.revisit(float(now))
        assert links[self.name].seconds(512, GIB) == pytest.approx(before)


def test_jobs_without_blocks_teach_nothing():
    link = LinkModel(1e-4, 1e-5, 2e9)
    link.observe(0, 0, 1.0)
    assert link.num_observed == 0


def test_infinite_bandwidth_stays():
    link = LinkModel(1e-4, 0.0, float("inf"))
    link.observe(1, 100, 1e-3)
    assert link.bandwidth_bytes_per_second == float("inf")
    assert link.seconds_per_piece == 0
    assert link.latency_seconds > 1e-4


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_senseless_bandwidth_is_refused(bandwidth):
    with pytest.raises(ValueError, match="bandwidth"):
        LinkModel(0.0, 0.0, bandwidth)


@pytest.mark.parametrize("kind", list(StoreKind))
def test_every_kind_of_store_has_seeds_both_ways(kind):
    links = Links.seeded({"s": kind})
    assert set(links) == {offload_link(), reload_link(), read_link("s"), write_link("s")}
    assert len(links) == 4
    assert all(model.seconds(1, 1 << 20) > 0 for model in links.values())


def test_names_are_those_of_the_messages():
    assert (offload_link(), reload_link()) == ("hbm>dram", "dram>hbm")
    assert (read_link("nvme0"), write_link("nvme0")) == ("nvme0>dram", "dram>nvme0")


def test_missing_link_is_named():
    with pytest.raises(ValueError, match="'disk>dram'"):
        Links(["disk"], {reload_link(): LinkModel(0, 0, 1)})


def test_queue_is_what_was_submitted_and_is_not_done():
    links = Links.seeded({})
    links.submitted(reload_link(), 100)
    links.submitted(reload_link(), 50)
    links.done(reload_link(), 120)
    assert links.queued_nbytes(reload_link()) == 30
    assert links.queued_nbytes(offload_link()) == 0
    links.done(reload_link(), 1000)
    assert links.queued_nbytes(reload_link()) == 0


def test_unknown_link_is_measured_rather_than_fatal(caplog):
    links = Links.seeded({})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            links.observe(Link("new>dram", 10, 1 << 20, 0.5))
    assert links["new>dram"].num_observed == 3
    assert links.queued_nbytes("new>dram") == 0
    assert len(caplog.records) == 1


def test_trial_that_goes_well_undoes_what_was_learnt_in_the_stall():
    """Else a link that is fast again would be believed to be slow for a minute more."""
    links = Links.seeded({"disk": StoreKind.NVME})
    name, block = read_link("disk"), 2**21
    for _ in range(20):
        links.observe(Link(name, 64, 64 * block, 64 * block / 10e9))
    links.stalled(name, 0.0)
    for _ in range(5):  # what the stalled jobs brought in the end
        links.observe(Link(name, 64, 64 * block, 64 * block / 0.1e9))
    assert links[name].effective_bandwidth(block, 64) < 0.3e9
    links.revisit(FIRST_WAIT_SECONDS)
    assert links.standing(name) is Standing.ON_TRIAL
    links.observe(Link(name, 8, 8 * block, 8 * block / 10e9))
    assert links.standing(name) is Standing.HELD
    assert links[name].effective_bandwidth(block, 64) > 5e9


def test_trial_is_judged_by_what_the_link_was_not_by_its_seed():
    """A disk of a fifth of what was believed of it at first is not slow: it is that disk."""
    links = Links.seeded({"disk": StoreKind.MEMORY})  # 12 GB/s
    name, block = read_link("disk"), 2**19
    for _ in range(10):
        links.observe(Link(name, 64, 64 * block, 64 * block / 0.5e9))
    links.stalled(name, 0.0)
    links.revisit(FIRST_WAIT_SECONDS)
    links.observe(Link(name, 8, 8 * block, 8 * block / 0.5e9))
    assert links.standing(name) is Standing.HELD
