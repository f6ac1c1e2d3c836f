"""Promises of `kvtiers.cost.value`: deeper, likelier and cheaper to load is worth more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.value import block_values, seconds_saved

from .machine import BLOCK_NBYTES, BLOCK_SIZE, bare_link, h100, one_disk

DEPTHS = np.arange(0, 200_000, 10_000)


def saved(gigabytes_per_second: float, source: int = 1, depths=DEPTHS) -> np.ndarray:
    links = one_disk(bare_link(gigabytes_per_second * 1e9), bare_link(50e9))
    return seconds_saved(depths, BLOCK_SIZE, BLOCK_NBYTES, source, links, h100())


def test_deeper_blocks_save_more():
    assert (np.diff(saved(12.0)) > 0).all()


def test_all_blocks_of_a_prefix_save_what_its_recompute_takes_less_its_load():
    depths = np.arange(0, 65_536, BLOCK_SIZE)
    compute = float(h100(step_seconds=0.0).seconds(65_536))
    load = len(depths) * BLOCK_NBYTES / 12e9
    assert saved(12.0, depths=depths).sum() == pytest.approx(compute - load, rel=1e-6)


def test_a_block_that_is_cheaper_to_compute_saves_nothing():
    slow = saved(2.0)
    assert slow[0] == 0
    assert slow[-1] > 0


def test_dram_saves_more_than_the_store_below_it():
    assert (saved(2.0, source=0) > saved(2.0, source=1)).all()


@given(chance=st.floats(0, 1), nbytes=st.integers(1, 10**9))
def test_value_is_seconds_by_chance_by_byte(chance, nbytes):
    found = block_values([1.0, 2.0], chance, nbytes)
    assert found == pytest.approx([chance / nbytes, 2 * chance / nbytes])


@pytest.mark.parametrize(
    ("chances", "nbytes"), [([1.5], 1), ([-0.1], 1), ([float("nan")], 1), ([0.5], 0)]
)
def test_senseless_values_are_refused(chances, nbytes):
    with pytest.raises(ValueError, match=r"0\.\.1|per byte"):
        block_values([1.0], chances, nbytes)
