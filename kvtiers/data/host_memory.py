"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_UNLIMITED: Final = 2**62  # version 1 control groups write "no limit" as 2**63 less a page


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What can be allocated, with its reason.

    Attributes:
        nbytes: bytes that the tightest bound leaves; 0 when nothing is left.
        bound: what that bound is, as a message names it.
    """

    nbytes: int
    bound: str


def available_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> HostMemory | None:
    """Return what the machine and the control groups of this process leave, None if unknown.

    Page cache counts as free on both levels: the kernel gives it up under pressure.

    Args:
        proc: where procfs is mounted. cgroups: where the control groups are.
    """
    bounds = list(_cgroup_bounds(proc, cgroups))
    machine = _table(proc / "meminfo").get("MemAvailable")
    if machine is not None:
        bounds.append(HostMemory(machine * 1024, "MemAvailable of the machine"))
    return min(bounds, key=lambda bound: bound.nbytes, default=None)


def _cgroup_bounds(proc: Path, cgroups: Path) -> Iterator[HostMemory]:
    """Yield the room in each control group that holds this process, up to the root."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [cgroups, cgroups / "unified"]
            names, prefix = ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            mounts = [cgroups / "memory"]
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        for mount in mounts:
            here = mount / path.lstrip("/")
            # In a container the path may be the host's; the mount's root is then the container's.
            for folder in (here, *here.parents):
                if folder.is_relative_to(mount):
                    yield from _room(folder, names, prefix)


def _room(folder: Path, names: tuple[str, str], prefix: str) -> Iterator[HostMemory]:
    """Yield what one control group leaves, nothing when it sets no limit."""
    limit, usage = (_text(folder / name).strip() for name in names)
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return
    stat = _table(folder / "memory.stat")
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    left = int(limit) - max(0, int(usage) - cache)
    yield HostMemory(max(0, left), f"{names[0]} of the control group ({int(limit)} bytes)")


def _table(path: Path) -> dict[str, int]:
    """Return the numbers of a file of ``name value`` lines."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    """Return a file's text, "" where the kernel does not offer it."""
    try:
        return path.read_text()
    except OSError:
        return ""
