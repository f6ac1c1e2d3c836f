"""What an executor says that its links have done."""

from __future__ import annotations

import pytest
from ranks import LAYOUTS, OK, offloaded, rank_with_faulty_store

from kvtiers.model.frame import FrameFormat
from kvtiers.model.messages import HBM, NO_SLOT
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, key_of, keys_of

FORMAT = FrameFormat.of(make_layout().groups[0])


def test_links_count_what_arrived():
    rank, _ = rank_with_faulty_store()
    offloaded(rank, 0, targets=1)
    rank.executor.take_links()
    order = rank.orders.reload(keys_of(0, 99), [5, 6], [NO_SLOT, 3], 1, window=[4])
    assert rank.run(order) == {HBM: [OK, Outcome.MISSING]}
    links = {link.name: (link.num_blocks, link.nbytes) for link in rank.executor.take_links()}
    assert links == {
        "m>dram": (1, FORMAT.frame_nbytes),
        "dram>hbm": (1, FORMAT.payload_nbytes),
    }
    assert rank.executor.take_links() == ()


@pytest.mark.parametrize("polled", ["together", "one by one"])
def test_copies_of_several_groups_count_the_time_once(polled):
    """By the caller's clock, where the copier has none."""
    rank = FakeRank(LAYOUTS["three KV groups"])
    keys = [key_of(number, group=number) for number in range(3)]
    rank.submit(rank.orders.offload(keys, [0, 1, 2], [0, 1, 2]))
    rank.advance()
    for _ in range(3):
        rank.clock.advance(1.0)
        rank.device.step()
        if polled == "one by one":
            rank.advance()
    rank.settle()
    (link,) = rank.executor.take_links()
    assert (link.num_blocks, link.seconds) == (3, pytest.approx(3.0))


def test_time_between_copies_is_no_link_s():
    rank = FakeRank()
    for number in range(2):
        rank.clock.advance(10.0)
        rank.submit(rank.orders.offload(keys_of(number), [number], [number]))
        rank.advance()
        rank.clock.advance(1.0)
        rank.settle()
    (link,) = rank.executor.take_links()
    assert (link.num_blocks, link.seconds) == (2, pytest.approx(2.0))


def test_blocks_that_a_store_held_are_no_copied_bytes():
    rank, _ = rank_with_faulty_store()
    keys = offloaded(rank, 0, targets=1)
    rank.executor.take_links()
    order = rank.orders.demote(keys, [0])
    assert rank.run(order) == {"m": [OK]}
    assert rank.executor.take_links() == ()
