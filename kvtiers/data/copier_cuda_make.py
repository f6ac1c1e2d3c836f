"""Choosing the copier of a CUDA device, with a stand-in for what a machine lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvtiers import native
from kvtiers.data.copier import Copier
from kvtiers.data.copier_cuda import DEFAULT_TUNING, CudaCopier, CudaTuning
from kvtiers.data.copier_cupy import compile_kernels
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
    kernels: Mapping[str, Callable[[], bytes]] | None = None,
    tuning: CudaTuning = DEFAULT_TUNING,
) -> Copier:
    """Return the copier for tensors on a device, measured; or the fallback, with one warning.

    Args:
        layout, bases, slab: as of `CudaCopier`.
        device: what `find_device` returned; the slab is pinned by its registrar.
        fallback: makes a copier that keeps the same order without driver and kernels.
        kernels: names and makers of machine code, tried in turn; None for `compiled_here`.

    Raises:
        LayoutError: layout and addresses do not fit. CapacityError: a slot holds no frame.
    """
    if isinstance(device, str):
        return _instead(fallback, device)
    if not slab.pinned:
        return _instead(fallback, "the slab is not page-locked")
    sources = compiled_here(device) if kernels is None else kernels
    reasons = []
    copier = None
    for name, compiled in sources.items():
        try:
            binary = compiled()
            if not binary:
                reasons.append(f"{name}: none in this build of kvtiers")
                continue
            copier = CudaCopier(layout, bases, slab, device, kernels=binary, tuning=tuning)
            break
        except RuntimeError as error:  # no compiler, another device's code, or memory is short
            reasons.append(f"{name}: {error}")
    if copier is None:
        return _instead(fallback, "; ".join(reasons))
    try:
        copier.measure()
    except RuntimeError as error:
        copier.close()
        return _instead(fallback, f"measuring the copies failed: {error}")
    logger.info("copying by CUDA kernels and DMA: %s", copier.routes.describe())
    return copier


def compiled_here(device: CudaDevice) -> dict[str, Callable[[], bytes]]:
    """Return where kernels may come from, the best first: this build, then CuPy's compiler."""
    return {
        "kernels of this build": native.kernels,
        "kernels by NVRTC": lambda: compile_kernels(
            device.driver.compute_capability(device.number)
        ),
    }


def _instead(fallback: Callable[[], Copier], reason: str) -> Copier:
    logger.warning("copying without kvtiers' CUDA kernels: %s", reason)
    return fallback()
