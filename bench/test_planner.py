"""How long a plan takes. Nothing is copied; the ceiling is the 15 ms that a first match and plan
of an 8,192-block prompt may take together."""

from __future__ import annotations

import numpy as np
import pytest

from kvtiers.cost.catalogue import known_hardware
from kvtiers.cost.known_models import known_model
from kvtiers.cost.links import Links, StoreKind
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import Objective, PlanPolicy, Prompt
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel

NUM_BLOCKS, BLOCK_SIZE, BLOCK_NBYTES = 8192, 16, 2 << 20


def cost_model() -> CostModel:
    links = Links.seeded({"nvme0": StoreKind.NVME, "shared": StoreKind.LMDB})
    return CostModel(PrefillModel(0.005, 6e14, FALLBACK_SHAPE, 8192), links, PlanPolicy())


@pytest.mark.parametrize("num_sources", [1, 3])
def test_plan_of_8192_blocks(benchmark, num_sources):
    model = cost_model()
    sources = np.sort(np.arange(NUM_BLOCKS) % num_sources).astype(np.uint8)
    valid = np.ones(NUM_BLOCKS + 1, bool)
    prompt = Prompt(NUM_BLOCKS * BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_NBYTES)
    plan = benchmark(model.plan, sources, valid, prompt)
    benchmark.extra_info.update(num_blocks=NUM_BLOCKS, ceiling_seconds=0.015, copied_nbytes=0)
    assert plan.num_blocks > 0


def test_plan_of_8192_blocks_with_everything(benchmark):
    """Layer by layer, throughput too, 64 other loads under way, weights read."""
    shape = known_model("llama-3.1-8b").shape
    links = Links.seeded({"nvme0": StoreKind.NVME, "shared": StoreKind.LMDB})
    policy = PlanPolicy(objective=Objective.BALANCED, deadline_seconds=10.0, num_load_stages=32)
    model = CostModel(known_hardware("h100").prefill(shape, 8192), links, policy)
    sources = np.sort(np.arange(NUM_BLOCKS) % 3).astype(np.uint8)
    valid = np.ones(NUM_BLOCKS + 1, bool)
    others = tuple(0.1 * i for i in range(64))
    prompt = Prompt(
        NUM_BLOCKS * BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_NBYTES, 0.5, others_ready_seconds=others
    )
    plan = benchmark(model.plan, sources, valid, prompt)
    benchmark.extra_info.update(num_blocks=NUM_BLOCKS, ceiling_seconds=0.015, copied_nbytes=0)
    assert plan.num_blocks > 0


def test_observation_of_one_step(benchmark):
    model = cost_model()
    benchmark(model.observe_step, 1e14, 4096, 0.2)
    benchmark.extra_info.update(ceiling_seconds=0.001, copied_nbytes=0)
