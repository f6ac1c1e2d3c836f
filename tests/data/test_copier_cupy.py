"""What arrays of other libraries say of themselves."""

from __future__ import annotations

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


def test_what_is_in_host_memory_is_refused() -> None:
    with pytest.raises(LayoutError, match="ndarray is not on a CUDA device"):
        flat_address(np.zeros(4))
