"""Which file stores lie below a path, and what is refused as none."""

import os
import random
import shutil
from pathlib import Path

import lmdb
import pytest
from admin_boxes import held, quiet, rank_of, slab_of, verify, write_at
from file_stores import open_box
from store_boxes import stopped_store

from kvtiers.data.slab import Slab
from kvtiers.data.store_admin import find_stores
from kvtiers.model.errors import StoreError
from kvtiers.testing.store_suite import SLOT_NBYTES

pytestmark = pytest.mark.filterwarnings("error")


def test_all_instances_and_ranks_below_a_path_are_found(tmp_path):
    stopped_store(tmp_path, instance="a", rank=0)
    stopped_store(tmp_path, instance="a", rank=1)
    stopped_store(tmp_path, instance="b", rank=0)
    (tmp_path / "foreign" / "folder").mkdir(parents=True)
    names = [store.name for store in find_stores([tmp_path])]
    assert len(names) == 3
    assert [store.name for store in find_stores([tmp_path / "a"])] == names[:2]
    assert [store.name for store in find_stores([Path(names[2])])] == names[2:]
    assert [store.name for store in find_stores([tmp_path, tmp_path / "a"])] == names
    assert [p.name for p in (tmp_path / "foreign").rglob("*")] == ["folder"]


def test_stores_of_several_slot_sizes_lie_beside_each_other(tmp_path):
    stopped_store(tmp_path)
    slab = Slab(4, 2 * SLOT_NBYTES, pin="off")
    open_box(slab, tmp_path).store.close()
    slab.close()
    small, large = sorted((store.stat() for store in find_stores([tmp_path])),
                          key=lambda found: found.slot_nbytes)  # fmt: skip
    assert (small.slot_nbytes, small.num_frames) == (SLOT_NBYTES, 10)
    assert (large.slot_nbytes, large.num_frames) == (2 * SLOT_NBYTES, 0)


def test_a_striped_store_wants_all_its_paths(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    stopped_store(a, b, num=20)
    (store,) = find_stores([b, a])
    assert store.stat().paths == (str(rank_of(a)), str(rank_of(b)))
    assert store.verify(quiet, quarantine=True).num_good == 20
    (half,) = find_stores([a])
    assert "name all of them" in half.stat().problem
    with pytest.raises(StoreError, match="striped over 2 paths: name all of them"):
        half.verify(quiet, quarantine=True)
    with pytest.raises(StoreError, match="is path 2 of a store that is striped"):
        find_stores([b])
    assert held(a, b) == list(range(20))


def test_the_frames_of_a_file_that_is_gone_are_lost(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    stopped_store(a, b, num=20)
    slab_of(b).unlink()
    (store,) = find_stores([a, b])
    assert "path 2 of 2 is gone" in store.stat().problem
    verdict = store.verify(quiet, quarantine=True)
    assert (verdict.num_good, verdict.num_quarantined) == (10, 10)


def test_another_stores_file_is_not_read(tmp_path):
    stopped_store(tmp_path / "a")
    stopped_store(tmp_path / "b")
    shutil.copy(slab_of(tmp_path / "b"), slab_of(tmp_path / "a"))
    verdict = verify(tmp_path / "a", quarantine=False)
    assert (verdict.num_good, len(verdict.faults)) == (0, 10)


def no_such(path):
    return path / "none", "there is no such folder"


def empty(path):
    return path, "holds no store; name the `path` of an lmdb tier"


def a_file(path):
    (path / "x").write_text("")
    return path / "x", "is a file, not the folder of a store"


def a_yaml(path):
    (path / "kvtiers.yaml").write_text("")
    return path / "kvtiers.yaml", "not the configuration"


def the_slab(path):
    stopped_store(path)
    return slab_of(path), "is a file of a store; name its folder"


def the_index(path):
    stopped_store(path)
    return rank_of(path) / "index", f"is the index of a file store; name {path}"


def foreign_lmdb(path):
    lmdb.open(str(path)).close()
    return path, "is an LMDB environment, but none of kvtiers"


def never_opened(path):
    stopped_store(path)
    slab_of(path).unlink()
    shutil.rmtree(rank_of(path) / "index")
    return path, "never opened to the end"


@pytest.mark.parametrize(
    "make", [no_such, empty, a_file, a_yaml, the_slab, the_index, foreign_lmdb, never_opened]
)
def test_what_is_no_store_is_refused_and_left_alone(tmp_path, make):
    path, said = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError) as refusal:
        find_stores([path])
    assert said in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_of_another_format_is_left_alone(tmp_path):
    stopped_store(tmp_path)
    env = lmdb.open(str(rank_of(tmp_path) / "index"), max_dbs=2)
    with env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn)
        found = txn.get(b"store", db=meta)
        txn.put(b"store", (7).to_bytes(4, "little") + found[4:], db=meta)
    env.close()
    (store,) = find_stores([tmp_path])
    assert "is of format 7, this kvtiers has 1" in store.stat().problem
    for verb in (
        lambda: store.verify(quiet, quarantine=True),
        store.clear,
        lambda: store.evict(0),
    ):
        with pytest.raises(StoreError, match="is of format 7"):
            verb()


@pytest.mark.parametrize("size", [0.5, 3.0])
def test_a_damaged_index_is_said_and_kills_nobody(tmp_path, size):
    stopped_store(tmp_path)
    data = rank_of(tmp_path) / "index" / "data.mdb"
    if size < 1:
        os.truncate(data, 3 * 4096)
    else:
        chance = random.Random(1)
        for page in range(2, data.stat().st_size // 4096):
            write_at(data, page * 4096 + 10, chance.randbytes(200))
    (store,) = find_stores([tmp_path])
    assert "is damaged" in store.stat().problem
    verdict = store.verify(quiet, quarantine=True)
    assert not verdict.ok
    assert "its frames are lost" in verdict.problem
    assert held(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_store_is_refused(tmp_path):
    stopped_store(tmp_path)
    os.chown(rank_of(tmp_path), 12345, -1)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        find_stores([tmp_path])
