"""Which file systems a file store accepts for its folders."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from kvtiers.data.disk_check import Mount, check_place, describe_mount
from kvtiers.data.file_settings import DirectMode
from kvtiers.model.errors import StoreError

_logger = logging.getLogger(__name__)

_WHAT: Final = "the file store"


def judge_medium(folder: Path, direct: DirectMode) -> Mount:
    """Return what a folder, existing or not, lies on; warn of memory, refuse a network.

    Over a network calls are slow, a lock may not keep out an engine on another host, and a file
    that was preallocated may meet a full disk all the same. Who accepts that says so by giving up
    direct I/O.

    Raises:
        StoreError: it is a file, not writable, or on a network file system while `direct` is
            not "off".
    """
    mount = describe_mount(folder)
    if not mount.is_network:
        return check_place(folder, _WHAT)
    where = f"{folder} lies on a network file system ({mount.fs_type} at {mount.mount_point})"
    if direct != "off":
        raise StoreError(
            f"{where}, where calls are slow and locks may not hold between hosts: name a folder "
            "on a local disk, or accept that with `direct: off`"
        )
    _logger.warning("%s: expect slow calls, and give each host a path of its own", where)
    return mount
