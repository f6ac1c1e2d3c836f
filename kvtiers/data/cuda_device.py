"""A CUDA device through the driver: its engine's stream, its memory node, page-locking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtiers import native
from kvtiers.data.slab import Registrar

LIBRARY: Final = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device that the driver offers.

    Attributes:
        driver: a `kvtiers._native.CudaDriver`.
        number: of the device, as the process counts them.
        current_stream: returns the handle of the engine's current stream there, for torch
            ``torch.cuda.current_stream(device).cuda_stream``; 0 is the legacy stream.
    """

    driver: Any
    number: int
    current_stream: Callable[[], int]

    def numa_node(self, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
        """Return the node of the host's memory that is nearest, None if the machine does not say.

        Args:
            devices: where the kernel lists what is plugged in.
        """
        try:
            address = str(self.driver.pci_address(self.number)).lower()
            node = int((devices / address / "numa_node").read_text())
        except (RuntimeError, OSError, ValueError):
            return None
        return node if node >= 0 else None  # -1: there is only one

    def registrar(self) -> Registrar:
        """Return how to page-lock memory for it."""
        return DriverRegistrar(self.driver, self.number)


def find_device(
    number: int, current_stream: Callable[[], int], library: str = LIBRARY
) -> CudaDevice | str:
    """Open the driver and return a device, or say why there is none.

    Args:
        number, current_stream: of the device. library: of the driver.
    """
    if not native.available():
        return str(native.problem())
    try:
        driver = native.load().CudaDriver(library)
    except RuntimeError as error:
        return str(error)
    if not 0 <= number < driver.num_devices:
        return f"there is no CUDA device {number}, only {driver.num_devices}"
    return CudaDevice(driver, number, current_stream)


class DriverRegistrar:
    """A `Registrar` for one device, without torch and without a CUDA runtime.

    The driver hands each error to the call that made it and keeps none for later ones, unless
    the device itself is lost.

    Args:
        driver: a `kvtiers._native.CudaDriver`. device: the device's number.
    """

    def __init__(self, driver: Any, device: int) -> None:
        self._driver = driver
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range; see `Registrar.register`."""
        try:
            self._driver.register_host(self._device, address, nbytes)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def unregister(self, address: int) -> None:
        """Release a range; see `Registrar.unregister`."""
        try:
            self._driver.unregister_host(self._device, address)
        except RuntimeError as error:
            raise OSError(str(error)) from error
