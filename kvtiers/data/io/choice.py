"""Which I/O engine serves: what was asked for, or what this machine allows."""

from __future__ import annotations

import logging
from typing import Literal

from kvtiers import native
from kvtiers.data.io.aiofiles_engine import AiofilesIo
from kvtiers.data.io.base import DEFAULT_DEPTH, IoEngine
from kvtiers.data.io.native import NativeIo

_logger = logging.getLogger(__name__)

IoKind = Literal["auto", "native", "uring", "aiofiles"]


def make_io(kind: IoKind = "auto", depth: int = DEFAULT_DEPTH) -> IoEngine:
    """Return an I/O engine.

    Args:
        kind: "auto" for the compiled threads, or aiofiles where nothing is compiled;
            "uring" falls back to the threads where the system does not allow an io_uring.
            Each fallback is logged once per engine.
        depth: operations under way at a time, >= 1.

    Raises:
        NativeModuleError: "native" or "uring", and the compiled module cannot be loaded.
        ValueError: the kind is unknown, or the depth below 1.
    """
    if depth < 1:
        raise ValueError(f"depth {depth} of an I/O engine is below 1")
    if kind == "aiofiles":
        return AiofilesIo(depth)
    if kind == "auto" and not native.available():
        _logger.warning("file I/O through aiofiles: %s", native.problem())
        return AiofilesIo(depth)
    if kind == "uring":
        try:
            return NativeIo("uring", depth)
        except OSError as error:  # EPERM in a container's profile, ENOSYS, ENOMEM
            _logger.warning("no io_uring here (%s); using threads instead", error)
    elif kind not in ("auto", "native"):
        raise ValueError(f"I/O engine is {kind!r}, expected auto, native, uring or aiofiles")
    return NativeIo("native", depth)
