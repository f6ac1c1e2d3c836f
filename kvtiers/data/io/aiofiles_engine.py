"""The portable engine: aiofiles on an asyncio thread of its own."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from aiofiles.os import wrap

from kvtiers.data.io.base import DEFAULT_DEPTH, IoBatch, IoDone, IoOp

_logger = logging.getLogger(__name__)

_SECTOR: Final = 512  # direct I/O never continues inside of one
_MAX_PIECES: Final = 1024  # IOV_MAX


class AiofilesIo:
    """Positioned calls through aiofiles, one hop to a pool thread per operation.

    It needs nothing compiled, and shares the GIL with whatever else the process computes.
    No file object is opened: nothing is left open by a call that is cancelled.

    Args:
        depth: operations under way, and threads.
    """

    def __init__(self, depth: int = DEFAULT_DEPTH) -> None:
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="kvtiers-io")
        self._move = wrap(_move)
        self._finished: deque[IoDone] = deque()
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself holds them weakly
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvtiers-aio", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """ "aiofiles"."""
        return "aiofiles"

    def submit(self, batch: IoBatch) -> None:
        """Submit operations."""
        self._loop.call_soon_threadsafe(self._begin, batch)

    def poll(self) -> list[IoDone]:
        """Return the batches that ended."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        """Wait, and end the threads."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._pool.shutdown()
        self._loop.close()

    # -- on the thread ----------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, batch: IoBatch) -> None:
        task = self._loop.create_task(self._serve(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, batch: IoBatch) -> None:
        calls = (
            self._move(op, batch.writes, loop=self._loop, executor=self._pool) for op in batch.ops
        )
        ended = await asyncio.gather(*calls, return_exceptions=True)
        results = []
        for result in ended:
            if isinstance(result, BaseException):
                _logger.error("file I/O failed in an unknown way: %r", result)
                results.append(-errno.EIO)
            else:
                results.append(int(result))
        self._finished.append(IoDone(batch.batch_id, tuple(results)))

    async def _drain(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _move(op: IoOp, writes: bool) -> int:
    """Run one operation; returns the bytes moved or a negative errno."""
    views = [_view(address, nbytes) for address, nbytes in op.pieces]
    nbytes = sum(nbytes for _, nbytes in op.pieces)
    call = os.pwritev if writes else os.preadv
    done = 0
    while done < nbytes:
        try:
            count = call(op.fd, _rest(views, done)[:_MAX_PIECES], op.offset + done)
        except OSError as error:
            return -(error.errno or errno.EIO)
        done += count
        if count == 0:
            return -errno.ENOSPC if writes else done
        if not writes and done < nbytes and (op.offset + done) % _SECTOR:
            break  # the end of a file that was cut
    return done


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the pieces after some bytes."""
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
