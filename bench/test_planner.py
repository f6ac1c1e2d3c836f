"""How long a plan takes. Nothing is copied; the ceiling is the 15 ms that a first match and plan
of an 8,192-block prompt may take together."""

from __future__ import annotations

import numpy as np
import pytest

from kvtiers.cost.links import Links, StoreKind
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import PlanPolicy, Prompt
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


def test_observation_of_one_step(benchmark):
    model = cost_model()
    benchmark(model.observe_step, 1e14, 4096, 0.2)
    benchmark.extra_info.update(ceiling_seconds=0.001, copied_nbytes=0)
