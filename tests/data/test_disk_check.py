"""What a store's folder lies on: refused, warned of, or good."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvtiers.data import disk_check
from kvtiers.data.disk_check import (
    check_place,
    check_room,
    describe_mount,
    free_nbytes,
    readable_size,
)
from kvtiers.model.errors import CapacityError, StoreError
from kvtiers.model.units import parse_size

WHAT = "the test store"
TIB = 2**40


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of mounts that the test fills."""
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(disk_check, "MOUNTINFO", table)
    return table


def mounts(table: Path, *entries: tuple[str, str]) -> None:
    """Fill a table with mount points and file system types."""
    table.write_text(
        "".join(
            f"{21 + i} 1 8:{i} / {point} rw,relatime shared:1 - {kind} /dev/{i} rw\n"
            for i, (point, kind) in enumerate(entries)
        )
    )


def test_the_deepest_mount_counts_and_of_two_the_later(table: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    mounts(table, ("/", "ext4"), (str(inner), "tmpfs"), (str(inner), "xfs"), (f"{inner}x", "nfs4"))
    found = describe_mount(inner / "not" / "there")
    assert (found.fs_type, found.mount_point) == ("xfs", inner)
    assert not found.is_network
    assert not found.is_memory
    assert describe_mount(Path("/usr")).fs_type == "ext4"


def test_mount_point_with_a_space_is_found(table: Path, tmp_path: Path) -> None:
    mounts(table, ("/", "ext4"), (f"{tmp_path}/a\\040b", "nfs"))
    assert describe_mount(tmp_path / "a b" / "c").is_network


def test_symlink_is_followed_to_its_file_system(table: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    mounts(table, ("/", "ext4"), (str(tmp_path / "real"), "nfs"))
    assert describe_mount(tmp_path / "alias" / "x").fs_type == "nfs"


def test_without_a_table_nothing_is_known(table: Path, tmp_path: Path) -> None:
    found = describe_mount(tmp_path)
    assert (found.fs_type, found.is_network, found.is_memory) == ("unknown", False, False)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "9p", "fuse.s3fs", "fuse.new", "fuse"])
def test_network_file_systems_are_refused(table: Path, tmp_path: Path, kind: str) -> None:
    mounts(table, ("/", kind))
    with pytest.raises(StoreError, match=rf"network.*{kind} at /.*{WHAT} on a local disk"):
        check_place(tmp_path, WHAT)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "fuse.mergerfs", "fuseblk"])
def test_local_file_systems_are_taken(
    table: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    mounts(table, ("/", kind))
    check_place(tmp_path / "a" / "b", WHAT)
    assert not caplog.records


def test_memory_is_warned_of(table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mounts(table, ("/", "tmpfs"))
    check_place(tmp_path, WHAT)
    assert "tmpfs" in caplog.text
    assert "dram tier" in caplog.text


def test_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"/file is a file"):
            check_place(path, WHAT)


def test_folder_without_rights_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere: the system's answer is given for it."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match=rf"owner {tmp_path.stat().st_uid}, .*not writable"):
        check_place(tmp_path / "store", WHAT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child starts no thread
def test_folder_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:  # where other users come: not in tmp_path
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                os.setgroups([])
                os.setgid(54321)
                os.setuid(54321)
                check_place(Path(folder) / "store", WHAT)
            except StoreError as error:
                code = 0 if "owner 0, mode 700" in str(error) else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_capacity_above_the_free_disk_names_one_that_fits(tmp_path: Path) -> None:
    free = free_nbytes(tmp_path / "not" / "there")
    with pytest.raises(CapacityError, match=r"at most \d+[KMGT]iB") as caught:
        check_room(tmp_path, free + TIB, 0, WHAT)
    words = str(caught.value)
    fits = parse_size(words.split("at most ")[1].split(",", maxsplit=1)[0])
    assert 0.9 * free < fits <= 1.1 * free
    check_room(tmp_path, fits // 2, 0, WHAT)


def test_capacity_over_several_paths_is_named_as_it_is_configured(tmp_path: Path) -> None:
    free = free_nbytes(tmp_path)
    with pytest.raises(CapacityError, match="at most") as caught:
        check_room(tmp_path, free + TIB, 0, WHAT, num_paths=4)
    fits = parse_size(str(caught.value).split("at most ")[1].split(",", maxsplit=1)[0])
    assert 3.6 * free < fits <= 4.4 * free


def test_disk_without_any_room_is_not_worth_a_capacity(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk_check, "free_nbytes", lambda _: 4096)
    with pytest.raises(CapacityError, match="holds already: name a folder on another disk"):
        check_room(tmp_path, TIB, 0, WHAT)


def test_name_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="File name too long"):
        check_place(tmp_path / ("a" * 300) / "kv", WHAT)


def test_what_a_store_has_already_counts_as_room(tmp_path: Path) -> None:
    check_room(tmp_path, free_nbytes(tmp_path) + TIB, 2 * TIB, WHAT)


def test_readable_sizes_are_rounded_down_and_can_be_written() -> None:
    for nbytes in (0, 1, 1023, 16 << 10, (17 << 20) + 5, (100 << 30) + 7, (40 << 40) + 1):
        size = parse_size(readable_size(nbytes))
        assert nbytes * 0.93 <= size <= nbytes
