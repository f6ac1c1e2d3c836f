"""A CUDA driver without a device; see fake_driver.cpp."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kvtiers import native
from kvtiers.data.copier_cuda import DEFAULT_TUNING, CudaCopier, CudaTuning
from kvtiers.data.copier_cuda_routes import Route, RouteTable, expected_routes
from kvtiers.data.cuda_device import CudaDevice
from kvtiers.data.slab import Registrar, Slab
from kvtiers.model.layout import KVLayout

SOURCE = Path(__file__).with_suffix(".cpp")
KERNELS = b"any: the fake runs the header's code"

missing: str | None = None
if shutil.which("g++") is None:
    missing = "no g++"
elif not native.available():
    missing = "compiled module not built"


_copiers: list[CudaCopier] = []  # alive for as long as their device


@functools.cache
def library() -> Path:
    """Compile the driver, once a process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "libcuda.so.1"
    flags = ["-std=c++17", "-O2", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    # A device faults on an access that is not aligned; so does this.
    flags += ["-fsanitize=alignment,bounds,shift,signed-integer-overflow"]
    flags += ["-fsanitize-undefined-trap-on-error"]
    subprocess.run(
        ["g++", *flags, "-Wno-cast-function-type", "-o", str(path), str(SOURCE)], check=True
    )
    return path


def _close_earlier(lib: ctypes.CDLL) -> None:
    """Close the copiers of earlier tests; what they queued is for memory that may be gone."""
    lib.fake_abandon()
    while _copiers:
        _copiers.pop().close()


@atexit.register
def _close_last() -> None:
    if _copiers:
        _close_earlier(ctypes.CDLL(str(library())))


class FakeDriver:
    """The pretended device, as a test sees and moves it.

    Args:
        version: of the driver. manual: whether queues move only when told.
    """

    def __init__(self, version: int = 13000, *, manual: bool = False) -> None:
        self.lib = lib = ctypes.CDLL(str(library()))
        lib.fake_stream.restype = ctypes.c_void_p
        lib.fake_step_of.argtypes = [ctypes.c_void_p]
        lib.fake_fill.argtypes = [
            ctypes.c_void_p,
            ctypes.c_ulonglong,
            ctypes.c_int,
            ctypes.c_size_t,
        ]
        lib.fake_read.argtypes = [
            ctypes.c_void_p,
            ctypes.c_ulonglong,
            ctypes.c_ulonglong,
            ctypes.c_size_t,
        ]
        _close_earlier(lib)
        lib.fake_reset(version)
        self.driver = native.load().CudaDriver(str(library()))
        self.engine: int = lib.fake_stream()
        lib.fake_manual(manual)

    def calls(self, name: str) -> int:
        return int(self.lib.fake_calls(name.encode()))

    def all_calls(self) -> dict[str, int]:
        text = ctypes.create_string_buffer(2**14)
        assert self.lib.fake_called(text, len(text)) < len(text)
        lines = text.value.decode().splitlines()
        return {name: int(count) for name, count in (line.split("\t") for line in lines)}

    def fail(self, name: str, *, after: int = 0, code: int = 719) -> None:
        """Make one call fail, the one after so many others of its name."""
        self.lib.fake_fail(name.encode(), after, code)

    @property
    def device(self) -> CudaDevice:
        return CudaDevice(self.driver, 0, lambda: self.engine)

    def registrar(self) -> Registrar:
        return self.device.registrar()

    def copier(
        self,
        layout: KVLayout,
        bases: list[int],
        slab: Slab,
        route: Route | None = None,
        *,
        tuning: CudaTuning = DEFAULT_TUNING,
        kernels: bytes = KERNELS,
    ) -> CudaCopier:
        """Return a copier whose every batch takes one route, or those that sizes suggest."""
        routes = expected_routes(layout)
        if route is not None:
            routes = RouteTable(dict.fromkeys(routes.rows, ((1, route),)))
        copier = CudaCopier(
            layout,
            bases,
            slab,
            self.device,
            kernels=kernels,
            tuning=tuning,
            routes=routes,
        )
        _copiers.append(copier)
        return copier


def copier_by(route: Route, tuning: CudaTuning = DEFAULT_TUNING) -> Any:
    """Return how to make a copier of one route on a device that moves by itself."""
    return lambda layout, bases, slab: FakeDriver().copier(
        layout, bases, slab, route, tuning=tuning
    )
