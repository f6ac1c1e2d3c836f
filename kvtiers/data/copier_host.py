"""The compiled copier for engines on the CPU, with its portable stand-in."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from kvtiers import native
from kvtiers.data.batch_check import check_columns, check_places
from kvtiers.data.copier import Copier, CopyBatch, Direction
from kvtiers.data.copier_immediate import ImmediateCopier
from kvtiers.data.copier_portable import PortableCopier
from kvtiers.data.slab import Slab
from kvtiers.model.errors import LayoutError, TransferError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.layout import GroupLayout, KVLayout
from kvtiers.model.messages import Int64s, int64s

_logger = logging.getLogger(__name__)

_MAX_DEFAULT_THREADS: Final = 4  # a few cores fill a memory bus; the rest are the engine's

NativeMode = Literal["auto", "on", "off"]
CopyMethod = Literal["auto", "memcpy", "sse2", "avx2"]


def default_num_threads() -> int:
    """Return how many threads copy unless the caller says: the cores allowed, at most 4."""
    return min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


class HostCopier(ImmediateCopier):
    """Copies with the compiled module, on its own threads and without the GIL.

    The memory is the caller's: allocations and slab must outlive the copier.

    Args:
        layout: the engine's tensors. bases: address of each of its allocations.
        slab: where the slots are.
        num_threads: threads of a large batch, the caller's included; 0 for the default.
        method: "auto" chooses by the size of batch and piece; others are for measurements.

    Raises:
        NativeModuleError: the compiled module cannot be loaded.
        LayoutError: not one address per allocation. CapacityError: a slot holds no frame.
        ValueError: num_threads is negative.
    """

    def __init__(
        self,
        layout: KVLayout,
        bases: Sequence[int],
        slab: Slab,
        num_threads: int = 0,
        *,
        method: CopyMethod = "auto",
    ) -> None:
        super().__init__()
        module = native.load()
        check_places(layout, bases, slab.slot_nbytes)
        if num_threads < 0:
            raise ValueError(f"num_threads {num_threads} is negative")
        self._method = module.Method[method.upper()]
        try:
            self._native = module.HostCopier(
                list(zip(bases, layout.allocations, strict=True)),
                [native_group(group) for group in layout.groups],
                (slab.address, slab.num_slots),
                slab.slot_nbytes,
                num_threads or default_num_threads(),
            )
        except ValueError as error:
            raise LayoutError(str(error)) from error

    def _copy(self, direction: Direction, batch: CopyBatch) -> None:
        check_columns(batch)
        gather = direction is Direction.GATHER
        copy = self._native.gather if gather else self._native.scatter
        try:
            copy(batch.group, int64s(batch.block_ids), int64s(batch.slots), self._method)
        except ValueError as error:
            raise TransferError(str(error)) from error

    def close(self) -> None:
        """Let go of the threads; idempotent."""
        super().close()
        self._native = None


def make_host_copier(
    layout: KVLayout,
    bases: Sequence[int],
    slab: Slab,
    num_threads: int = 0,
    mode: NativeMode = "auto",
) -> Copier:
    """Return the copier for tensors in host memory.

    Args:
        layout: the engine's tensors. bases: address of each of its allocations.
        slab: where the slots are.
        num_threads: threads of a large batch, 0 for the default.
        mode: "on" insists on the compiled module, "off" does without it, "auto" prefers it
            and says once where it is missing.

    Raises:
        NativeModuleError: "on", and the compiled module cannot be loaded.
        LayoutError, CapacityError: layout, addresses and slab do not fit together.
        ValueError: `mode` is no known mode.
    """
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"mode is {mode!r}, expected 'auto', 'on' or 'off'")
    if mode == "on" or (mode == "auto" and native.available()):
        return HostCopier(layout, bases, slab, num_threads)
    if mode == "auto":
        _warn_once(f"copying with numpy: {native.problem()}")
    return PortableCopier(layout, bases, slab, num_threads)


def native_group(group: GroupLayout) -> tuple[Int64s, int, int]:
    """Return a group as the compiled module takes it: runs [R, 4], blocks, header bytes."""
    rows = [(run.allocation, run.offset, run.block_stride, run.nbytes) for run in group.runs]
    runs = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return runs, group.num_blocks, FrameFormat.of(group).header_nbytes


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning("%s", message)
