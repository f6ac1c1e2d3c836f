"""Promises of `kvtiers.cost.loads`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.control.settings import GroupSettings
from kvtiers.cost.links import Links, read_link, reload_link
from kvtiers.cost.loads import Frames, Loads, WindowKV
from kvtiers.cost.planner import PlanPolicy, Prompt, plan_reload

from .machine import BLOCK_NBYTES, BLOCK_SIZE, bare_link, h100, one_disk

columns = st.lists(st.integers(0, 2), max_size=30)


def two_disks() -> Links:
    names = (reload_link(), read_link("a"), read_link("b"))
    return Links(["a", "b"], {name: bare_link(1e9) for name in names})


@given(
    sources=columns, groups=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), max_size=3)
)
def test_of_a_group_with_a_window_only_the_last_blocks_are_moved(sources, groups):
    """Against a sum over blocks and groups."""
    windows = [WindowKV(nbytes, num_blocks) for nbytes, num_blocks in groups]
    whole = 7
    everything = whole + sum(nbytes for nbytes, _ in groups)
    column = np.array(sources, np.uint8)
    found = Loads.of_prefixes(column, everything, two_disks(), windows)
    for m in range(len(sources) + 1):
        nbytes = [0, 0, 0]
        for position in range(m):
            moved = whole + sum(n for n, last in groups if position >= m - last)
            nbytes[sources[position]] += moved
        assert found.to_hbm.nbytes[m] == sum(nbytes)
        for source, store in ((1, "a"), (2, "b")):
            batch = found.from_stores.get(store)
            assert (0 if batch is None else batch.nbytes[m]) == nbytes[source]
        assert found.to_hbm.num_blocks[m] == m


def test_where_every_group_has_a_window_so_many_blocks_are_moved():
    found = Loads.of_prefixes(np.zeros(20, np.uint8), 10, two_disks(), [WindowKV(10, 4)])
    assert found.to_hbm.num_blocks.tolist() == [0, 1, 2, 3] + [4] * 17
    assert found.to_hbm.nbytes.tolist() == [10.0 * n for n in found.to_hbm.num_blocks]


@given(window=st.integers(1, 200), block_size=st.integers(1, 64), end=st.integers(1, 100))
def test_the_window_is_the_one_that_control_loads(window, block_size, end):
    needed = end - GroupSettings(window).first_needed(end, block_size)
    assert min(end, WindowKV.of(1, window, block_size).num_blocks) == needed


@given(sources=columns)
def test_counts_and_prefixes_agree(sources):
    links = two_disks()
    counts = [sources.count(source) for source in range(3)]
    by_count = Loads.of_counts(counts, 100, links).seconds(links)
    by_prefix = Loads.of_prefixes(np.array(sources, np.uint8), 100, links).seconds(links)
    assert by_count[0] == pytest.approx(by_prefix[-1])


def test_blocks_that_come_together_go_to_hbm_together():
    """A store is asked for 4 at once: the last 4, or all where they are fewer, are not piped."""
    links = one_disk(bare_link(1e9))
    sources = np.ones(10, np.uint8)
    piped = Loads.of_prefixes(sources, 10**6, links).seconds(links)
    together = Loads.of_prefixes(sources, 10**6, links, frames=Frames(4)).seconds(links)
    to_hbm = links[reload_link()]
    one = float(to_hbm.seconds(1, 10**6))
    for m in range(1, 11):
        last = float(to_hbm.seconds(min(m, 4), min(m, 4) * 10**6))
        assert together[m] == pytest.approx(piped[m] - one + last)


def test_headers_are_read_and_go_no_further():
    links = two_disks()
    found = Loads.of_prefixes(np.ones(3, np.uint8), 1000, links, frames=Frames(1, 50))
    assert found.to_hbm.nbytes.tolist() == [0, 1000, 2000, 3000]
    (batch,) = found.from_stores.values()
    assert batch.nbytes.tolist() == [0, 1050, 2100, 3150]


def test_windows_that_hold_more_than_everything_are_refused():
    with pytest.raises(ValueError, match="more than the 10 bytes"):
        Loads.of_prefixes(np.zeros(1, np.uint8), 10, two_disks(), [WindowKV(11, 1)])


def test_a_model_whose_layers_mostly_have_windows_is_reloaded_from_a_slower_disk():
    """Gemma 3: of 62 layers 52 look back 1,024 tokens; at 32k tokens 0.2 of the KV is loaded."""
    links = one_disk(bare_link(1.5e9))
    sources, valid = np.ones(2048, np.uint8), np.ones(2049, bool)
    window = WindowKV.of(BLOCK_NBYTES * 52 // 62, 1024, BLOCK_SIZE)
    chosen = []
    for windows in ((), (window,)):
        prompt = Prompt(2048 * BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_NBYTES, windows=windows)
        plan = plan_reload(sources, valid, prompt, links, h100(), PlanPolicy())
        chosen.append(plan.num_blocks)
        assert plan.chosen_seconds <= min(plan.recompute_seconds, plan.reload_seconds)
    assert chosen[0] < 2048
    assert chosen[1] == 2048
