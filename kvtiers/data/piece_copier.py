"""Copying out of a mapping into slots without the interpreter's lock, where that can be had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtiers import native
from kvtiers.data.copier_host import CopyMethod

Piece = tuple[memoryview, memoryview]
"""Target and source of a copy, of equal length; contiguous bytes."""


class PieceCopier:
    """Copies batches of pieces; by numpy where the compiled module is missing.

    Args:
        num_threads: that copy, the caller's included, >= 1.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._native: Any = native.load().PieceCopier(num_threads) if native.available() else None

    def copy(self, pieces: Sequence[Piece], *, method: CopyMethod = "auto") -> None:
        """Copy all pieces; returns when done.

        Args:
            pieces: targets and sources. method: how; "auto" goes by the size of the batch.

        Raises:
            ValueError: a target and its source differ in length.
        """
        table = np.empty((len(pieces), 3), np.int64)
        for row, (target, source) in enumerate(pieces):
            to, from_ = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
            if to.nbytes != from_.nbytes:
                raise ValueError(f"piece {row}: {from_.nbytes} bytes into {to.nbytes}")
            if self._native is None:
                to[:] = from_  # numpy gives up the lock for large ones
            table[row] = to.ctypes.data, from_.ctypes.data, to.nbytes
        if self._native is not None and len(pieces):
            self._native.copy(table, getattr(native.load().Method, method.upper()))
