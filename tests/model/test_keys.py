"""Promises of content addresses."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.model.fingerprint import Fingerprint
from kvtiers.model.keys import (
    ExtraKey,
    Rank,
    block_key,
    block_keys,
    group_of,
    pack_keys,
    prefix_hash_chain,
    store_key,
    unpack_keys,
)

HASHES = st.one_of(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
GROUPS = st.integers(0, 2**32 - 1)

# Made once, of the tokens 0..39 in blocks of 16. A change here orphans every store.
GOLDEN: dict[tuple[ExtraKey, ...], tuple[str, str]] = {
    (): (
        "ff8057539d4179fa496af545bc88acdea62736bac671f0ee466f38586ca0070d",
        "a723cc68249a7702580495a4ff1a575664461d4e87e33d71651e7aefa366fddc",
    ),
    (None,): (
        "5bbd32f575046a1f9901e5968b061bfd6d76d289bc5ab4ca62ed22e36d46210a",
        "1dd73d3b303602233e06f9ab413253a30b88904007ffb0ff996efdf9ab77d59d",
    ),
    ("",): (
        "a4a218f787881a4c0367b0fe34142c8faa702b83c7b0697c845411cde70ee3b2",
        "48ace4f534128654f649aa2d75cf9ff075d2b161304459d49bdc7e4efcaf896e",
    ),
    ((),): (
        "43389582f0eb69ab1c16847d7442e296f1e7c7be8a4e2848b152c05ba3169a56",
        "4173c75a5f54152fafb823f87d7046e90dd63a4b5283f150305c5ef33553c3fa",
    ),
    (None, (), "", b"x", -1, True): (
        "e64b84cce3aa878a2481bbc6291d88d660b8915a9b87d6c81c35d4588a1aeb0d",
        "9e840c2739ff0d3d7f60f4140c15b187f45443854937d861755318e5461f6a7d",
    ),
}


@pytest.mark.parametrize("seed", [None, "0", "1"])
def test_hash_chain_is_the_same_in_every_process(seed: str | None) -> None:
    """R38: the builtin hash of a tuple holding None differs between processes."""
    program = (
        "from kvtiers.model.keys import prefix_hash_chain as chain\n"
        f"for extras in {list(GOLDEN)!r}:\n"
        "    print(*(h.hex() for h in chain(range(40), 16, extra_keys=extras)))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    )
    assert [tuple(line.split()) for line in ran.stdout.splitlines()] == list(GOLDEN.values())


def test_store_key_is_the_same_for_ever() -> None:
    name = store_key(bytes(32), Rank(1, 2, 3), block_key(bytes(range(32)), 7))
    assert name.hex() == "6c141d3e3b31c8299ff5e18d7decfce8f79a57b83cc83aef68850ba384df6b5f"


def test_adapters_and_salts_share_no_block() -> None:
    """R47: LoRA A, LoRA B and none, each with and without a cache salt."""
    extras: list[tuple[ExtraKey, ...]] = [
        (),
        ("lora-a",),
        ("lora-b",),
        ("lora-a", "salt"),
        ("lora-b", "salt"),
        ("salt",),
        (("lora-a", "salt"),),
    ]
    chains = [prefix_hash_chain(range(64), 16, extra_keys=e) for e in extras]
    hashes = list(itertools.chain.from_iterable(chains))
    assert len(set(hashes)) == len(hashes)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(1, 20), st.integers(0, 60))
def test_a_hash_covers_its_block_and_all_before_it(
    tokens: list[int], block_size: int, position: int
) -> None:
    hashes = prefix_hash_chain(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    if position >= len(tokens):
        return
    changed = prefix_hash_chain([t ^ (i == position) for i, t in enumerate(tokens)], block_size)
    first = position // block_size
    assert changed[:first] == hashes[:first]
    assert not set(changed[first:]) & set(hashes)


@given(st.integers(0, 8))
def test_a_chain_continues_from_its_parent(blocks: int) -> None:
    tokens = range(8 * 16)
    whole = prefix_hash_chain(tokens, 16)
    parent = whole[blocks - 1] if blocks else None
    assert whole[:blocks] + prefix_hash_chain(tokens[blocks * 16 :], 16, parent=parent) == whole


def test_block_size_is_part_of_the_address() -> None:
    assert prefix_hash_chain([1, 2], 2) != prefix_hash_chain([1, 2, 3], 2, parent=bytes(32))
    assert prefix_hash_chain([0] * 16, 16)[0] != prefix_hash_chain([0] * 16, 8)[1]


def nested(inner: st.SearchStrategy[ExtraKey]) -> st.SearchStrategy[ExtraKey]:
    return st.lists(inner, max_size=3).map(tuple)


EXTRAS: st.SearchStrategy[ExtraKey] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.binary(max_size=4)),
    nested,
    max_leaves=6,
)


def typed(key: ExtraKey) -> object:
    """Extra keys as values that are equal only where type and value are."""
    return tuple(map(typed, key)) if isinstance(key, tuple) else (type(key).__name__, key)


@given(st.lists(EXTRAS, max_size=3), st.lists(EXTRAS, max_size=3))
def test_extra_keys_collide_only_where_they_are_equal(a: list[ExtraKey], b: list[ExtraKey]) -> None:
    first = prefix_hash_chain([1], 1, extra_keys=tuple(a))
    second = prefix_hash_chain([1], 1, extra_keys=tuple(b))
    assert (first == second) == (list(map(typed, a)) == list(map(typed, b)))


@given(st.lists(st.tuples(HASHES, GROUPS), unique=True, max_size=8))
def test_keys_and_their_parts_correspond_one_to_one(parts: list[tuple[bytes, int]]) -> None:
    """R48: the group index survives the way to the name and back."""
    keys = [block_key(block_hash, group) for block_hash, group in parts]
    padded = {(block_hash.ljust(32, b"\0"), group) for block_hash, group in parts}
    assert len(set(keys)) == len(padded)
    assert [group_of(key) for key in keys] == [group for _, group in parts]
    assert list(unpack_keys(pack_keys(keys))) == keys
    assert [block_keys([h], g)[0] for h, g in parts] == keys


def test_every_rank_files_its_shard_under_its_own_name() -> None:
    """R49: 3 tensor, 3 pipeline and 3 context ranks, 4 groups."""
    fingerprint = Fingerprint.of({"model": "m"}).digest
    names = {
        store_key(fingerprint, Rank(*place), block_key(bytes(32), group))
        for place in itertools.product(range(3), repeat=3)
        for group in range(4)
    }
    assert len(names) == 27 * 4
    assert {len(name) for name in names} == {32}


@pytest.mark.parametrize(
    ("facts", "same"),
    [
        ({"model": "m", "revision": "a"}, True),
        ({"revision": "a", "model": "m"}, True),
        ({"model": "m", "revision": "b"}, False),
        ({"model": "m", "revision": None}, False),
        ({"model": "m", "revision": "a", "tp": 1}, False),
    ],
)
def test_fingerprint_changes_with_any_fact_and_not_with_their_order(
    facts: dict[str, str | int | None], same: bool
) -> None:
    assert (
        Fingerprint.of(facts).digest == Fingerprint.of({"model": "m", "revision": "a"}).digest
    ) == same


@pytest.mark.parametrize("nbytes", [0, 15, 17, 31, 33, 64])
def test_hashes_of_another_length_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"{nbytes} bytes"):
        block_key(bytes(nbytes), 0)
    with pytest.raises(ValueError, match=f"{nbytes} bytes"):
        block_keys([bytes(nbytes)], 0)
    with pytest.raises(ValueError, match=f"{nbytes} bytes"):
        prefix_hash_chain([1], 1, parent=bytes(nbytes))


@pytest.mark.parametrize("group", [-1, 2**32])
def test_groups_that_do_not_fit_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=str(group)):
        block_key(bytes(32), group)
    with pytest.raises(ValueError, match=str(group)):
        block_keys([bytes(32)], group)


def test_key_column_of_a_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="37 bytes"):
        list(unpack_keys(bytes(37)))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=r"token ids 2\.\.3"):
        prefix_hash_chain([0, 0, 0, token], 2)


def test_values_without_a_canonical_form_are_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        prefix_hash_chain([1], 1, extra_keys=(1.5,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="list"):
        Fingerprint.of({"a": []})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="block_size 0"):
        prefix_hash_chain([1], 0)
