"""Where a file store may live: what is told when it may not, and who owns what."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from file_stores import capacity_of, open_box

from kvtiers.data.disk_check import describe_mount
from kvtiers.data.file_folder import OwnedFolder
from kvtiers.data.file_settings import FileStoreSettings, max_frames
from kvtiers.data.file_store import FileStore
from kvtiers.data.slab import Slab
from kvtiers.model.errors import CapacityError, ProtocolError, StoreError, TransferError
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_suite import SLOT_NBYTES

OK = Outcome.OK
HOLD = """
import sys, time
from pathlib import Path
from kvtiers.data.file_folder import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]))
print("mine", flush=True)
time.sleep(60)
"""


def test_folders_are_private(store_slab, tmp_path):
    before = os.umask(0o022)
    try:
        box = open_box(store_slab, tmp_path / "kv")
    finally:
        os.umask(before)
    box.put(1)
    modes = {
        path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "kv").rglob("*")
    }
    modes["kv"] = stat.S_IMODE((tmp_path / "kv").stat().st_mode)
    assert modes == {
        "kv": 0o700,
        "kv/0": 0o700,
        "kv/0/0-12288": 0o700,
        "kv/0/0-12288/frames.slab": 0o600,
        "kv/0/0-12288/owner.lock": 0o600,
        "kv/0/0-12288/index": 0o700,
        "kv/0/0-12288/index/data.mdb": 0o600,
        "kv/0/0-12288/index/lock.mdb": 0o600,
    }
    box.store.close()


def test_instances_and_ranks_do_not_meet(store_slab, tmp_path):
    names = [("0", 0), ("0", 1), ("spare", 0)]
    boxes = [open_box(store_slab, tmp_path, instance=name, rank=rank) for name, rank in names]
    for number, box in enumerate(boxes):
        assert box.put(number) == [OK]
    for number, box in enumerate(boxes):
        assert box.get(*range(3)).index(OK) == number
        box.store.close()


def test_second_owner_is_told_who_the_first_is(store_slab, tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "0/0-12288")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"mine\n"
        pattern = rf"in use by process {holder.pid} on host \S+, since 2\d+.*instance"
        with pytest.raises(StoreError, match=pattern):
            open_box(store_slab, tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    open_box(store_slab, tmp_path).store.close()  # a dead owner owns nothing


def test_second_owner_in_the_same_process(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    with pytest.raises(StoreError, match=f"process {os.getpid()} "):
        open_box(store_slab, tmp_path)
    assert box.put(1) == [OK]
    box.store.close()
    open_box(store_slab, tmp_path).store.close()


def test_lock_that_is_not_signed(tmp_path):
    folder = OwnedFolder(tmp_path / "x")
    (tmp_path / "x/owner.lock").write_text("{")
    with pytest.raises(StoreError, match="has not signed"):
        OwnedFolder(tmp_path / "x")
    folder.close()
    folder.close()


def test_path_that_is_a_file(store_slab, tmp_path):
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(StoreError, match=re.escape(str(tmp_path / "kv")) + " is a file.*folder"):
        open_box(store_slab, tmp_path / "kv")
    (tmp_path / "kv").unlink()
    (tmp_path / "kv/0").mkdir(parents=True)
    (tmp_path / "kv/0/0-12288").write_text("mine")
    with pytest.raises(StoreError, match=r"0/0-12288 is a file"):
        open_box(store_slab, tmp_path / "kv")


def test_slab_file_that_is_a_folder_or_a_link(store_slab, tmp_path):
    open_box(store_slab, tmp_path).store.close()
    file = tmp_path / "0/0-12288/frames.slab"
    file.unlink()
    file.mkdir()
    with pytest.raises(StoreError, match=r"frames.slab.*remove it"):
        open_box(store_slab, tmp_path)
    file.rmdir()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"frames.slab.*remove it"):
        open_box(store_slab, tmp_path)
    file.unlink()
    open_box(store_slab, tmp_path).store.close()  # nothing is left locked by what failed


def told_as_nobody(folder: Path) -> str:
    """Return what another user is told of a folder; a child process becomes that user."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread of ours
        child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            OwnedFolder(folder)
        except StoreError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as told:
        return told.read().decode()


