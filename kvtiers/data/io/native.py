"""The compiled engines: blocking calls on C++ threads, or an io_uring."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np

from kvtiers import native
from kvtiers.data.io.base import DEFAULT_DEPTH, IoBatch, IoDone


class NativeIo:
    """Runs in the compiled module, without the GIL: a busy Python thread does not slow it.

    Args:
        kind: "native" for threads, "uring" for an io_uring. depth: operations under way.

    Raises:
        NativeModuleError: the compiled module cannot be loaded.
        OSError: the system does not allow an io_uring.
    """

    def __init__(
        self, kind: Literal["native", "uring"] = "native", depth: int = DEFAULT_DEPTH
    ) -> None:
        module = native.load()
        make = module.uring_file_io if kind == "uring" else module.threaded_file_io
        self._name = kind
        self._io: Any = make(depth)

    @property
    def name(self) -> str:
        """ "native" or "uring"."""
        return self._name

    def submit(self, batch: IoBatch) -> None:
        """Submit operations."""
        ops = np.array([(op.fd, op.offset, len(op.pieces)) for op in batch.ops], np.int64)
        pieces = np.array(
            list(itertools.chain.from_iterable(op.pieces for op in batch.ops)), np.int64
        )
        self._io.submit(batch.batch_id, batch.writes, ops.reshape(-1, 3), pieces.reshape(-1, 2))

    def poll(self) -> list[IoDone]:
        """Return the batches that ended."""
        return [IoDone(batch_id, tuple(results)) for batch_id, results in self._io.poll()]

    def close(self) -> None:
        """Wait, and end the threads."""
        self._io.close()
