"""What arrays of other libraries say of themselves."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtiers.data.copier_cupy import flat_address
from kvtiers.model.errors import LayoutError


def array(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    """As torch and CuPy describe an array on a device, of two bytes an element."""
    interface = {"shape": shape, "typestr": "<f2", "data": (4096, False), "strides": strides}
    return SimpleNamespace(__cuda_array_interface__=interface)


@pytest.mark.parametrize(
    "found",
    [array((3, 5)), array((3, 5), (10, 2)), array((3, 1, 5), (10, 999, 2))],
    ids=["no strides", "strides", "an axis of one"],
)
def test_flat_arrays_have_an_address(found: Any) -> None:
    assert flat_address(found) == (4096, 30)


@pytest.mark.parametrize("strides", [(12, 2), (2, 6)])
def test_what_is_not_flat_is_refused(strides: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match="not flat"):
        flat_address(array((3, 5), strides))


class Torchs:
    """A tensor on a device as torch has them, over a tensor of the CPU."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    @property
    def __cuda_array_interface__(self) -> Any:
        from torch._tensor import _dtype_to_typestr  # noqa: PLC0415

        if self._tensor.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")
        shape, typestr = tuple(self._tensor.shape), _dtype_to_typestr(self._tensor.dtype)
        return {"shape": shape, "typestr": typestr, "data": (self._tensor.data_ptr(), False)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="no torch")
@pytest.mark.parametrize(
    "dtype", ["uint8", "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"]
)
def test_tensors_of_every_type_that_kv_has(dtype: str) -> None:
    import torch  # noqa: PLC0415

    tensor = torch.zeros(3, 5, 16, dtype=torch.uint8).view(getattr(torch, dtype))
    assert flat_address(Torchs(tensor)) == (tensor.data_ptr(), 240)
    if dtype.startswith("float8"):
        with pytest.raises(LayoutError, match=r"shape \(5, 3, 16\), strides .*: not flat"):
            flat_address(Torchs(tensor.transpose(0, 1)))
    weights = torch.zeros(4, 4, requires_grad=True)
    assert flat_address(Torchs(weights)) == (weights.data_ptr(), 64)


class DlpackOnly:
    """An array on a device that says no more than DLPack asks for."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: object) -> object:
        raise NotImplementedError


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_arrays_that_speak_dlpack_only_are_taken_over_by_a_library_that_is_there(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []

    def from_dlpack(one: object) -> Any:
        taken.append(one)
        return array((3, 5))

    monkeypatch.setitem(sys.modules, library, SimpleNamespace(from_dlpack=from_dlpack))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == library or None)
    one = DlpackOnly()
    assert flat_address(one) == (4096, 30)
    assert taken == [one]


def test_without_such_a_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LayoutError, match="CuPy or torch must be installed"):
        flat_address(DlpackOnly())


def test_what_is_in_host_memory_is_refused() -> None:
    with pytest.raises(LayoutError, match="ndarray is not on a CUDA device"):
        flat_address(np.zeros(4))
