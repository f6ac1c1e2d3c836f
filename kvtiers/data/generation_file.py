"""The generation that the next life of an engine begins with, recorded beside its stores."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtiers.data.lmdb_files import sync_folder
from kvtiers.model.errors import StoreError
from kvtiers.observe.files import sweep

logger = logging.getLogger(__name__)

_FOLDER: Final = "generations"
_MAX: Final = 2**62  # what is recorded counts up from 0; what a reset draws lies above


class Generations:
    """Which generation an engine names its frames in.

    A life begins in the recorded one: all frames in it were made with the weights that the
    fingerprint names. A `renew` records the next one, durably, and goes on in one drawn at random
    that no other life and no other engine ever has: the weights may be anything from then on.

    Args:
        folders: of the stores that outlive the process. fingerprint: of the engine, 32 bytes.
        why_not: why nothing that this engine stores may be served to another life, "" if it may.

    Raises:
        StoreError: a record cannot be read.
    """

    def __init__(self, folders: Sequence[Path], fingerprint: bytes, why_not: str = "") -> None:
        self._files = [folder / _FOLDER / fingerprint[:16].hex() for folder in folders]
        self._lasting = not why_not
        if why_not and folders:
            logger.warning(
                "nothing that is stored now will be found by a later start or by another engine: "
                "%s",
                why_not,
            )
        self._recorded = max((_read(path) for path in self._files), default=0)
        self.present = self._recorded if self._lasting else _drawn()

    def renew(self) -> bool:
        """End the present generation, for this life and all later ones.

        Returns:
            whether that is recorded everywhere; if not, a later start may serve what was stored
            before, and the log says where.
        """
        self.present = _drawn()
        if not self._lasting:
            return True
        self._recorded += 1
        recorded = [self._record(path) for path in self._files]
        return all(recorded)

    def _record(self, path: Path) -> bool:
        try:
            # Another engine may have counted on meanwhile.
            _write(path, max(self._recorded, _read(path) + 1))
        except (OSError, StoreError) as error:
            logger.error(
                "the reset could not be recorded in %s (%s): a later start may serve KV from "
                "before it; remove the store's folder before that if the weights have changed",
                path,
                error,
            )
            return False
        return True


def _drawn() -> int:
    return _MAX + secrets.randbelow(_MAX)


def _read(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii")
        number = int(text)
        if not 0 <= number < _MAX:
            raise ValueError(number)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: is no record of a generation ({error}); what the store holds of this engine "
            "cannot be told from what a reset ended: remove the store's folder, or restore the file"
        ) from error
    return number


def _write(path: Path, number: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep(path.parent.glob(f"{path.name}.*.tmp"))
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, str(number).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)
    sync_folder(path.parents[1])  # which names that folder


def recorded_generations(folder: Path) -> dict[str, int]:
    """Return what a store's folder records, by the name of each engine's file.

    Raises:
        StoreError: a record cannot be read.
    """
    try:
        names = sorted(path.name for path in (folder / _FOLDER).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StoreError(f"cannot look into {folder / _FOLDER}: {error.strerror}") from error
    return {name: _read(folder / _FOLDER / name) for name in names if "." not in name}
