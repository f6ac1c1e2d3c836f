"""Sizes of tiers that are worth considering, and the configuration that each one is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvtiers.model.config import Config, parse_mapping
from kvtiers.model.config_yaml import write_yaml
from kvtiers.model.frame import slot_nbytes_of
from kvtiers.model.units import format_size
from kvtiers.simulate.machine import MachinePlan

STORE: Final = "nvme"
_GIB: Final = 2**30
_FOLDER: Final = "/mnt/nvme0/kvtiers"


@dataclass(frozen=True, slots=True)
class Size:
    """Tiers of some sizes, in bytes; 0 for none."""

    dram_nbytes: int
    nvme_nbytes: int

    def __str__(self) -> str:
        parts = [
            f"{name} {format_size(nbytes)}"
            for name, nbytes in (("DRAM", self.dram_nbytes), ("NVMe", self.nvme_nbytes))
            if nbytes
        ]
        return " + ".join(parts) or "no tiers"

    def within(self, other: Size) -> bool:
        """Whether no tier is larger than that of another one."""
        return self.dram_nbytes <= other.dram_nbytes and self.nvme_nbytes <= other.nvme_nbytes

    def config(self, policy: str) -> Config | None:
        """Return the configuration of such tiers; None without any."""
        if not self.dram_nbytes:
            return None
        tiers: list[dict[str, Any]] = [{"kind": "dram", "capacity": f"{self.dram_nbytes}B"}]
        if self.nvme_nbytes:
            tiers.append(
                {
                    "kind": STORE,
                    "paths": [_FOLDER],
                    "capacity": f"{self.nvme_nbytes}B",
                    "write": "back",
                }
            )
        return parse_mapping({"tiers": tiers, "policy": {"evict": policy}})


def candidates(working_set_nbytes: float, block_nbytes: float = 0.0) -> list[Size]:
    """Return the sizes to consider: none first, then all pairs of powers of two, and last DRAM
    for all that is ever used again.

    Args:
        block_nbytes: of a block, which a tier has to hold.
    """
    least = max(_GIB, _up(block_nbytes))
    every = max(least, _up(working_set_nbytes * 1.05))
    drams = [nbytes for nbytes in _doubling(4 * _GIB, 4096 * _GIB) if least <= nbytes < every]
    stores = [nbytes for nbytes in _doubling(64 * _GIB, 65_536 * _GIB) if nbytes < 2 * every]
    found = {Size(0, 0): None}
    for dram in drams or [least]:
        found |= dict.fromkeys(Size(dram, store) for store in (0, *stores))
    largest = Size(every, 0)
    found.pop(largest, None)
    return [*found, largest]


def minimal_yaml(config: Config) -> str:
    """Return a configuration as YAML, with the keys that were set and no defaults."""
    return write_yaml(config.model_dump(mode="json", by_alias=True, exclude_unset=True))


def frame_nbytes_per_token(machine: MachinePlan) -> float:
    """Return the bytes that a tier needs for a token, on all ranks: frames have headers."""
    payload = machine.block_size * machine.memory().kv_nbytes_per_token
    return slot_nbytes_of(payload) * machine.tensor_parallel_size / machine.block_size


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _up(nbytes: float) -> int:
    """Round up to whole GiB."""
    return -int(-nbytes // _GIB) * _GIB
