"""Whether a store's folder lies on a medium that can hold it."""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtiers.model.errors import CapacityError, StoreError
from kvtiers.model.units import format_size

logger = logging.getLogger(__name__)

MOUNTINFO: Final = Path("/proc/self/mountinfo")

# Between the hosts of these neither locks nor shared mappings work.
_NETWORK: Final = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    }
)
# Any other file system in user space may be remote: sshfs, s3fs, gcsfuse, juicefs, rclone, ...
_LOCAL_FUSE: Final = frozenset(
    {
        "fuse.bindfs",
        "fuse.encfs",
        "fuse.fuse-overlayfs",
        "fuse.gocryptfs",
        "fuse.lxcfs",
        "fuse.mergerfs",
        "fuse.ntfs-3g",
        "fuse.unionfs",
    }
)
_MEMORY: Final = frozenset({"ramfs", "tmpfs"})
_NO_ROOM_NBYTES: Final = 2**20
_READABLE: Final = (2**40, 2**30, 2**20, 2**10)


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that a path lies on.

    Attributes:
        fs_type: as the kernel names it, "unknown" where nobody says. mount_point: its root.
        is_network: whether other hosts may change it. is_memory: whether it ends with the machine.
    """

    fs_type: str
    mount_point: Path
    is_network: bool
    is_memory: bool


def describe_mount(path: Path) -> Mount:
    """Return what a path, existing or not, lies on: the kernel's table of mounts says."""
    real = os.path.realpath(path)
    found, point, length = "unknown", "/", -1
    try:
        lines = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        root = _unescaped(fields[4])
        inside = real == root or real.startswith(root.rstrip("/") + "/")
        if inside and len(root) >= length:  # of two at one place the later one covers the other
            found, point, length = after.split(" ")[0], root, len(root)
    fuse = found == "fuse" or (found.startswith("fuse.") and found not in _LOCAL_FUSE)
    return Mount(found, Path(point), fuse or found in _NETWORK, found in _MEMORY)


def check_place(path: Path, what: str) -> Mount:
    """Refuse a folder, existing or not, that cannot hold a store; warn where it is memory.

    Args:
        path: of the folder. what: "the LMDB store", for messages.

    Returns:
        What the path lies on.

    Raises:
        StoreError: it is a file, not writable, on a network file system, or has no possible name.
    """
    mount = describe_mount(path)
    if mount.is_network:
        raise StoreError(
            f"{path} lies on a network file system ({mount.fs_type} at {mount.mount_point}), where "
            f"locks and mappings are not safe: put {what} on a local disk"
        )
    above = _nearest(path)
    try:
        _refuse_long(path)
        found = above.stat()
    except OSError as error:
        raise StoreError(f"cannot look at {above}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{above} is a file: {what} needs a folder of its own")
    if not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(
            f"{above} (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}) is not writable "
            f"for user {os.geteuid()}: change its owner or mode, mount it writable, or name "
            f"another folder for {what}"
        )
    if mount.is_memory:
        logger.warning(
            "%s lies on %s: %s takes memory there, and does not outlive the machine; raise the "
            "dram tier instead, or name a folder on a disk",
            path, mount.fs_type, what,
        )  # fmt: skip
    return mount


def check_room(
    path: Path, capacity_nbytes: int, used_nbytes: int, what: str, num_paths: int = 1
) -> None:
    """Refuse a capacity that the disk of a folder, existing or not, has no room for.

    Args:
        path: of the folder. capacity_nbytes: that the store may take there in the end.
        used_nbytes: of these, what it has taken already. what: "the file store", for messages.
        num_paths: over which the configured capacity is spread evenly.

    Raises:
        CapacityError: the message says how much room there is, and what to write.
    """
    fits = free_nbytes(path) + used_nbytes
    if capacity_nbytes <= fits:
        return
    remedy = f"write a capacity of at most {readable_size(fits * num_paths)}, or make room"
    if fits < _NO_ROOM_NBYTES:
        remedy = "name a folder on another disk"
    raise CapacityError(
        f"{what} at {path} is to take {readable_size(capacity_nbytes)}, but its disk has "
        f"{readable_size(fits - used_nbytes)} free besides {readable_size(used_nbytes)} that "
        f"it holds already: {remedy}"
    )


def free_nbytes(path: Path) -> int:
    """Return what the disk of a folder, existing or not, has left for this user."""
    found = os.statvfs(_nearest(path))
    return found.f_bavail * found.f_frsize


def device_of(path: Path) -> int:
    """Return the number of the disk, as the kernel has it, of a folder, existing or not."""
    return _nearest(path).stat().st_dev


def readable_size(nbytes: int) -> str:
    """Return a size rounded down to a few digits, to be read and to be written into the YAML."""
    for unit in _READABLE:
        if nbytes >= 16 * unit:
            return format_size(nbytes // unit * unit)
    return format_size(max(0, nbytes))


def _refuse_long(path: Path) -> None:
    try:
        path.lstat()
    except OSError as error:  # anything else is said of what exists above it
        if error.errno == errno.ENAMETOOLONG:
            raise StoreError(
                f"{path}: {error.strerror}; name a folder with a shorter name"
            ) from error


def _nearest(path: Path) -> Path:
    """Return the path, or what exists of it."""
    real = Path(os.path.realpath(path))
    return next((part for part in (real, *real.parents) if os.path.lexists(part)), Path("/"))


def _unescaped(word: str) -> str:
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(escape, character)
    return word
