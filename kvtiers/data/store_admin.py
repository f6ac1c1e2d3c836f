"""Which stores lie in a folder, for those who look after them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from kvtiers.data.file_folder import lock_of
from kvtiers.data.lmdb_files import DATA, STATE
from kvtiers.data.slab_file import SlabMark, slab_mark, slab_path
from kvtiers.data.store_admin_files import FileStoreAdmin
from kvtiers.data.store_admin_index import IndexView, index_of
from kvtiers.data.store_admin_lmdb import USERS_LOCK, LmdbStoreAdmin
from kvtiers.data.store_admin_values import Dropped, Progress, StoreStat, Verdict
from kvtiers.model.errors import StoreError

_PUBLISHED_SECONDS: Final = 0.7  # an owner publishes after 0.5, and syncs its files first


class StoreAdmin(Protocol):
    """One store, stopped or running, looked after from outside."""

    @property
    def name(self) -> str:
        """Its folder."""
        ...

    @property
    def used_nbytes(self) -> int:
        """What `evict` counts."""
        ...

    def stat(self) -> StoreStat:
        """Say what it is and holds."""
        ...

    def num_to_verify(self) -> tuple[int, int]:
        """Return how many frames there are, and their bytes."""
        ...

    def verify(self, progress: Progress, *, quarantine: bool) -> Verdict:
        """Read every frame; with `quarantine`, drop what is damaged."""
        ...

    def clear(self) -> Dropped:
        """Drop every frame."""
        ...

    def evict(self, nbytes: int) -> Dropped:
        """Drop the oldest frames, until no more than so many bytes are used."""
        ...


def find_stores(paths: Sequence[Path], patience_seconds: float = 10.0) -> list[StoreAdmin]:
    """Return all stores in some folders; changes nothing.

    Args:
        paths: each the folder of an LMDB store, a path of a file store, or the folder of an
            instance or rank in one.
        patience_seconds: how long to wait for the process that owns a running file store.

    Raises:
        StoreError: one of them is not there, may not be read, or is none of these; the message
            says what it is and what would be right.
    """
    stores: list[StoreAdmin] = []
    ranks: list[Path] = []
    for path in paths:
        folder = _folder(path)
        if _is_lmdb(folder):
            stores.append(LmdbStoreAdmin(folder))
            continue
        found = _ranks(folder)
        if not found:
            raise StoreError(_instead(folder))
        ranks += [rank for rank in found if rank not in ranks]
    return [*_file_stores(ranks, patience_seconds), *stores] if ranks else stores


def shares(stores: Iterable[StoreAdmin], nbytes: int) -> list[int]:
    """Return how many bytes each store keeps, so that all together keep so many.

    Each keeps the same part of what it uses: of a block that all ranks hold, all keep theirs. The
    index of a running file store is a little behind; that is waited for.
    """
    stores = list(stores)
    if any(stat.kind == "nvme" and stat.owner for stat in (store.stat() for store in stores)):
        time.sleep(_PUBLISHED_SECONDS)
    used = [store.used_nbytes for store in stores]
    total = sum(used)
    return [nbytes * each // total if total > nbytes else each for each in used]


def _folder(path: Path) -> Path:
    """Return a path's real folder."""
    try:
        real = path.resolve(strict=True)
        if real.is_dir():
            user = real.stat().st_uid
            os.scandir(real).close()
        else:
            raise StoreError(_instead_file(path))
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such folder; name a path of a tier, as the "
                         "configuration does") from None  # fmt: skip
    except OSError as error:
        raise StoreError(
            f"{path} may not be read by user {os.geteuid()}: {error.strerror}; run as the user "
            "whose store it is"
        ) from error
    if user != os.geteuid() and (_is_lmdb(real) or _is_rank(real)):
        raise StoreError(
            f"{path} belongs to user {user}, this process is user {os.geteuid()}: run as that user"
        )
    return real


