"""Objects that the garbage collector need not look at, of which an index has a million."""

from __future__ import annotations

import ctypes


def uncollected(item: object) -> None:
    """Let the collector pass an object by; it is freed with the last reference, as any other.

    Only for what can be in no cycle of references: such a cycle would never be freed. A full
    collection looks at all that it tracks, while the engine waits.
    """
    if _untrack is not None:
        _untrack(item)


try:
    _untrack = ctypes.pythonapi.PyObject_GC_UnTrack
except AttributeError:  # an interpreter that has another collector
    _untrack = None
else:
    _untrack.argtypes = [ctypes.py_object]
    _untrack.restype = None
