"""An inventory says which blocks every rank may find, from the prefixes of their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.data.inventory import Inventory
from kvtiers.model.keys import StoreKey


def name(rank: int, number: int) -> StoreKey:
    return StoreKey((number * 7919 + rank).to_bytes(8, "big") + bytes(24))


def prefixes(rank: int, numbers: set[int]) -> bytes:
    return b"".join(sorted(name(rank, n)[:8] for n in numbers))


@given(st.sets(st.integers(0, 50)), st.sets(st.integers(0, 50)), st.lists(st.integers(0, 60)))
def test_block_is_present_if_every_rank_has_it(first, second, asked):
    inventory = Inventory([prefixes(0, first), prefixes(1, second)])
    flags = inventory.present([[name(0, n), name(1, n)] for n in asked])
    assert flags.tolist() == [int(n in first and n in second) for n in asked]
    assert len(inventory) == min(len(first), len(second))


def test_largest_and_smallest_key_are_found():
    ends = [StoreKey(bytes(32)), StoreKey(b"\xff" * 32)]
    inventory = Inventory([b"".join(key[:8] for key in ends)])
    assert inventory.present([[key] for key in ends]).tolist() == [1, 1]


@pytest.mark.parametrize("prefixes", [b"1234567", b"b" * 8 + b"a" * 8])
def test_torn_or_unsorted_inventory_is_refused(prefixes):
    with pytest.raises(ValueError, match="inventory"):
        Inventory([prefixes])
