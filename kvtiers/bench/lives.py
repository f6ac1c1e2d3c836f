"""Engines of a measured comparison, each with the tiers of what it measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers.bench.plan import DRAM, LMDB, NVME, STAGING_SLOTS, MeasuredPlan
from kvtiers.bench.throttle import ThrottledStore
from kvtiers.data.store import BlockStore
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.one_request import OneRequestEngine, OneRequestSettings
from kvtiers.model.config import Config, parse_mapping


class Lives:
    """Makes engines of one model, over stores in one folder.

    Args:
        folder: empty; whoever made it removes it.
    """

    def __init__(self, plan: MeasuredPlan, folder: Path) -> None:
        self.plan = plan
        self.model = ReferenceModel(plan.shape, plan.device)
        self.document: list[int] = (
            np.random.default_rng(plan.seed)
            .integers(0, plan.shape.vocab_size, plan.lengths[-1])
            .tolist()
        )
        self._folder = folder

    def plain(self) -> OneRequestEngine:
        """Return an engine without kvtiers."""
        return OneRequestEngine(self.model, self._settings())

    def with_dram(self) -> OneRequestEngine:
        """Return an engine whose DRAM holds the document."""
        engine = OneRequestEngine(self.model, self._settings(), self._config(full=True))
        self._fill(engine)
        return engine

    def fill(self, stores: Sequence[str], num_ranges: int = 1) -> None:
        """Live once, and leave the document in stores."""
        config = self._config(*stores, full=True, num_ranges=num_ranges)
        engine = OneRequestEngine(self.model, self._settings(), config)
        try:
            self._fill(engine)
        finally:
            engine.close()

    def reader(self, store: str, num_ranges: int = 1) -> OneRequestEngine:
        """Return a new life, that finds the document in a store, and keeps next to nothing."""
        config = self._config(store, full=False, num_ranges=num_ranges)
        return OneRequestEngine(self.model, self._settings(), config, self._slowed)

    def _fill(self, engine: OneRequestEngine) -> None:
        engine.generate(self.document)
        engine.settle()

    def _settings(self) -> OneRequestSettings:
        plan = self.plan
        return OneRequestSettings(plan.num_blocks + 1, plan.block_size, plan.max_tokens_per_step)

    def _slowed(self, name: str, store: BlockStore) -> BlockStore:  # noqa: ARG002 - all alike
        throttle = self.plan.throttle
        return store if throttle is None else ThrottledStore(store, throttle)

    def _config(self, *stores: str, full: bool, num_ranges: int = 1) -> Config:
        plan = self.plan
        num_slots = (plan.num_blocks + 2 if full else STAGING_SLOTS) * num_ranges
        capacity = f"{plan.slots_nbytes(num_slots, num_ranges)}B"
        split = num_ranges > 1
        nbytes = f"{plan.split_store_nbytes if split else plan.store_nbytes}B"
        folder = self._folder / ("split" if split else "whole")
        below: dict[str, dict[str, Any]] = {
            NVME: {"kind": "nvme", "paths": [str(folder / "nvme")], "capacity": nbytes},
            LMDB: {"kind": "lmdb", "path": str(folder / "shared.lmdb"), "capacity": nbytes},
        }
        return parse_mapping(
            {
                "tiers": [{"kind": DRAM, "capacity": capacity}, *(below[s] for s in stores)],
                "cost": {"mode": "always"},
                # Whole blocks come between steps, so that a load has a time of its own; from the
                # tier that is measured, and as long as it takes.
                "reload": {
                    "sync_below": "0ms",
                    "deadline": "10min",
                    "lookup_deadline": "10s",
                    "prefetch": "off",
                    "layer_ranges": num_ranges,
                },
            }
        )
