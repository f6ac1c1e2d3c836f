"""A disk that drops to a hundredth of its speed and recovers, over ten minutes of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtiers.cost.links import LinkModel, Links, read_link, reload_link
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import PlanPolicy, Prompt
from kvtiers.cost.trust import LONGEST_WAIT_SECONDS
from kvtiers.model.messages import Link

from .machine import BLOCK_NBYTES, BLOCK_SIZE, h100

DISK, NUM_BLOCKS = read_link("disk"), 512
FAST, SLOW = 12e9, 0.12e9
DEADLINE = 2.0


@dataclass
class Served:
    """One request of 8k tokens: when, how many blocks it loaded, and its time to first token."""

    now: float
    num_blocks: int
    ttft_seconds: float


def serve(model: CostModel, now: float, bandwidth: float) -> Served:
    """Plan a request, load at the disk's true speed, and tell the model what there is to tell."""
    prompt = Prompt(NUM_BLOCKS * BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_NBYTES)
    sources, valid = np.ones(NUM_BLOCKS, np.uint8), np.ones(NUM_BLOCKS + 1, bool)
    model.links.revisit(now)
    num_blocks = model.plan(sources, valid, prompt).num_blocks
    nbytes = num_blocks * BLOCK_NBYTES
    seconds = 2e-4 + nbytes / bandwidth if num_blocks else 0.0
    if seconds > DEADLINE:
        model.links.stalled(DISK, now + DEADLINE)
        return Served(now, num_blocks, DEADLINE + float(h100().seconds(prompt.num_tokens)))
    model.observe_links([Link(DISK, num_blocks, nbytes, seconds)])
    context = min(num_blocks * BLOCK_SIZE, prompt.num_tokens - 1)
    rest = float(h100().seconds(prompt.num_tokens - context, context))
    return Served(now, num_blocks, seconds + rest)


def run() -> list[Served]:
    disk = LinkModel(2e-4, 2e-5, FAST)
    links = Links(["disk"], {reload_link(): LinkModel(5e-5, 4e-6, 50e9), DISK: disk})
    model = CostModel(h100(), links, PlanPolicy(deadline_seconds=DEADLINE))
    return [serve(model, float(now), SLOW if 100 <= now < 300 else FAST) for now in range(600)]


def test_a_stall_costs_one_deadline_then_trials_and_ends_with_the_stall():
    served = run()
    computed = float(h100().seconds(NUM_BLOCKS * BLOCK_SIZE))
    assert all(one.num_blocks == NUM_BLOCKS for one in served if one.now < 100)
    stalled = [one for one in served if 100 <= one.now < 300]
    assert sum(one.ttft_seconds > DEADLINE for one in stalled) == 1
    tried = [one for one in stalled[1:] if one.num_blocks]
    assert 2 <= len(tried) <= 10
    assert all(one.ttft_seconds < 2 * computed for one in stalled[1:])
    back = next(one.now for one in served if one.now >= 300 and one.num_blocks == NUM_BLOCKS)
    assert back <= 300 + LONGEST_WAIT_SECONDS
    assert all(one.num_blocks == NUM_BLOCKS for one in served if one.now > back)
