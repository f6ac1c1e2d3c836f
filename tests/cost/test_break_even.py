"""Promises of `kvtiers.cost.break_even`."""

from __future__ import annotations

import pytest

from kvtiers.cost.break_even import break_even_tokens
from kvtiers.cost.links import LinkModel, Links, read_link

from .machine import BLOCK_NBYTES, BLOCK_SIZE, bare_link, h100, one_disk

LONGEST = 131_072


def break_even(links: Links, source: int = 1) -> int | None:
    return break_even_tokens(source, BLOCK_SIZE, BLOCK_NBYTES, LONGEST, links, h100())


@pytest.mark.parametrize("bandwidth", [2.5e9, 4e9, 6.9e9])
def test_from_there_on_a_reload_is_faster_and_before_it_is_not(bandwidth):
    link = LinkModel(0.05, 0.0, bandwidth)
    links = one_disk(link, bare_link(1e15))
    found = break_even(links)

    def faster(num_tokens: int) -> bool:
        load = float(link.seconds(1, num_tokens // BLOCK_SIZE * BLOCK_NBYTES))
        one, everything = (
            float(h100().seconds(n, c)) for n, c in ((1, num_tokens), (num_tokens + 1, 0))
        )
        return load + one < everything

    assert not faster(found - BLOCK_SIZE)
    assert all(faster(n) for n in range(found, LONGEST, 50 * BLOCK_SIZE))


def test_a_reload_grows_with_the_length_and_a_prefill_faster():
    """Attention is quadratic: so reloads pay off for long prefixes."""
    link = LinkModel(0.0, 0.0, 4e9)

    def ratio(num_tokens: int) -> float:
        load = float(link.seconds(1, num_tokens // BLOCK_SIZE * BLOCK_NBYTES))
        return load / float(h100().seconds(num_tokens))

    lengths = [2048, 8192, 32_768, 131_072]
    ratios = [ratio(n) for n in lengths]
    assert ratios == sorted(ratios, reverse=True)
    assert float(link.seconds(1, 4 * BLOCK_NBYTES)) == 4 * float(link.seconds(1, BLOCK_NBYTES))
    assert float(h100().seconds(131_072)) > 4.5 * float(h100().seconds(32_768))


def test_a_slow_link_never_breaks_even_and_a_free_one_at_once():
    assert break_even(one_disk(bare_link(1e8))) is None
    assert break_even(one_disk(bare_link(1e18), bare_link(1e18))) == BLOCK_SIZE


def test_queues_of_the_moment_do_not_count():
    links = one_disk(bare_link(5e9))
    before = break_even(links)
    links.submitted(read_link("disk"), 10**13)
    assert break_even(links) == before


def test_no_block_no_break_even():
    links = one_disk(bare_link(1e18))
    assert break_even_tokens(1, BLOCK_SIZE, BLOCK_NBYTES, BLOCK_SIZE - 1, links, h100()) is None
