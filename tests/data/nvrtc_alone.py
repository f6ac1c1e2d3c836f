"""NVIDIA's run-time compiler without CuPy, called as ``cupy.cuda.nvrtc`` is."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def find_library() -> Path | None:
    """Return where one of NVIDIA's packages has put it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).rglob("libnvrtc.so.*")):
            return path
    return None


class NVRTCError(RuntimeError):
    """A call failed."""


class Nvrtc:
    """Stands in for the module."""

    NVRTCError = NVRTCError

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))

    def _check(self, status: int) -> None:
        if status:
            self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise NVRTCError(self._lib.nvrtcGetErrorString(status).decode())

    def getVersion(self) -> tuple[int, int]:  # noqa: N802
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def createProgram(  # noqa: N802
        self, source: str, name: str, headers: Sequence[str], include_names: Sequence[str]
    ) -> Any:
        assert not headers
        assert not include_names
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), 0, None, None
            )
        )
        return program

    def compileProgram(self, program: Any, options: Sequence[str]) -> None:  # noqa: N802
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._check(self._lib.nvrtcCompileProgram(program, len(options), texts))

    def getProgramLog(self, program: Any) -> str:  # noqa: N802
        return self._text(program, "ProgramLog").rstrip(b"\0").decode()

    def getPTX(self, program: Any) -> bytes:  # noqa: N802
        return self._text(program, "PTX").rstrip(b"\0")

    def getCUBIN(self, program: Any) -> bytes:  # noqa: N802
        return self._text(program, "CUBIN")

    def destroyProgram(self, program: Any) -> None:  # noqa: N802
        self._check(self._lib.nvrtcDestroyProgram(ctypes.byref(program)))

    def _text(self, program: Any, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, text))
        return text.raw
