"""What CuPy lends to `CudaCopier`: a compiler for its kernels, addresses and streams."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from kvtiers import native
from kvtiers.model.errors import LayoutError


def compile_kernels(capability: int, *, machine_code: bool = True) -> bytes:
    """Compile the copy kernels with CuPy's NVRTC; no device is needed. About half a second.

    Args:
        capability: of the device, 90 for 9.0.
        machine_code: a cubin for that capability alone; else PTX for it and later ones.

    Raises:
        RuntimeError: no CuPy, no NVRTC, or it refuses the source; with its log.
    """
    source, header = native.kernel_sources()
    if not source:
        raise RuntimeError("the source of the CUDA kernels is not installed with kvtiers")
    if importlib.util.find_spec("cupy") is None:
        raise RuntimeError("no CuPy to compile CUDA kernels with: install kvtiers[cuda13]")
    try:
        nvrtc = importlib.import_module("cupy.cuda").nvrtc
        whole = source.replace('#include "block_index.h"', header)
        program = nvrtc.createProgram(whole, "kernels.cu", [], [])
    except (ImportError, OSError, RuntimeError) as error:  # which one depends on CuPy's version
        raise RuntimeError(f"CuPy finds no NVRTC: {error}") from error
    try:
        kind = "sm" if machine_code else "compute"
        options = (f"--gpu-architecture={kind}_{capability}", "--std=c++17")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"NVRTC refuses the CUDA kernels: {error}: {log}") from error
        if machine_code:
            return bytes(nvrtc.getCUBIN(program))
        ptx = nvrtc.getPTX(program)
        return ptx if isinstance(ptx, bytes) else str(ptx).encode()
    finally:
        nvrtc.destroyProgram(program)


def current_stream() -> int:
    """Return the handle of CuPy's current stream, for `CudaDevice`."""
    return int(importlib.import_module("cupy").cuda.get_current_stream().ptr)


def flat_address(array: Any) -> tuple[int, int]:
    """Return address and bytes of an array on a device, of torch, CuPy or another library.

    The caller keeps the array. Arrays that only know DLPack go through CuPy or torch.

    Raises:
        LayoutError: it is on no CUDA device, or not contiguous.
    """
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except (KeyError, RuntimeError):  # torch has no name there for 8-bit floats, nor for gradients
        return _address_of_tensor(array)
    if interface is None and hasattr(array, "__dlpack__") and _on_cuda(array):
        interface = _taken_over(array).__cuda_array_interface__
    if interface is None:
        raise LayoutError(f"{type(array).__name__} is not on a CUDA device")
    itemsize = int(interface["typestr"][2:])
    nbytes = itemsize
    strides = interface.get("strides")
    for size, stride in zip(
        reversed(interface["shape"]), reversed(strides or (None,) * len(interface["shape"])),
        strict=True,
    ):  # fmt: skip
        if stride is not None and size > 1 and stride != nbytes:
            raise LayoutError(f"array of shape {interface['shape']}, strides {strides}: not flat")
        nbytes *= size
    return int(interface["data"][0]), nbytes


def _address_of_tensor(tensor: Any) -> tuple[int, int]:
    """Return what torch itself says of a tensor."""
    if not tensor.is_contiguous():
        raise LayoutError(
            f"tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}: not flat"
        )
    return int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())


def _taken_over(array: Any) -> Any:
    """Return an array of a library that can tell its address, the same memory."""
    for library in ("cupy", "torch"):
        if importlib.util.find_spec(library) is not None:
            return importlib.import_module(library).from_dlpack(array)
    raise LayoutError(f"{type(array).__name__} speaks DLPack only: CuPy or torch must be installed")


def _on_cuda(array: Any) -> bool:
    return int(array.__dlpack_device__()[0]) == 2  # kDLCUDA
