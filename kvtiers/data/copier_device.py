"""How a slab and an engine's arrays on one device come together: page-locking, and the copier."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from kvtiers.data.copier import Copier
from kvtiers.data.copier_arrays import Place, flat_addresses, flat_tensors, place_of
from kvtiers.data.copier_cuda_make import make_cuda_copier
from kvtiers.data.copier_host import NativeMode
from kvtiers.data.cuda_device import LIBRARY, CudaDevice, find_device
from kvtiers.data.slab import PinMode, Registrar, Slab
from kvtiers.model.layout import KVLayout


class DeviceMedia:
    """Makes slab and copier for arrays on a device: kernels and driver, or torch.

    Args:
        layout: the engine's tensors.
        arrays: one over each of its allocations, contiguous, of torch, CuPy or another library
            with DLPack, all on one device. They are kept as long as this and its copiers.
        mode: as of `make_cuda_copier`; arrays on the CPU always go through torch.
        current_stream: as of `place_of`.
        library: the CUDA driver's.

    Raises:
        LayoutError: the arrays do not fit the layout, or lie on several devices.
    """

    def __init__(
        self,
        layout: KVLayout,
        arrays: Sequence[Any],
        mode: NativeMode = "auto",
        *,
        current_stream: Callable[[], int] | None = None,
        library: str = LIBRARY,
    ) -> None:
        self._layout = layout
        self._arrays = list(arrays)
        self._mode: NativeMode = mode
        self._place: Place = place_of(arrays, current_stream)
        self._foreign_stream = current_stream
        self._device: CudaDevice | str = "the KV tensors are in host memory"
        if self._place.cuda is not None:
            self._device = "`copy.native` is off"
        if self._place.cuda is not None and mode != "off":
            self._device = find_device(self._place.cuda, self._place.current_stream, library)

    @property
    def where(self) -> str:
        """In words, for a log."""
        return (
            "KV in host memory" if self._place.cuda is None else f"CUDA device {self._place.cuda}"
        )

    def make_slab(self, num_slots: int, slot_nbytes: int, pin: PinMode) -> Slab:
        """Return a slab near the device, page-locked for it as `pin` says."""
        node = self._device.numa_node() if isinstance(self._device, CudaDevice) else None
        return Slab(num_slots, slot_nbytes, pin=pin, registrar=self._registrar(), numa_node=node)

    def make_copier(self, slab: Slab) -> Copier:
        """Return the copier between the arrays and a slab of `make_slab`.

        Raises:
            NativeModuleError: the mode is "on", and the kernels cannot be used.
            LayoutError: an array is not of its allocation's size. CapacityError: a slot holds no
                frame.
        """
        if self._place.cuda is None:
            return self._through_torch(slab)
        served = isinstance(self._device, CudaDevice)
        return make_cuda_copier(
            self._layout,
            flat_addresses(self._layout, self._arrays) if served else [],
            slab,
            self._device,
            lambda: self._through_torch(slab),
            self._mode,
        )

    def _registrar(self) -> Registrar | None:
        if self._place.cuda is None:
            return None
        if isinstance(self._device, CudaDevice):
            return self._device.registrar()
        if not importlib.util.find_spec("torch"):
            return None
        from kvtiers.data.copier_torch_pin import TorchRegistrar  # noqa: PLC0415 - only here

        return TorchRegistrar(self._place.cuda)

    def _through_torch(self, slab: Slab) -> Copier:
        from kvtiers.data.copier_torch import TorchCopier  # noqa: PLC0415 - CuPy needs no torch

        # Torch's own stream, unless the arrays are another library's.
        stream = self._place.current_stream if self._of_another_library() else None
        tensors = flat_tensors(self._layout, self._arrays)
        return TorchCopier(self._layout, tensors, slab, engine_stream=stream)

    def _of_another_library(self) -> bool:
        if self._place.cuda is None:
            return False
        ours = all(type(array).__module__.partition(".")[0] == "torch" for array in self._arrays)
        return self._foreign_stream is not None or not ours