def _is_lmdb(folder: Path) -> bool:
    return (folder / DATA).is_file() and (
        (folder / STATE).is_file() or (folder / USERS_LOCK).is_file()
    )


def _is_rank(folder: Path) -> bool:
    return lock_of(folder).is_file()


def _ranks(folder: Path) -> list[Path]:
    """Return the ranks' folders in a path, an instance, or a rank's folder itself."""
    if _is_rank(folder):
        return [folder]
    found = []
    for below in _folders_in(folder):
        found += [below] if _is_rank(below) else [r for r in _folders_in(below) if _is_rank(r)]
    for rank in found:
        user = rank.stat().st_uid
        if user != os.geteuid():
            raise StoreError(
                f"{rank} belongs to user {user}, this process is user {os.geteuid()}: run as that "
                "user"
            )
    return found


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except PermissionError:
        return []  # somebody else's


def _file_stores(ranks: Sequence[Path], patience_seconds: float) -> list[StoreAdmin]:
    """Put the folders of each store together: its index says which files are its own."""
    marks = {rank: mark for rank in ranks if (mark := _mark(rank)) is not None}
    firsts = [rank for rank in ranks if index_of(rank).is_dir()]
    others = {rank for rank in marks if rank not in firsts}
    stores: list[StoreAdmin] = []
    for first in firsts:
        store_id = _store_id(first)
        own = {
            mark.file_idx: rank
            for rank, mark in marks.items()
            if rank in others and mark.store_id == store_id and mark.file_idx > 0
        }
        others -= set(own.values())
        stores.append(
            FileStoreAdmin({0: first} | own, patience_seconds, all_named=_all_named(first, ranks))
        )
    if others:
        rank = min(others)
        raise StoreError(
            f"{rank} is path {marks[rank].file_idx + 1} of a store that is striped over several; "
            "its index is on the first: name all of them, in the order of the configuration"
        )
    if not stores:
        raise StoreError(
            f"{ranks[0]} is the folder of a file store that was never opened to the end; nothing "
            "is stored there"
        )
    return stores


def _all_named(first: Path, ranks: Sequence[Path]) -> bool:
    """Whether there is a folder of the same instance and rank for each of the store's paths."""
    try:
        with IndexView(first) as view:
            num = view.num_files
    except StoreError:
        return True
    alike = [rank for rank in ranks if rank.parts[-2:] == first.parts[-2:]]
    return len(alike) >= num


def _store_id(first: Path) -> bytes | None:
    try:
        with IndexView(first) as view:
            return view.store_id
    except StoreError:  # said when the store is looked at
        return None


def _mark(rank: Path) -> SlabMark | None:
    try:
        return slab_mark(slab_path(rank))
    except OSError:
        return None


def _instead(folder: Path) -> str:
    """Say what a folder is that holds no store."""
    if (folder / DATA).is_file():
        if folder.name == index_of(folder).name and _is_rank(folder.parent):
            return f"{folder} is the index of a file store; name {folder.parent.parent.parent}"
        return (
            f"{folder} is an LMDB environment, but none of kvtiers (no {STATE}); name the `path` "
            "of an lmdb tier, or one of the `paths` of an nvme tier"
        )
    below = [path for path in _folders_in(folder) if _is_lmdb(path)]
    if below:
        return f"{folder} holds no store itself, but {below[0]} is an LMDB store: name that"
    return (
        f"{folder} holds no store; name the `path` of an lmdb tier, or one of the `paths` of an "
        "nvme tier, or an instance's or rank's folder in it"
    )


def _instead_file(path: Path) -> str:
    if path.suffix in (".yaml", ".yml"):
        return f"{path} is a file; name the folder that the tier in it names, not the configuration"
    if path.name in (DATA, slab_path(path).name, lock_of(path).name, STATE):
        return f"{path} is a file of a store; name its folder, {path.parent}"
    return f"{path} is a file, not the folder of a store"
