"""Host memory is page-locked through torch's runtime."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

if not importlib.util.find_spec("torch"):
    pytest.skip("no torch", allow_module_level=True)


from kvtiers.data import copier_torch_pin
from kvtiers.data.copier_torch_pin import TorchRegistrar
from kvtiers.data.slab import Slab


class FakeCudart:
    """The runtime's calls that page-lock; the range named ``refused`` is refused."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.held: dict[int, int] = {}
        self.last_error = 0  # kept for whoever asks next, as the runtime does

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if address == self.refused or address in self.held:
            self.last_error = 712
            return 712
        self.held[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.held.pop(address, 0) else 713

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return {712: "part or all is already mapped", 713: "not mapped"}[code]


def registrar(cudart: FakeCudart) -> TorchRegistrar:
    cuda = SimpleNamespace(cudart=lambda: cudart, device=lambda device: nullcontext())
    return TorchRegistrar("cpu", cuda)


def test_a_slab_is_page_locked_through_the_runtime() -> None:
    cudart = FakeCudart()
    slab = Slab(2, 4096, pin="on", registrar=registrar(cudart))
    assert slab.pinned
    assert cudart.held == {slab.address: 8192}
    slab.close()
    assert not cudart.held


def test_what_the_runtime_refuses_is_an_oserror_with_its_reason() -> None:
    locking = registrar(FakeCudart(refused=4096))
    with pytest.raises(OSError, match="cudaHostRegister: part or all is already mapped"):
        locking.register(4096, 4096)
    with pytest.raises(OSError, match="cudaHostUnregister: not mapped"):
        locking.unregister(4096)


def test_a_refused_range_leaves_no_error_to_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """R71: each launch of a kernel raises what the runtime has kept."""
    cudart = FakeCudart(refused=4096)

    def launch(num: int, device: object) -> None:
        error, cudart.last_error = cudart.last_error, 0
        if error:
            raise RuntimeError(cudart.cudaGetErrorString(error))

    monkeypatch.setattr(copier_torch_pin.torch, "ones", launch)
    with pytest.raises(OSError, match="already mapped"):
        registrar(cudart).register(4096, 4096)
    launch(1, "cpu")  # somebody else's
