"""Prefill of an 8B-shaped model, fitted, and from which prefix length on a reload is faster."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from gpu_machine import Machine
from gpu_pipeline import STORE, Jobs

from kvtiers.cost.break_even import break_even_tokens
from kvtiers.cost.links import (
    HBM_SEED,
    STORE_READ_SEEDS,
    LinkModel,
    Links,
    LinkSeed,
    StoreKind,
    read_link,
    reload_link,
)
from kvtiers.cost.prefill import MeasuredPrefill, PrefillModel
from kvtiers.model.messages import DRAM, Link

BLOCK_TOKENS = 16
LONGEST_TOKENS = 131_072


class Layer:
    """One decoder layer of the model, random weights; its cost is what counts."""

    def __init__(self, machine: Machine) -> None:
        shape, hidden = machine.sizes.model, machine.sizes.model.hidden_size
        self.heads, self.kv_heads, self.size = (
            shape.num_query_heads, shape.num_kv_heads, shape.head_size)  # fmt: skip
        rows = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv = machine.numbers(rows, hidden)
        self.out = machine.numbers(hidden, self.heads * self.size)
        self.gate_up = machine.numbers(2 * machine.sizes.feed_forward, hidden)
        self.down = machine.numbers(hidden, machine.sizes.feed_forward)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        functional = torch.nn.functional
        n = len(x)
        qkv = functional.rms_norm(x, x.shape[-1:]) @ self.qkv.T
        qkv = qkv.view(n, self.heads + 2 * self.kv_heads, self.size).transpose(0, 1)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads))
        attended = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        x = x + attended[0].transpose(0, 1).reshape(n, -1) @ self.out.T
        gate, up = (functional.rms_norm(x, x.shape[-1:]) @ self.gate_up.T).chunk(2, -1)
        return x + (functional.silu(gate) * up) @ self.down.T


def measure_prefill(machine: Machine, jobs: Jobs) -> Iterator[dict[str, Any]]:
    """Time one layer, times their number; judge the fit on prompts that it has not seen."""
    shape, layer = machine.sizes.model, Layer(machine)
    found: dict[int, float] = {}
    for n in machine.sizes.prompts:
        x = machine.numbers(n, shape.hidden_size)
        with torch.inference_mode():
            layer(x)
            times = [machine.seconds(lambda x=x: layer(x)) for _ in range(machine.sizes.repeats)]
        found[n] = statistics.median(times) * shape.num_layers
    prefill = fitted(machine, list(found.items()))
    lengths = list(found)
    for i, n in enumerate(lengths):
        judge = fitted(machine, [item for item in found.items() if item[0] != n])
        predicted = float(judge.seconds(n))
        yield {
            "tokens": n,
            "seconds": found[n],
            "tflop_s": float(shape.prefill_flops(n)) / found[n] / 1e12,
            "error_unseen": predicted / found[n] - 1 if 0 < i < len(lengths) - 1 else None,
        }
    yield from crossovers(machine, prefill, jobs)


def fitted(machine: Machine, prompts: list[tuple[int, float]]) -> PrefillModel:
    """Return the cost model's prefill for this device: of its layers alone, without an engine."""
    model = PrefillModel(0.0, 4e14, machine.sizes.model, LONGEST_TOKENS)
    model.fit([MeasuredPrefill(n, 0, seconds) for n, seconds in prompts])
    return model


def crossovers(machine: Machine, prefill: PrefillModel, jobs: Jobs) -> Iterator[dict[str, Any]]:
    """Yield, for DRAM and the disk that were measured, the shortest prefix worth a reload."""
    if not jobs.reload or not jobs.read:
        return
    measured = {
        reload_link(): seed_of(HBM_SEED, jobs.reload),
        read_link(STORE): seed_of(STORE_READ_SEEDS[StoreKind.NVME], jobs.read),
    }
    links = Links.seeded({STORE: StoreKind.NVME}, measured=measured)
    nbytes = machine.sizes.model.kv_nbytes_per_token() * BLOCK_TOKENS
    for source, (tier, link) in enumerate(zip((DRAM, STORE), measured, strict=True)):
        tokens = break_even_tokens(source, BLOCK_TOKENS, nbytes, LONGEST_TOKENS, links, prefill)
        yield {
            "tier": tier,
            "link_gb_s": measured[link].bandwidth_bytes_per_second / 1e9,
            "reload_from_tokens": tokens,
        }


def seed_of(seed: LinkSeed, jobs: list[Link]) -> LinkSeed:
    """Return what jobs say of a link."""
    model = LinkModel.of(seed)
    model.fit(jobs)
    return LinkSeed(
        model.latency_seconds, model.seconds_per_piece, model.bandwidth_bytes_per_second
    )
