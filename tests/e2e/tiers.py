"""kvtiers inside a real engine, in the words of a test: tiers, counters, what is at rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtiers.model.keys import group_of
from kvtiers.observe.metrics import TOKENS_RELOADED
from kvtiers.testing.invariants import check_controller

from .harness import Engine, EngineOptions

#: TINY's blocks: 128 KiB of KV and a 4 KiB header.
SLOT_NBYTES = 132 * 1024
#: The folder of rank 0 of instance 0 below an NVMe path.
RANK = f"0/0-{SLOT_NBYTES}"


def dram(capacity: str = "256MiB", *below: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a configuration with a DRAM tier, tiers below it, and reloads whenever possible."""
    tiers = [{"kind": "dram", "capacity": capacity}, *below]
    return {"tiers": tiers, "cost": {"mode": "always"}, **sections}


def memory(capacity: str = "256MiB", **options: Any) -> dict[str, Any]:
    """Return the tier below DRAM."""
    return {"kind": "memory", "capacity": capacity, **options}


def nvme(*paths: Path, capacity: str = "64MiB", **options: Any) -> dict[str, Any]:
    """Return a tier of files."""
    named = [str(path) for path in paths]
    return {"kind": "nvme", "paths": named, "capacity": capacity, **options}


def lmdb(path: Path, capacity: str = "64MiB", **options: Any) -> dict[str, Any]:
    """Return a shared tier."""
    return {"kind": "lmdb", "path": str(path), "capacity": capacity, **options}


def tiered(options: EngineOptions, config: Mapping[str, Any]) -> EngineOptions:
    """Return the same engine with kvtiers."""
    return replace(options, kvtiers=config)


class Tiers:
    """The two connector objects of an in-process engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scheduler = engine.inside.scheduler_connector.scheduler_side.connector
        self.worker = engine.inside.worker_connector.worker_side.connector
        self._before = self.counted()

    @property
    def controller(self) -> Any:
        """The deciding plane."""
        return self.scheduler.controller

    def counted(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return all counters since the engine started."""
        return dict(self.scheduler.counters.snapshot().counters)

    def count(self, name: str, *labels: str) -> int:
        """Return what one counter gained since these tiers were looked at first."""
        key = (name, labels)
        return int(self.counted().get(key, 0) - self._before.get(key, 0))

    def reloaded_tokens(self, tier: str = "dram") -> int:
        """Return the tokens that came from a tier."""
        return self.count(TOKENS_RELOADED, tier)

    def by_tier(self) -> dict[str, int]:
        """Return the tokens that came from each tier, without zeros."""
        names = {labels[0] for name, labels in self.counted() if name == TOKENS_RELOADED}
        return {name: num for name in names if (num := self.reloaded_tokens(name))}

    def store(self, name: str) -> Any:
        """Return a rank's store, as the data plane holds it."""
        return self.worker._executor._executor._shop.stores._stores[name]

    def assert_at_rest(self) -> None:
        """Assert that nothing is pinned, fenced or under way, and that no slot is lost."""
        self._engine.settle()
        check_controller(self.controller)
        assert (len(self.controller.jobs), len(self.controller.fences)) == (0, 0)
        assert self.controller.dram.num_pins == 0

    def spoil_slab(self) -> int:
        """Overwrite the payload of every frame in DRAM; returns how many there were."""
        shop = self.worker._executor._executor._shop
        entries = list(self.controller.dram.entries())
        for entry in entries:
            header = shop.formats[group_of(entry.key)].header_nbytes
            view = shop.slab.view(entry.slot)
            view[header:] = bytes(b ^ 0x3C for b in view[header:])
        return len(entries)
