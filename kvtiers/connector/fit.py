"""Whether this machine can hold the tiers of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtiers.data.disk_check import check_medium
from kvtiers.data.file_medium import judge_medium
from kvtiers.data.host_memory import available_memory
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import DramTier, LmdbTier, MemoryTier, NvmeTier
from kvtiers.model.errors import CapacityError, PlacedError
from kvtiers.model.units import format_size


def misfits(config: Config) -> list[PlacedError]:
    """Return what of a configuration this machine cannot hold; nothing is made or changed.

    The tiers of one engine are judged, each by itself: engines that share the machine are not
    known here.
    """
    found = _refusal(partial(check_memory, config))
    for idx, tier in enumerate(config.tiers):
        if isinstance(tier, NvmeTier):
            share = tier.capacity // len(tier.paths)
            for path in tier.paths:
                found += _refusal(partial(judge_medium, path, tier.direct), idx, "paths")
                found += _refusal(partial(_check_disk, path, share, "the file store"), idx)
        elif isinstance(tier, LmdbTier):
            size = tier.capacity * 5 // 4
            found += _refusal(partial(_check_disk, tier.path, size, "the LMDB store"), idx)
    return found


def check_memory(config: Config) -> None:
    """Refuse tiers that together exceed what this machine can give.

    All of the engine's ranks are counted: each is a little less than it may use, but none has
    touched its share when the others look.

    Raises:
        CapacityError: with the tier at which the sum passes the limit.
    """
    available = available_memory()
    if available is None:
        return
    total = 0
    for idx, tier in enumerate(config.tiers):
        if not isinstance(tier, DramTier | MemoryTier):
            continue
        total += tier.capacity
        if total > available.nbytes:
            raise CapacityError(
                f"{format_size(tier.capacity)} makes {format_size(total)} of host memory in all, "
                f"but {available.bound} leaves {format_size(available.nbytes)}; write less",
                ("tiers", idx, "capacity"),
            )


def _refusal(check: Callable[[], object], idx: int = 0, key: str = "capacity") -> list[PlacedError]:
    try:
        check()
    except PlacedError as error:
        error.path = error.path or ("tiers", idx, key)
        return [error]
    return []


def _check_disk(path: Path, capacity_nbytes: int, what: str) -> None:
    check_medium(path, capacity_nbytes, _taken_nbytes(path), what)


def _taken_nbytes(path: Path) -> int:
    """Return what the files below a path take on disk."""
    files = (file for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_blocks * 512 for file in files) if path.is_dir() else 0
