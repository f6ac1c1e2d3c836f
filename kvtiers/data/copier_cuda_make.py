"""Choosing the copier of a CUDA device, with a stand-in for what a machine lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvtiers import native
from kvtiers.data.copier import Copier
from kvtiers.data.copier_cuda import CudaCopier
from kvtiers.data.copier_cuda_check import check_copies
from kvtiers.data.copier_cupy import compile_kernels
from kvtiers.data.copier_host import NativeMode
from kvtiers.data.cuda_device import CudaDevice
from kvtiers.data.slab import Slab
from kvtiers.model.layout import KVLayout

logger = logging.getLogger(__name__)

Kernels = Mapping[str, Callable[[], bytes]]


def make_cuda_copier(
    layout: KVLayout,
    bases: Sequence[int],
    slab: Slab,
    device: CudaDevice | str,
    fallback: Callable[[], Copier],
    mode: NativeMode = "auto",
    kernels: Kernels | None = None,
) -> Copier:
    """Return the copier for tensors on a device, checked and measured there; or the fallback.

    Args:
        layout, bases, slab: as of `CudaCopier`.
        device: what `find_device` returned; the slab is pinned by its registrar.
        fallback: makes a copier that keeps the same order without driver and kernels.
        mode: "auto" falls back with one warning, "on" fails instead, "off" wants the fallback.
        kernels: names and makers of machine code, tried in turn; None for `compiled_here`.

    Raises:
        NativeModuleError: "on", and the device cannot be served; says why.
        LayoutError: layout and addresses do not fit. CapacityError: a slot holds no frame.
    """
    if mode == "off":
        return fallback()
    found = _attempt(layout, bases, slab, device, kernels)
    if isinstance(found, CudaCopier):
        logger.info("copying by CUDA kernels and DMA: %s", found.routes.describe())
        return found
    if mode == "on":
        raise native.NativeModuleError(
            f"`copy.native: on`, but kvtiers' CUDA kernels cannot be used: {found}"
        )
    logger.warning("copying without kvtiers' CUDA kernels: %s", found)
    return fallback()


def compiled_here(device: CudaDevice) -> dict[str, Callable[[], bytes]]:
    """Return where kernels may come from, the best first: this build, then CuPy's compiler."""
    return {
        "kernels of this build": native.kernels,
        "kernels by NVRTC": lambda: compile_kernels(
            device.driver.compute_capability(device.number)
        ),
    }


def _attempt(
    layout: KVLayout,
    bases: Sequence[int],
    slab: Slab,
    device: CudaDevice | str,
    kernels: Kernels | None,
) -> CudaCopier | str:
    """Return the copier, or why there is none."""
    if isinstance(device, str):
        return device
    if not slab.pinned:
        return "the slab is not page-locked"
    reasons = []
    for name, compiled in (compiled_here(device) if kernels is None else kernels).items():
        try:
            binary = compiled()
            if not binary:
                reasons.append(f"{name}: none in this build of kvtiers")
                continue
            copier = CudaCopier(layout, bases, slab, device, kernels=binary)
        except RuntimeError as error:  # no compiler, another device's code, or memory is short
            reasons.append(f"{name}: {error}")
            continue
        problem = _prepare(copier, layout, slab)
        if problem is None:
            return copier
        copier.close()
        return problem
    return "; ".join(reasons)


def _prepare(copier: CudaCopier, layout: KVLayout, slab: Slab) -> str | None:
    """Check a copier's bytes and measure its routes; return what is wrong."""
    try:
        wrong = check_copies(copier, layout, slab)
        if wrong is not None:
            return f"its copies failed their check: {wrong}"
        copier.measure()
    except RuntimeError as error:
        return f"checking and measuring the copies failed: {error}"
    return None
