"""Takes objects out of the garbage collector's sight, of which an index has a million."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def uncollected(item: object) -> None:
    """Stop the garbage collector tracking an object; it is freed with its last reference.

    Only for what can be in no cycle of references: such a cycle would never be freed. A full
    collection looks at all that it tracks, while the engine waits.
    """
    if _untrack is not None:
        _untrack(item)


def _find() -> Callable[[object], object] | None:
    try:
        found = ctypes.pythonapi.PyObject_GC_UnTrack
    except AttributeError:  # an interpreter that has another collector
        return None
    found.argtypes = [ctypes.py_object]
    found.restype = None
    return found


_untrack = _find()
