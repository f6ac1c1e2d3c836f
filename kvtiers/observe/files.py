"""Writes files whole or not at all, and removes what is left of others that were not."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

_MAX_DRAFT_SECONDS: Final = 3600.0


def write_whole(contents: Mapping[Path, bytes]) -> None:
    """Write files so that whoever looks finds all of each: the old one, or the new one.

    None is replaced before every one of them is on the disk, whatever interrupts it. What is no
    regular file, such as a pipe, is written to as it is.

    Raises:
        OSError: one cannot be written.
    """
    drafts: dict[Path, Path] = {}
    try:
        for number, (path, content) in enumerate(contents.items()):
            target = Path(os.path.realpath(path))
            if target.exists() and not target.is_file():
                target.write_bytes(content)
                continue
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            draft = target.with_name(f".kvtiers-{os.getpid()}-{number}.tmp")
            drafts[draft] = target
            draft.write_bytes(content)
            if target.exists():
                draft.chmod(target.stat().st_mode & 0o777)
        for draft, target in drafts.items():
            draft.replace(target)
    finally:
        for draft in drafts:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def sweep(drafts: Iterable[Path]) -> None:
    """Remove drafts that killed processes have left; whoever lives is done with one at once."""
    for draft in drafts:
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > _MAX_DRAFT_SECONDS:
                draft.unlink()


def file_name(text: str) -> str:
    """Return a text as the beginning of a file's name: no longer than file systems take, with room
    for what tells files apart."""
    plain = text.replace("/", "-").encode("utf-8", "backslashreplace")
    return plain[:200].decode("utf-8", "ignore")
