"""The catalogue of devices and media: their makers' figures, and how much of them is reached."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, TypeVar

from kvtiers.cost.hardware import Figure, Hardware, Storage
from kvtiers.model.errors import ConfigError

GB: Final = 10**9

# How much is reached. None of it comes from a published comparison of reload and recompute.

_MAMF: Final = "largest bf16 matmul found, stas00/ml-engineering, compute/accelerator, MAMF table"
_MATMUL_H100: Final = {
    "bf16": Figure(794.5 / 989, _MAMF + ": H100 SXM 794.5 of 989"),
    "fp8": Figure(1402.6 / 1979, _MAMF + ", fp8: H100 SXM 1402.6 of 1979"),
}
_MATMUL_H200: Final = {
    "bf16": Figure(828.6 / 989, _MAMF + ": GH200 (the same chip with HBM3e) 828.6 of 989"),
    "fp8": Figure(1535.0 / 1979, _MAMF + ", fp8: GH200 1535.0 of 1979"),
}
_MATMUL_A100: Final = {"bf16": Figure(271.2 / 312, _MAMF + ": A100 SXM 271.2 of 312")}
_MATMUL_PCIE: Final = {"bf16": Figure(252.9 / 312, _MAMF + ": A100 PCIe 252.9 of 312")}
_MATMUL_OTHER: Final = {
    "bf16": Figure(252.9 / 312, _MAMF + ": A100 PCIe, for want of a figure of this device")
}
_ATTENTION_HOPPER: Final = Figure(
    614.2 / 989,
    "FlashAttention-3 forward, H100, head size 128, 8,192 tokens: 614.2 TFLOP/s "
    "(pytorch/benchmark pull request 2391)",
)
_ATTENTION_AMPERE: Final = Figure(
    0.615, "FlashAttention-2 paper, abstract: 50 to 73 % of the peak on an A100; the middle"
)
_ATTENTION_BLACKWELL: Final = Figure(
    614.2 / 989, "FlashAttention-3 on an H100, for want of a figure of this device"
)
_STEP: Final = Figure(
    0.0037,
    "vLLM 0.23, Llama-3.1-8B, A100 40GB, batch 1: 75 tokens/s, 13.3 ms a step, of which reading "
    "15.0 GB of weights at 1,555 GB/s takes 9.6 (johnmusgrave.com, throughput-latency sweep)",
)
_STEP_CPU: Final = Figure(0.005, "an order of magnitude, not measured")
_COPY: Final = Figure(4e-6, "H2D copies of 4 KiB, one DMA each, on an H100: 1.1 GB/s, 3.7 us each")
_LINK_GEN5: Final = Figure(
    52.8e9, "PCIe 5 x16, 64 GB/s raw: nvbandwidth on an H100, 52.8 (NVIDIA/nvbandwidth issue 24)"
)
_LINK_GEN4: Final = Figure(
    25.1e9, "PCIe 4 x16, 32 GB/s raw: nvbandwidth on an A100, 25.1 (NVIDIA/nvbandwidth issue 42)"
)
_LINK_4090: Final = Figure(
    26.1e9,
    "PCIe 4 x16: nvbandwidth on eight RTX 4090, median 26.2 H2D (NVIDIA/nvbandwidth issue 15)",
)


def _sheet(device: str) -> str:
    return f"NVIDIA's data sheet of the {device}"


def _flops(device: str, **tera: float) -> Mapping[str, Figure]:
    source = f"{_sheet(device)}, dense"
    return {dtype: Figure(value * 1e12, source) for dtype, value in tera.items()}


def _gpu(  # noqa: PLR0913 - one argument a column
    device: str,
    *,
    flops: Mapping[str, float],
    matmul: Mapping[str, Figure],
    attention: Figure,
    memory_gb: float,
    memory_gbps: float,
    host: Figure,
    peer_gbps: float | None = None,
) -> Hardware:
    """Return a GPU; `peer_gbps`: NVLink, both ways together; None: over the host link."""
    sheet = _sheet(device)
    nvlink = None if peer_gbps is None else Figure(peer_gbps / 2 * GB, f"{sheet}, NVLink one way")
    return Hardware(
        title=device,
        peak_flops=MappingProxyType(_flops(device, **flops)),
        matmul_efficiency=MappingProxyType(dict(matmul)),
        attention_dtype="bf16",
        attention_efficiency=attention,
        memory_nbytes=Figure(memory_gb * GB, sheet),
        memory_bandwidth=Figure(memory_gbps * GB, sheet),
        host_bandwidth=host,
        seconds_per_copy=_COPY,
        peer_bandwidth=nvlink or host,
        step_seconds=_STEP,
    )


_EPYC: Final = "AMD's data sheet of the EPYC 9654"
_HERE: Final = "measured on a 2-core EPYC VM, November 2026"

HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "h100": _gpu(
            "H100 SXM",
            flops={"bf16": 989, "fp8": 1979},
            matmul=_MATMUL_H100,
            attention=_ATTENTION_HOPPER,
            memory_gb=80,
            memory_gbps=3350,
            host=_LINK_GEN5,
            peer_gbps=900,
        ),
        "h100-pcie": _gpu(
            "H100 PCIe",
            flops={"bf16": 756, "fp8": 1513},
            matmul=_MATMUL_OTHER,
            attention=_ATTENTION_HOPPER,
            memory_gb=80,
            memory_gbps=2000,
            host=_LINK_GEN5,
        ),
        "h200": _gpu(
            "H200 SXM",
            flops={"bf16": 989, "fp8": 1979},
            matmul=_MATMUL_H200,
            attention=_ATTENTION_HOPPER,
            memory_gb=141,
            memory_gbps=4800,
            host=_LINK_GEN5,
            peer_gbps=900,
        ),
        "b200": _gpu(
            "B200 (HGX)",
            flops={"bf16": 2250, "fp8": 4500},
            matmul=_MATMUL_OTHER,
            attention=_ATTENTION_BLACKWELL,
            memory_gb=180,
            memory_gbps=7700,
            host=_LINK_GEN5,
            peer_gbps=1800,
        ),
        "a100": _gpu(
            "A100 80GB SXM",
            flops={"bf16": 312},
            matmul=_MATMUL_A100,
            attention=_ATTENTION_AMPERE,
            memory_gb=80,
            memory_gbps=2039,
            host=_LINK_GEN4,
            peer_gbps=600,
        ),
        "a100-pcie": _gpu(
            "A100 80GB PCIe",
            flops={"bf16": 312},
            matmul=_MATMUL_PCIE,
            attention=_ATTENTION_AMPERE,
            memory_gb=80,
            memory_gbps=1935,
            host=_LINK_GEN4,
        ),
        "l40s": _gpu(
            "L40S",
            flops={"bf16": 362, "fp8": 733},
            matmul=_MATMUL_OTHER,
            attention=_ATTENTION_AMPERE,
            memory_gb=48,
            memory_gbps=864,
            host=_LINK_GEN4,
        ),
        "a10g": _gpu(
            "A10G",
            flops={"bf16": 70},
            matmul=_MATMUL_OTHER,
            attention=_ATTENTION_AMPERE,
            memory_gb=24,
            memory_gbps=600,
            host=_LINK_GEN4,
        ),
        "rtx4090": _gpu(
            "RTX 4090 (Ada white paper, fp32 accumulation)",
            flops={"bf16": 165.2, "fp8": 330.3},
            matmul=_MATMUL_OTHER,
            attention=_ATTENTION_AMPERE,
            memory_gb=24,
            memory_gbps=1008,
            host=_LINK_4090,
        ),
        "epyc-9654": Hardware(
            title="EPYC 9654, 96 cores",
            peak_flops={
                "fp32": Figure(
                    96 * 2.4e9 * 32, f"{_EPYC}: cores, base clock; two 256-bit FMA a cycle"
                )
            },
            matmul_efficiency={
                "fp32": Figure(252.9 / 312, _MAMF + ": A100 PCIe, for want of a figure of a CPU")
            },
            attention_dtype="fp32",
            attention_efficiency=Figure(0.615, "as FlashAttention-2, for want of one of a CPU"),
            memory_nbytes=Figure(12 * 64 * GB, "one 64 GB module a channel, an assumption"),
            memory_bandwidth=Figure(460.8e9, f"{_EPYC}: 12 channels of DDR5-4800"),
            host_bandwidth=Figure(48e9, f"four copy threads, 12 GB/s each {_HERE}"),
            seconds_per_copy=Figure(1e-6, "an order of magnitude, not measured"),
            peer_bandwidth=Figure(48e9, f"as the copy threads, {_HERE}"),
            step_seconds=_STEP_CPU,
        ),
    }
)

_PIECE: Final = Figure(20e-6, "a system call and its completion; an order of magnitude")
_FLASH: Final = Figure(200e-6, "an order of magnitude of NVMe reads in a queue")

STORAGE: Final[Mapping[str, Storage]] = MappingProxyType(
    {
        "nvme-gen5": Storage(
            "Gen5 NVMe",
            Figure(14e9, "Samsung's data sheet of the PM1743"),
            Figure(7.1e9, "Samsung's data sheet of the PM1743"),
            _FLASH,
            _PIECE,
        ),
        "nvme-gen4": Storage(
            "Gen4 NVMe",
            Figure(6.9e9, "Samsung's data sheet of the PM9A3"),
            Figure(4.1e9, "Samsung's data sheet of the PM9A3"),
            _FLASH,
            _PIECE,
        ),
        "nvme-vm": Storage(
            "NVMe of a small VM",
            Figure(2.4e9, f"O_DIRECT, 2 MiB, depth 16, {_HERE}"),
            Figure(4.6e9, f"O_DIRECT, 2 MiB, depth 16, {_HERE}"),
            _FLASH,
            _PIECE,
        ),
        "sata": Storage(
            "SATA SSD",
            Figure(0.55e9, "the interface, 6 Gbit/s"),
            Figure(0.52e9, "the interface, 6 Gbit/s"),
            _FLASH,
            _PIECE,
        ),
        "lmdb": Storage(
            "LMDB, cold",
            Figure(1.9e9, f"2 MiB values, cold, {_HERE}"),
            Figure(0.34e9, f"2 MiB values, synced, {_HERE}"),
            _FLASH,
            _PIECE,
        ),
    }
)


# What CUDA calls a device -> its name here; the first that the driver's name contains.
_DRIVER_NAMES: Final = (
    ("H100 PCIe", "h100-pcie"),
    ("H100 80GB HBM3", "h100"),
    ("H200", "h200"),
    ("B200", "b200"),
    ("A100-SXM4-80GB", "a100"),
    ("A100 80GB PCIe", "a100-pcie"),
    ("L40S", "l40s"),
    ("A10G", "a10g"),
    ("GeForce RTX 4090", "rtx4090"),
)


def hardware_of_driver(name: str) -> Hardware | None:
    """Return the device that a CUDA driver calls ``name``; None for one without figures.

    A partition of a device (MIG) is not the device.
    """
    if "MIG" in name:
        return None
    found = next((known for part, known in _DRIVER_NAMES if part in name), None)
    return None if found is None else HARDWARE[found]


_Entry = TypeVar("_Entry", Hardware, Storage)


def known_hardware(name: str) -> Hardware:
    """Return what a name stands for; raises ConfigError with the known ones."""
    return _known(name, HARDWARE, "hardware")


def known_storage(name: str) -> Storage:
    """Return what a name stands for; raises ConfigError with the known ones."""
    return _known(name, STORAGE, "storage")


def _known(name: str, entries: Mapping[str, _Entry], kind: str) -> _Entry:
    found = entries.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), entries, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"no {kind} {name!r} is known{hint} Known: {', '.join(sorted(entries))}")
    return found
