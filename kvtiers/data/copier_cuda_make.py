"""Choosing the copier of a CUDA device, with a stand-in for what a machine lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtiers import native
from kvtiers.data.copier import Copier
from kvtiers.data.copier_cuda import DEFAULT_TUNING, CudaCopier, CudaTuning
from kvtiers.data.cuda_device import CudaDevice
from kvtiers.data.slab import Slab
from kvtiers.model.layout import KVLayout

logger = logging.getLogger(__name__)


def make_cuda_copier(
    layout: KVLayout,
    bases: Sequence[int],
    slab: Slab,
    device: CudaDevice | str,
    fallback: Callable[[], Copier],
    *,
    kernels: bytes | None = None,
    tuning: CudaTuning = DEFAULT_TUNING,
) -> Copier:
    """Return the copier for tensors on a device, measured; or the fallback, with one warning.

    Args:
        layout, bases, slab: as of `CudaCopier`.
        device: what `find_device` returned; the slab is pinned by its registrar.
        fallback: makes a copier that keeps the same order without driver and kernels.
        kernels: a fatbin; None for the package's own.

    Raises:
        LayoutError: layout and addresses do not fit. CapacityError: a slot holds no frame.
    """
    if isinstance(device, str):
        return _instead(fallback, device)
    if not slab.pinned:
        return _instead(fallback, "the slab is not page-locked")
    code = native.kernels() if kernels is None else kernels
    if not code:
        return _instead(fallback, "this build of kvtiers has no CUDA kernels (no nvcc was found)")
    try:
        copier = CudaCopier(layout, bases, slab, device, kernels=code, tuning=tuning)
    except RuntimeError as error:  # the kernels do not fit the driver, or memory is short
        return _instead(fallback, str(error))
    try:
        copier.measure()
    except RuntimeError as error:
        copier.close()
        return _instead(fallback, f"measuring the copies failed: {error}")
    logger.info("copying by CUDA kernels and DMA: %s", copier.routes.describe())
    return copier


def _instead(fallback: Callable[[], Copier], reason: str) -> Copier:
    logger.warning("copying without kvtiers' CUDA kernels: %s", reason)
    return fallback()