@pytest.mark.parametrize("case", ["not writable", "of another user", "shut"])
def test_folder_that_this_user_may_not_use(tmp_path_factory, case):
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    top = Path(os.path.realpath(tmp_path_factory.mktemp("users")))
    for parent in (top, *top.parents[:3]):
        parent.chmod(0o755)
    folder = top / "kv"
    folder.mkdir(mode=0o755)
    if case == "of another user":
        (folder / "0/0-12288").mkdir(parents=True)
    elif case == "shut":
        (folder / "0/0-12288").mkdir(parents=True)
        os.chown(folder / "0", 65534, 65534)
        os.chown(folder / "0/0-12288", 65534, 65534)
        (folder / "0/0-12288").chmod(0o500)
    expected = {
        "not writable": "cannot make the folder .*Permission denied.*user 65534 may write",
        "of another user": "belongs to user 0, this process is user 65534",
        "shut": "may not be written by user 65534; chmod 700",
    }
    told = told_as_nobody(folder / "0/0-12288")
    assert re.search(expected[case], told), told


def test_memory_file_system_is_warned_about(store_slab, caplog):
    shm = Path("/dev/shm")
    if describe_mount(shm).fs_type != "tmpfs":
        pytest.skip("no tmpfs here")
    folder = shm / f"kvtiers-test-{os.getpid()}"
    try:
        box = open_box(store_slab, folder)
        assert box.put(1) == [OK]
        (report,) = box.store.paths
        assert (report.filesystem, report.mount_point) == ("tmpfs", shm)
        box.store.close()
    finally:
        shutil.rmtree(folder)
    (warned,) = [r.message for r in caplog.records if "lies on tmpfs" in r.message]
    assert "raise the dram tier" in warned


@pytest.mark.parametrize("direct", ["auto", "on", "off"])
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "ceph"])
def test_network_file_system_needs_consent(store_slab, tmp_path, caplog, monkeypatch, kind, direct):
    """Its locks may not hold, its disk may be full: only who gives up direct I/O may use it."""
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 0:9 / {tmp_path}/net rw - {kind} host:/x rw\n"
    )
    monkeypatch.setattr("kvtiers.data.disk_check.MOUNTINFO", mounts)
    if direct == "off":
        box = open_box(store_slab, tmp_path / "net/kv", direct=direct)
        assert box.put(1) == [OK]
        box.store.close()
        assert [r for r in caplog.records if f"network file system ({kind} at" in r.message]
        return
    pattern = rf"network file system \({kind} at .*/net\).*local disk.*direct: off"
    with pytest.raises(StoreError, match=pattern):
        open_box(store_slab, tmp_path / "net/kv", direct=direct)
    assert not (tmp_path / "net").exists()  # nothing was made there
    open_box(store_slab, tmp_path / "local", direct=direct).store.close()


@pytest.mark.parametrize("exists", [False, True])
def test_read_only_file_system(store_slab, tmp_path, exists):
    folder = tmp_path / "mnt"
    folder.mkdir()
    if mounted("-t", "tmpfs", "none", str(folder)) != 0:
        pytest.skip("needs the right to mount")
    try:
        if exists:
            open_box(store_slab, folder).store.close()
        assert mounted("-o", "remount,ro", str(folder)) == 0
        with pytest.raises(StoreError, match=re.escape(str(folder)) + r".*not writable.*mount it"):
            open_box(store_slab, folder)
        with pytest.raises(StoreError, match=r"[Rr]ead-only.*mount it read-write"):
            OwnedFolder(folder / "0/0-12288")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def mounted(*options: str) -> int:
    """Try to mount; returns the status."""
    if shutil.which("mount") is None:
        return -1
    return subprocess.run(["mount", *options], check=False, stderr=subprocess.DEVNULL).returncode


def test_link_to_a_folder_is_followed(store_slab, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "disk")
    box = open_box(store_slab, tmp_path / "kv")
    assert box.put(1) == [OK]
    box.store.close()
    box = open_box(store_slab, tmp_path / "disk")
    assert box.get(1) == [OK]
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()} "):
        open_box(store_slab, tmp_path / "kv")  # the same place by another name
    box.store.close()


def test_link_to_nothing(store_slab, tmp_path):
    (tmp_path / "kv").symlink_to(tmp_path / "unplugged/disk")
    with pytest.raises(StoreError, match=r"kv is a symbolic link to .*unplugged/disk, which"):
        open_box(store_slab, tmp_path / "kv")
    assert not (tmp_path / "unplugged").exists()


