"""An engine's allocations as arrays of torch, CuPy or another library: device, address, stream.

Libraries meet in two protocols, DLPack and ``__cuda_array_interface__``; torch and CuPy know both.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtiers.data.copier_cupy import current_stream as cupy_stream
from kvtiers.data.copier_cupy import flat_address
from kvtiers.model.errors import LayoutError
from kvtiers.model.layout import KVLayout

_CPU: Final = 1  # DLPack's names of devices
_CUDA: Final = (2, 10)  # 10: ROCm, which torch calls "cuda" as well


@dataclass(frozen=True, slots=True)
class Place:
    """Where all allocations of an engine lie.

    Attributes:
        cuda: number of the CUDA device, None for the CPU.
        current_stream: returns the handle of the engine's current stream there.
    """

    cuda: int | None
    current_stream: Callable[[], int]


def place_of(arrays: Sequence[Any], current_stream: Callable[[], int] | None = None) -> Place:
    """Return the one device of all arrays, and its engine's stream.

    Args:
        current_stream: of the engine; None asks the arrays' library, torch or CuPy.

    Raises:
        LayoutError: none, on several devices, on one that is neither CPU nor CUDA, or nobody
            knows the stream.
    """
    devices = sorted({_device(array) for array in arrays})
    if len(devices) != 1 or devices[0][0] not in (_CPU, *_CUDA):
        raise LayoutError(
            f"KV arrays on {len(devices)} devices {devices} (DLPack's type and number), expected "
            "all on the CPU or all on one CUDA device"
        )
    (kind, number) = devices[0]
    if kind == _CPU:
        return Place(None, current_stream or (lambda: 0))
    return Place(number, current_stream or _stream_of(arrays, number))


def flat_tensors(layout: KVLayout, arrays: Sequence[Any]) -> list[Any]:
    """Return flat uint8 `torch.Tensor` views of the arrays, the same memory.

    Raises:
        LayoutError: an array is not contiguous, or not of its allocation's size.
    """
    torch = importlib.import_module("torch")
    tensors = []
    for idx, (array, nbytes) in enumerate(zip(arrays, layout.allocations, strict=True)):
        tensor = array if isinstance(array, torch.Tensor) else _as_tensor(torch, array)
        if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != nbytes:
            raise LayoutError(
                f"allocation {idx} is {tensor.dtype} of shape {tuple(tensor.shape)}, strides "
                f"{tuple(tensor.stride())}, expected {nbytes} bytes in a row"
            )
        tensors.append(tensor.reshape(-1).view(torch.uint8))
    return tensors


def flat_addresses(layout: KVLayout, arrays: Sequence[Any]) -> list[int]:
    """Return the address of each array on a CUDA device.

    Raises:
        LayoutError: an array is not contiguous, or not of its allocation's size.
    """
    if len(arrays) != len(layout.allocations):
        raise LayoutError(f"{len(arrays)} arrays for {len(layout.allocations)} allocations")
    addresses = []
    for idx, (array, wanted) in enumerate(zip(arrays, layout.allocations, strict=True)):
        address, nbytes = flat_address(array)
        if nbytes != wanted:
            raise LayoutError(f"allocation {idx} has {nbytes} bytes, expected {wanted} in a row")
        addresses.append(address)
    return addresses


def _device(array: Any) -> tuple[int, int]:
    if not hasattr(array, "__dlpack_device__"):
        raise LayoutError(f"{type(array).__name__} has no __dlpack_device__ to say where it is")
    kind, number = array.__dlpack_device__()
    return int(kind), int(number)


def _as_tensor(torch: Any, array: Any) -> Any:
    if hasattr(array, "__dlpack__"):
        return torch.from_dlpack(array)
    return torch.as_tensor(array)


def _stream_of(arrays: Sequence[Any], number: int) -> Callable[[], int]:
    """Return how to ask the library of the arrays for its stream."""
    library = type(arrays[0]).__module__.partition(".")[0]
    if library == "torch":
        torch = importlib.import_module("torch")
        return lambda: int(torch.cuda.current_stream(number).cuda_stream)
    if library == "cupy":
        return lambda: cupy_stream(number)
    raise LayoutError(
        f"KV arrays of {library}: nobody but it knows the stream that its engine works on; say "
        "which, by `current_stream`"
    )
