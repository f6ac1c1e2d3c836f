"""Where in the host's memory pages are put, on machines with several nodes of it."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from typing import Final

logger = logging.getLogger(__name__)

# mbind(2) has no wrapper in libc; libnuma would be one more thing to install.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_PREFERRED: Final = 1
_MAX_NODES: Final = 1024  # what the kernel bears, and a multiple of 64


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Ask for the pages of a range that nobody has touched to be put into a node.

    Args:
        address: a multiple of the page size.

    Returns:
        whether the kernel took the wish; else the pages come from wherever it likes.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        logger.debug("memory cannot be asked for in node %d here", node)
        return False
    mask = (ctypes.c_uint64 * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(_MAX_NODES + 1),  # the kernel counts one bit less
        ctypes.c_uint(0),
    )
    if failed:
        reason = os.strerror(ctypes.get_errno())
        logger.warning("memory of node %d, which is nearest to the device: %s", node, reason)
    return not failed
