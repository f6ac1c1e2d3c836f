"""Page-locking the slab through the CUDA driver."""

from __future__ import annotations

from typing import Any


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
