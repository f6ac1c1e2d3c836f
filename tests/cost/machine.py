"""Machines and models for the tests of the cost model."""

from __future__ import annotations

import numpy as np

from kvtiers.cost.links import LinkModel, Links, read_link, reload_link
from kvtiers.cost.planner import PlanPolicy, Prompt, ReloadPlan, plan_reload
from kvtiers.cost.prefill import FALLBACK_SHAPE, ModelShape, PrefillModel
from kvtiers.model.cost_mode import CostMode

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
H100_FLOPS_PER_SECOND = 0.6 * 989e12
BLOCK_SIZE = 16
BLOCK_NBYTES = 16 * 131_072  # Llama-3.1-8B in bf16
DRAM_ONLY, DISK = 0, 1


def h100(shape: ModelShape = FALLBACK_SHAPE, step_seconds: float = 0.005) -> PrefillModel:
    return PrefillModel(step_seconds, H100_FLOPS_PER_SECOND, shape, max_tokens_per_step=8192)


def one_disk(disk: LinkModel, hbm: LinkModel | None = None) -> Links:
    return Links(
        ["disk"], {reload_link(): hbm or LinkModel(50e-6, 4e-6, 50e9), read_link("disk"): disk}
    )


def bare_link(bytes_per_second: float) -> LinkModel:
    return LinkModel(0.0, 0.0, bytes_per_second)


def plan(
    num_blocks: int,
    links: Links,
    source: int = DISK,
    mode: CostMode = CostMode.AUTO,
    margin: float = 0.0,
    prefill: PrefillModel | None = None,
) -> ReloadPlan:
    """Plan for a prompt of whole blocks that are all on one tier."""
    return plan_reload(
        np.full(num_blocks, source, np.uint8),
        np.ones(num_blocks + 1, bool),
        Prompt(max(1, num_blocks * BLOCK_SIZE), 0, BLOCK_SIZE, BLOCK_NBYTES),
        links,
        prefill or h100(),
        PlanPolicy(mode, margin),
    )
