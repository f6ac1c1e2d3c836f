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


def test_copies_per_block_are_seen_in_the_seed():
    one, per_layer = Links.seeded({}), Links.seeded({}, pieces_per_block=32)
    difference = per_layer[reload_link()].seconds(1000, 0) - one[reload_link()].seconds(1000, 0)
    assert difference == pytest.approx(31 * 1000 * 4e-6)


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


def test_new_epoch_forgets_queues():
    links = Links.seeded({})
    links.submitted(reload_link(), 100)
    links.forget_queues()
    assert links.queued_nbytes(reload_link()) == 0


def test_unknown_link_is_measured_rather_than_fatal(caplog):
    links = Links.seeded({})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            links.observe(Link("new>dram", 10, 1 << 20, 0.5))
    assert links["new>dram"].num_observed == 3
    assert links.queued_nbytes("new>dram") == 0
    assert len(caplog.records) == 1
