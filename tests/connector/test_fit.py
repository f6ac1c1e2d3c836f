"""What a machine is told of a configuration that it cannot hold."""

import pytest

from kvtiers.connector import fit
from kvtiers.connector.fit import check_memory, misfits
from kvtiers.data import disk_check, lmdb_folder
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import CapacityError

SLAB = {"kind": "dram", "capacity": "1MiB"}


def test_tiers_that_the_machine_cannot_hold_together_are_refused():
    tiers = [{"kind": "dram", "capacity": "1MiB"}, {"kind": "memory", "capacity": "8000000TiB"}]
    with pytest.raises(CapacityError, match="of host memory in all") as found:
        check_memory(parse_mapping({"tiers": tiers}))
    assert found.value.path == ("tiers", 1, "capacity")


def test_machine_is_told_what_does_not_fit_on_it(tmp_path):
    (tmp_path / "file").write_text("in the way")
    tiers = [
        {"kind": "dram", "capacity": "1MiB"},
        {"kind": "nvme", "paths": [str(tmp_path / "nvme")], "capacity": "800TiB"},
        {"kind": "lmdb", "path": str(tmp_path / "shared"), "capacity": "800TiB"},
        {"kind": "nvme", "name": "b", "paths": [str(tmp_path / "file")], "capacity": "1MiB"},
    ]
    found = misfits(parse_mapping({"tiers": tiers}))
    assert [error.path for error in found] == [
        ("tiers", 1, "capacity"),
        ("tiers", 2, "capacity"),
        ("tiers", 3, "paths"),
    ]
    assert "write a capacity of at most" in str(found[0])
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def nvme(path, name="nvme", capacity="1MiB", **more):
    return {"kind": "nvme", "name": name, "paths": [str(path)], "capacity": capacity, **more}


def misfit(*stores, **sections):
    """Return the only thing that this machine cannot hold of some stores below a slab."""
    tiers = [{"kind": "dram", "capacity": "1MiB"}, *stores]
    (found,) = misfits(parse_mapping({"tiers": tiers, **sections}))
    return found


def test_what_others_have_in_a_folder_is_no_room_for_a_store(tmp_path, monkeypatch):
    (tmp_path / "photos").write_bytes(bytes(8 << 20))
    (tmp_path / "0" / "0-8192").mkdir(parents=True)
    slots = tmp_path / "0" / "0-8192" / "frames.slab"
    monkeypatch.setattr(disk_check, "free_nbytes", lambda _: 4 << 20)
    assert "write a capacity of at most 4MiB" in str(misfit(nvme(tmp_path, capacity="8MiB")))
    slots.write_bytes(bytes(4 << 20))  # what an engine left is
    assert misfits(parse_mapping({"tiers": [SLAB, nvme(tmp_path, capacity="8MiB")]})) == []


def test_folder_that_two_paths_lead_to_is_refused(tmp_path):
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    found = misfit(nvme(tmp_path / "real", "a"), nvme(tmp_path / "alias", "b"))
    assert found.path == ("tiers", 2, "paths")
    assert str(found) == f"{tmp_path}/alias is the same folder as {tmp_path}/real; name another"


def test_tiers_that_share_a_disk_are_added_up(tmp_path, monkeypatch):
    for module in (fit, disk_check, lmdb_folder):
        monkeypatch.setattr(module, "free_nbytes", lambda _: 100 << 20)
    shared = {"kind": "lmdb", "path": str(tmp_path / "l"), "capacity": "40MiB"}  # a map of 58 MiB
    assert misfits(parse_mapping({"tiers": [SLAB, shared, nvme(tmp_path, capacity="42MiB")]})) == []
    found = misfit(shared, nvme(tmp_path, capacity="43MiB"))
    assert found.path == ("tiers", 2, "capacity")
    assert "is to take 43MiB more, and other paths of this configuration 58MiB" in str(found)


def test_lmdb_store_wants_the_folder_above_its_own(tmp_path):
    found = misfit({"kind": "lmdb", "path": str(tmp_path / "a" / "b"), "capacity": "1MiB"})
    assert found.path == ("tiers", 1, "path")
    assert str(found).startswith(f"{tmp_path}/a is no folder; make it")


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("", "is no regular file"),
        ("a/log.jsonl", "a is no folder; make it first"),
        ("/proc/log.jsonl", "belongs to the kernel"),
    ],
)
def test_log_that_cannot_be_written_is_refused(tmp_path, where, why):
    found = misfit(cost={"decision_log": str(tmp_path / where)})
    assert found.path == ("cost", "decision_log")
    assert why in str(found)


def test_log_that_can_be_written_is_not_made(tmp_path):
    log = {"decision_log": str(tmp_path / "log.jsonl")}
    assert misfits(parse_mapping({"tiers": [SLAB], "cost": log})) == []
    assert list(tmp_path.iterdir()) == []


def test_machine_that_fits_is_told_nothing(tmp_path):
    tiers = [
        {"kind": "dram", "capacity": "1MiB"},
        {"kind": "nvme", "paths": [str(tmp_path / "nvme")], "capacity": "1MiB"},
    ]
    assert misfits(parse_mapping({"tiers": tiers})) == []


def test_full_disk_is_told_no_capacity_for_a_shared_store(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_folder, "free_nbytes", lambda _: 1 << 20)
    shared = {"kind": "lmdb", "path": str(tmp_path / "l"), "capacity": "40MiB"}
    assert "free: name a folder on another disk, or make room" in str(misfit(shared))
