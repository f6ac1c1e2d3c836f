"""Which file systems an LMDB environment may lie on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MOUNTINFO: Final = Path("/proc/self/mountinfo")

# Locks and shared mappings do not work between the hosts of these.
NETWORK: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
    }
)

# A preallocated block stays the file's here; a copy-on-write system may need another to rewrite it.
KEEPS_PREALLOCATION: Final = frozenset({"ext4", "xfs", "tmpfs"})


def filesystem_of(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the type of the file system that a path lies on, "unknown" where nobody says.

    Args:
        path: existing or not. mountinfo: the kernel's table of mounts.
    """
    real = os.path.realpath(path)
    found, length = "unknown", -1
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescaped(fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= length:  # of two at one place the later one covers the other
            found, length = after.split(" ")[0], len(point)
    return found


def _unescaped(word: str) -> str:
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(escape, character)
    return word