@pytest.mark.parametrize("own", ["0", "0/0-12288"])
def test_link_in_place_of_a_folder_of_ours(store_slab, tmp_path, own):
    """Somebody else's link must not lead our files anywhere."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "kv" / own
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=rf"kv/{own} is a symbolic link.*remove it.*as a path"):
        open_box(store_slab, tmp_path / "kv")
    assert [path.name for path in (tmp_path / "elsewhere").rglob("frames.slab")] == []


def test_paths_that_are_one_folder(store_slab, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "disk")
    with pytest.raises(StoreError, match=r"kv and .*disk are the same folder .*disk; name each"):
        open_box(store_slab, tmp_path / "kv", tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_missing_parents_are_made_private(store_slab, tmp_path):
    open_box(store_slab, tmp_path / "a/b/kv").store.close()
    made = [tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/kv"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3


def test_capacity_below_one_slot(store_slab, tmp_path):
    with pytest.raises(CapacityError, match=r"1kB a rank hold no slot.*at least 1MiB a rank"):
        FileStore(store_slab, FileStoreSettings((tmp_path,), 1000))
    least = capacity_of(1)
    assert max_frames(least, SLOT_NBYTES) == 1
    with pytest.raises(CapacityError, match="at least 1MiB a rank"):
        max_frames(least - 1, SLOT_NBYTES)
    assert max_frames(capacity_of(11, 3), SLOT_NBYTES, 3) == 9


def test_control_can_count_on_the_same_number_of_slots(store_slab, tmp_path):
    capacity = 3 * 2**20
    store = FileStore(store_slab, FileStoreSettings((tmp_path / "a", tmp_path / "b"), capacity))
    assert store.num_slots == max_frames(capacity, SLOT_NBYTES, 2)
    store.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"paths": ()},
        {"paths": (Path("a"), Path("a"))},
        {"instance": "../x"},
        {"instance": ""},
        {"rank": -1},
        {"direct": "yes"},
    ],
)
def test_wrong_settings(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FileStoreSettings(**({"paths": (Path("a"),), "capacity_nbytes": 2**30} | wrong))


def test_slots_that_no_sector_fits(tmp_path):
    slab = Slab(2, 5000, pin="off")
    with pytest.raises(CapacityError, match="5000 bytes are no multiple of 4096"):
        open_box(slab, tmp_path)
    slab.close()


def test_batch_that_raises_has_taken_nothing(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    good = box.filled(1, 0)
    for bad in (box.frame(2, 99), box.frame(2, -1), box.frame(2, 1, SLOT_NBYTES + 1)):
        with pytest.raises(TransferError):
            box.store.put([good, bad])
    assert box.held() == set()
    assert box.store.num_free == 8
    box.store.close()
    with pytest.raises(ProtocolError, match="closed"):
        box.store.put([good])


def test_paths_share_the_frames(store_slab, tmp_path):
    paths = tuple(tmp_path / name for name in "abc")
    box = open_box(store_slab, *paths, num_slots=12)
    assert box.put(*range(9)) == [OK] * 9
    used = [_written(path / "0/0-12288/frames.slab") for path in paths]
    assert used == [3, 3, 3]
    assert [report.folder for report in box.store.paths] == [path / "0/0-12288" for path in paths]
    box.store.close()


def _written(file: Path) -> int:
    body = file.read_bytes()[4096:]
    slots = [body[i : i + SLOT_NBYTES] for i in range(0, len(body), SLOT_NBYTES)]
    return sum(any(slot) for slot in slots)


def test_nothing_survives_a_start_that_failed(store_slab, tmp_path):
    before = threading.active_count()
    with pytest.raises(CapacityError, match="lower the tier's capacity"):
        FileStore(store_slab, FileStoreSettings((tmp_path,), 2**60))
    assert threading.active_count() == before


def test_number_of_files_does_not_grow_with_the_frames(store_slab, tmp_path):
    """R58: a file a block fills a directory's index long before its disk."""
    counts = set()
    for num_slots in (4, 400):
        path = tmp_path / str(num_slots)
        box = open_box(store_slab, path, num_slots=num_slots)
        for first in range(0, num_slots, 4):
            assert set(box.put(*range(first, first + 4))) == {Outcome.OK}
        box.store.close()
        counts.add(sum(1 for _ in path.rglob("*")))
    assert len(counts) == 1
