"""What this machine offers a KV cache: cores, caches, memory, huge pages, GPUs."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_FLAGS: Final = ("avx2", "avx512f")
_SIZE_LETTERS: Final = {"K": 2**10, "M": 2**20, "G": 2**30}
_LIBCUDA: Final = "libcuda.so.1"
_CGROUP_LIMITS: Final = (
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    memory_nbytes: int


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """The CUDA driver of this machine.

    Attributes:
        version: the newest CUDA that it serves, such as "12.8".
        fault: why no GPU can be used; None when they can.
    """

    version: str
    gpus: tuple[Gpu, ...]
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the operating system says; None where it does not say.

    Attributes:
        num_cores: cores that this process may use.
        l3_nbytes: all third-level caches together.
        memory_limit_nbytes: the container's own limit.
        memlock_nbytes: what a process may page-lock by itself; None without a limit.
        transparent_huge_pages: "always", "madvise" or "never".
        cpu_features: of "avx2" and "avx512f", those that every core has.
    """

    num_cores: int
    l3_nbytes: int | None
    memory_total_nbytes: int | None
    memory_available_nbytes: int | None
    memory_limit_nbytes: int | None
    memlock_nbytes: int | None
    transparent_huge_pages: str | None
    num_free_huge_pages: int | None
    cpu_features: tuple[str, ...]


def probe_machine(root: Path = Path("/")) -> Machine:
    """Read the machine's properties.

    Args:
        root: the directory that holds ``proc`` and ``sys``.
    """
    memory = dict(_fields(root / "proc/meminfo"))
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        l3_nbytes=_l3_nbytes(root),
        memory_total_nbytes=_kib(memory.get("MemTotal")),
        memory_available_nbytes=_kib(memory.get("MemAvailable")),
        memory_limit_nbytes=_memory_limit_nbytes(root),
        memlock_nbytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
        transparent_huge_pages=_transparent_huge_pages(root),
        num_free_huge_pages=_integer(memory.get("HugePages_Free")),
        cpu_features=_cpu_features(root),
    )


def probe_cuda(open_library: Callable[[str], Any] = ctypes.CDLL) -> CudaDriver | None:
    """Ask the CUDA driver for its version and GPUs; None where no driver is installed."""
    try:
        driver = open_library(_LIBCUDA)
    except OSError:
        return None
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    status = driver.cuInit(0)
    if status != 0:
        return CudaDriver(version, (), f"cuInit answered error {status}")
    count = ctypes.c_int()
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        return CudaDriver(version, (), f"cuDeviceGetCount answered error {status}")
    return CudaDriver(version, tuple(_gpu(driver, ordinal) for ordinal in range(count.value)))


def _gpu(driver: Any, ordinal: int) -> Gpu:
    device, nbytes, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    return Gpu(name.value.decode(errors="replace"), nbytes.value)


def _l3_nbytes(root: Path) -> int | None:
    """Return the sum of all third-level caches, each counted once."""
    caches: dict[str, int] = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        size, cpus = _read(folder / "size"), _read(folder / "shared_cpu_list")
        if size is None or cpus is None or size[-1:] not in _SIZE_LETTERS:
            return None
        caches[cpus] = int(size[:-1]) * _SIZE_LETTERS[size[-1]]
    return sum(caches.values()) if caches else None


def _memory_limit_nbytes(root: Path) -> int | None:
    limits = [_integer(_read(root / path)) for path in _CGROUP_LIMITS]
    return next((limit for limit in limits if limit is not None and limit < 2**60), None)


def _transparent_huge_pages(root: Path) -> str | None:
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = [word.strip("[]") for word in text.split() if word.startswith("[")]
    return chosen[0] if chosen else None


def _cpu_features(root: Path) -> tuple[str, ...]:
    flags = [
        set(value.split()) for name, value in _fields(root / "proc/cpuinfo") if name == "flags"
    ]
    shared = set.intersection(*flags) if flags else set()
    return tuple(flag for flag in _FLAGS if flag in shared)


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the ``name: value`` lines of a file of the kernel's."""
    for line in (_read(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip()


def _kib(text: str | None) -> int | None:
    number = _integer(text.removesuffix(" kB")) if text is not None else None
    return number * 1024 if number is not None else None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
