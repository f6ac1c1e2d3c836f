"""Where the compiled module ``kvtiers._native`` is found, if it is there."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType

import kvtiers
from kvtiers.model.errors import KVTiersError


class NativeModuleError(KVTiersError):
    """The compiled module is asked for and cannot be loaded; the message says why."""


def available() -> bool:
    """Whether the compiled module loads. The first call tries; later ones remember."""
    return isinstance(_attempt(), ModuleType)


def load() -> ModuleType:
    """Return the compiled module.

    Raises:
        NativeModuleError: it is missing or broken; says why, and how to build it.
    """
    found = _attempt()
    if isinstance(found, ModuleType):
        return found
    raise NativeModuleError(found)


def problem() -> str | None:
    """Return why the compiled module cannot be loaded, None if it can."""
    found = _attempt()
    return None if isinstance(found, ModuleType) else found


def kernels() -> bytes:
    """Return the CUDA kernels for all devices they were compiled for; empty if none were."""
    return _built("kernels.fatbin")


def kernel_sources() -> tuple[str, str]:
    """Return the CUDA kernels' source and the header that it includes; empty if not installed."""
    return _built("kernels/kernels.cu").decode(), _built("kernels/block_index.h").decode()


def _built(name: str) -> bytes:
    for folder in kvtiers.__path__:  # an editable install has two: the source and the build
        path = Path(folder) / name
        if path.is_file():
            return path.read_bytes()
    return b""


@functools.cache
def _attempt() -> ModuleType | str:
    try:
        return importlib.import_module("kvtiers._native")
    except ImportError as error:  # not there, or there and built for something else
        return (
            f"the compiled module kvtiers._native cannot be loaded ({error}); build it by "
            "reinstalling kvtiers where a C++17 compiler is present: "
            "`pip install --force-reinstall --no-deps --no-binary kvtiers kvtiers`, "
            "or `pip install .` in its source"
        )
