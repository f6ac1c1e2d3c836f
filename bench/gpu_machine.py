"""What the checks of a GPU need of it, and how large they are; a test pretends another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtiers import native
from kvtiers.cost.known_models import known_model
from kvtiers.cost.prefill import ModelShape
from kvtiers.data.cuda_device import CudaDevice

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Sizes:
    """How much is copied and computed.

    Attributes:
        pool_nbytes: of the engine's memory, for measurements of speed.
        pieces: bytes of a piece. num_runs: pieces of a block, at most.
        payload_nbytes: of a block, at most. batches: blocks.
        batch_nbytes: of a batch where only one size is measured.
        peak_nbytes: of the copy that speeds are measured against. repeats: of each measurement.
        seconds_each: of measurements that run for a time.
        square: of the matrices beside which copies run. num_products, num_thin: of a loop.
        prompts: tokens that are computed. model: whose layers compute them; layers as it has.
        feed_forward: of that model. pipeline_blocks: from disk. largest_layout: bytes; larger
            ones are not checked.
    """

    pool_nbytes: int = GIB
    pieces: tuple[int, ...] = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB)
    num_runs: int = 16
    payload_nbytes: int = 4 * MIB
    batches: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)  # so that 16 to 16k pieces occur
    batch_nbytes: int = 64 * MIB
    peak_nbytes: int = 512 * MIB
    repeats: int = 5
    seconds_each: float = 0.3
    square: int = 8192
    num_products: int = 40
    num_thin: int = 2000
    prompts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    model: ModelShape = known_model("llama-3.1-8b").shape
    feed_forward: int = 14336
    pipeline_blocks: int = 512
    largest_layout: int = 8 * GIB


@dataclass(frozen=True)
class Machine:
    """A CUDA device through kvtiers' driver and through torch, which serves as the engine."""

    device: CudaDevice
    kernels: bytes
    where: str = "cuda"
    cuda: Any = torch.cuda
    sizes: Sizes = Sizes()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.where)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of the host."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.where == "cuda")

    def numbers(self, *shape: int) -> torch.Tensor:
        """Small random numbers on the device, as weights and activations are."""
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.where) / shape[-1] ** 0.5

    def seconds(self, work: Callable[[], object], count: int = 1) -> float:
        """What the device needs for some work, by its own clock."""
        begin, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def facts(self) -> dict[str, Any]:
        """What a result is of."""
        return {
            "device": str(self.cuda.get_device_name()),
            "compute_capability": self.device.driver.compute_capability(self.device.number),
            "driver": self.device.driver.version,
            "batch_copy": self.device.driver.batch_version,
            "numa_node": self.device.numa_node(),
            "kernels_nbytes": len(self.kernels),
            "native": native.load().build_info(),
            "torch": torch.__version__,
            "when": time.strftime("%Y-%m-%d", time.gmtime()),
        }


def scramble(flat: torch.Tensor) -> None:
    """Fill memory with random bytes, but for a few at its end."""
    flat[: flat.numel() // 8 * 8].view(torch.int64).random_()
