"""Engines on paper for tests: a small machine whose links and steps have round numbers."""

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

from kvtiers.cost.links import LinkSeed
from kvtiers.cost.prefill import ModelShape, PrefillSpeed
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import parse_mapping

# 1 GFLOP a token, 1 KiB of KV: a step of 100 tokens takes 5 + 100 ms.
SHAPE = ModelShape(num_layers=4, num_query_heads=4, head_size=16, linear_params=500_000_000)
SPEED = PrefillSpeed(0.005, 1e12)
KV_NBYTES = 1024
STORES = ("memory", "nvme", "lmdb")
WAYS = [f"{name}>dram" for name in ("hbm", *STORES)] + [f"dram>{name}" for name in ("hbm", *STORES)]
SLOW = {"links": dict.fromkeys(WAYS, LinkSeed(0.05, 1e-3, 1e8))}  # loads take several steps
NOWHERE = Path(tempfile.gettempdir()) / "kvtiers-of-no-engine"


def machine_of(**more):
    fast = LinkSeed(1e-4, 1e-6, 1e9)
    slow = LinkSeed(1e-3, 1e-5, 1e8)
    links = {"hbm>dram": fast, "dram>hbm": fast}
    for name in STORES:
        links |= {f"{name}>dram": slow, f"dram>{name}": slow}
    return ModelledMachine(
        **{
            "model": SHAPE,
            "speed": SPEED,
            "kv_nbytes_per_token": KV_NBYTES,
            "links": links,
            **more,
        }
    )


def tiers_of(
    *kinds, dram="1MiB", mode="auto", offload="eager", below="4MiB", sync_below="5ms", **more
):
    where = {
        "memory": {},
        "nvme": {"paths": [str(NOWHERE)]},
        "lmdb": {"path": str(NOWHERE.with_suffix(".lmdb"))},
    }
    stores = [{"kind": kind, "capacity": below, **where[kind], **more} for kind in kinds]
    return parse_mapping(
        {
            "tiers": [{"kind": "dram", "capacity": dram, "pin": "off"}, *stores],
            "cost": {"mode": mode},
            "policy": {"offload": offload},
            "reload": {"sync_below": sync_below},
        }
    )


def settings_of(num_blocks=64, **more):
    return EngineSettings(
        **{
            "num_blocks": num_blocks,
            "max_model_len": 64,
            "block_size": 4,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 6,
            "watermark": 0.05,
            **more,
        }
    )


def big_engine(budget=8192, **more):
    """An engine whose pool never binds."""
    sizes = {"num_blocks": 4096, "max_model_len": 40_000, "block_size": 16, "watermark": 0.01}
    return engine_of(EngineSettings(**{**sizes, "max_num_batched_tokens": budget, **more}))


def decoding(engine, num, max_tokens=200):
    """Bring so many requests to where each decodes."""
    for idx in range(num):
        engine.add(request_of(f"d{idx}", 16, max_tokens))
    wanted = {f"d{idx}": 1 for idx in range(num)}
    for _ in range(50):
        if engine.step().num_tokens == wanted:
            return
    raise AssertionError(f"{num} requests never decoded together")


def engine_of(settings=None, config=None, **more):
    return modelled_engine(settings or settings_of(), machine_of(**more), config)


def hashes_of(document, num, num_shared=2):
    """Documents have their first blocks in common."""
    return [
        bytes([0 if idx < num_shared else 1 + document, idx]).ljust(32, b"\1") for idx in range(num)
    ]


def request_of(name, num_prompt=20, max_tokens=4, **more):
    return NewRequest(
        name, more.pop("arrived_at", 0.0), max_tokens, num_prompt_tokens=num_prompt, **more
    )


def run(engine, max_steps=5000):
    """Step until nobody is left; returns the reports."""
    reports = []
    while engine.num_unfinished:
        reports.append(engine.step())
        assert len(reports) < max_steps, engine.gauges
    return reports


def counting(engine):
    """Number the tokens that a virtual model generates: 1, 2, 3, ..."""
    num, run_step = itertools.count(1), engine.runner.run

    def numbered(work, orders):
        result = run_step(work, orders)
        tokens = {name: [next(num) for _ in got] for name, got in result.tokens.items()}
        return replace(result, tokens=tokens)

    engine.runner.run = numbered
