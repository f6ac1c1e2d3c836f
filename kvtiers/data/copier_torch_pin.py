"""Page-locking the slab through torch's CUDA runtime."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class TorchRegistrar:
    """A `Registrar` (see slab.py) for the device of the engine's tensors.

    Args:
        device: a CUDA device. cuda: stands in for ``torch.cuda``; None for itself.
    """

    def __init__(self, device: Any, cuda: Any = None) -> None:
        self._device = device
        self._cuda = torch.cuda if cuda is None else cuda

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range; see `Registrar.register`."""
        cudart = self._cuda.cudart()
        with self._cuda.device(self._device):
            self._check("cudaHostRegister", cudart.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        """Release a range; see `Registrar.unregister`."""
        cudart = self._cuda.cudart()
        with self._cuda.device(self._device):
            self._check("cudaHostUnregister", cudart.cudaHostUnregister(address))

    def _check(self, name: str, result: Any) -> None:
        cudart = self._cuda.cudart()
        if result == cudart.cudaError.success:
            return
        # The runtime keeps the error for whoever asks next, and torch has no call that takes
        # it. Every kernel launch asks: let it be one that is in nobody's way.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        raise OSError(f"{name}: {cudart.cudaGetErrorString(result)}")
