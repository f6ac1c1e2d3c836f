"""Published measurements against predictions; a prediction is never fitted to what judges it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtiers.cost.catalogue import HARDWARE, STORAGE
from kvtiers.cost.hardware import catalogued_links
from kvtiers.cost.known_models import known_model
from kvtiers.cost.links import LinkModel, reload_link
from kvtiers.cost.planner import PlanPolicy, Prompt, plan_reload
from kvtiers.cost.prefill import MeasuredPrefill, PrefillModel
from kvtiers.model.messages import Link

BLOCK_SIZE, BLOCK_NBYTES = 16, 2 << 20

# Llama-3.1-8B on an H100 with a DRAM tier: TTFT of recompute over TTFT of reload (vLLM's
# offloading article, January 2026).
GAINS = {10_000: 7.0, 20_000: 9.3, 50_000: 14.3, 100_000: 22.2}
# Its recompute at 10k tokens, and what its utilisation of 0.59 at 100k tokens implies.
RECOMPUTE_SECONDS = {10_000: 0.26, 100_000: 6.88}


def h100() -> tuple[PrefillModel, LinkModel]:
    prefill = HARDWARE["h100"].prefill(known_model("llama-3.1-8b").shape, 8192)
    return prefill, catalogued_links(HARDWARE["h100"], {})[reload_link()]


def gain(num_tokens: int, prefill: PrefillModel, link: LinkModel) -> float:
    """Return the predicted gain of a prompt that DRAM holds but for the last token."""
    num_blocks = num_tokens // BLOCK_SIZE
    load = float(link.seconds(num_blocks, num_blocks * BLOCK_NBYTES))
    reload = load + float(prefill.seconds(1, num_tokens - 1))
    return float(prefill.seconds(num_tokens)) / reload


@pytest.mark.parametrize("num_tokens", GAINS)
def test_gain_on_an_h100_from_catalogue_values(num_tokens):
    """Predicted 6.3, 8.4, 13.5 and 21.4. Both sides come out too fast, recompute by 12 to 13 %:
    what is neither a matrix product nor attention is not counted."""
    assert gain(num_tokens, *h100()) == pytest.approx(GAINS[num_tokens], rel=0.15)


@pytest.mark.parametrize("num_tokens", RECOMPUTE_SECONDS)
def test_recompute_on_an_h100_from_catalogue_values(num_tokens):
    prefill, _ = h100()
    assert prefill.seconds(num_tokens) == pytest.approx(RECOMPUTE_SECONDS[num_tokens], rel=0.15)


@pytest.mark.parametrize("num_tokens", [20_000, 50_000])
def test_two_points_calibrate_for_the_other_two(num_tokens):
    prefill, link = h100()
    prefill.fit([MeasuredPrefill(n, 0, seconds) for n, seconds in RECOMPUTE_SECONDS.items()])
    jobs = []
    for n, seconds in RECOMPUTE_SECONDS.items():
        load = seconds / GAINS[n] - float(prefill.seconds(1, n - 1))
        num_blocks = n // BLOCK_SIZE
        jobs.append(Link(reload_link(), num_blocks, num_blocks * BLOCK_NBYTES, load))
    link.fit(jobs)
    assert gain(num_tokens, prefill, link) == pytest.approx(GAINS[num_tokens], rel=0.10)


@pytest.mark.parametrize(
    ("nbytes", "gigabytes_per_second"),
    [(4 << 10, 1.1), (32 << 10, 7.5), (128 << 10, 22.7), (512 << 10, 39.5), (2 << 20, 47.7)],
)
def test_bandwidth_by_copy_size_on_an_h100(nbytes, gigabytes_per_second):
    """Published H2D copies of one size after another, one DMA each."""
    _, link = h100()
    found = 1000 * nbytes / float(link.seconds(1000, 1000 * nbytes)) / 1e9
    assert found == pytest.approx(gigabytes_per_second, rel=0.12)


@pytest.mark.parametrize("source", ["dram", "nvme-gen5", "nvme-gen4", "sata"])
@pytest.mark.parametrize("num_tokens", [16, 32, 64, 128, 256])
def test_short_prompts_are_computed_whatever_the_link(num_tokens, source):
    """A step of 256 tokens reads the same weights as a step of one; a load comes on top."""
    prefill, _ = h100()
    stores = {} if source == "dram" else {source: STORAGE[source]}
    links = catalogued_links(HARDWARE["h100"], stores)
    num_blocks = num_tokens // BLOCK_SIZE
    plan = plan_reload(
        np.full(num_blocks, len(stores), np.uint8),
        np.ones(num_blocks + 1, bool),
        Prompt(num_tokens, 0, BLOCK_SIZE, BLOCK_NBYTES),
        links,
        prefill,
        PlanPolicy(),
    )
    assert plan.num_blocks == 0
    assert plan.chosen_seconds <= min(plan.recompute_seconds, plan.reload_seconds)
