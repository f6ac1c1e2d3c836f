"""The index on disk: what it remembers, what it refuses, and that its map is large enough."""

from __future__ import annotations

import os
import random

import lmdb
import pytest

from kvtiers.data.file_index import FileIndex, IndexChange, IndexRecord
from kvtiers.data.file_settings import index_nbytes
from kvtiers.data.index_check import index_problem
from kvtiers.model.errors import StoreError
from kvtiers.model.keys import StoreKey


def random_key() -> StoreKey:
    return StoreKey(os.urandom(32))


def test_history_is_remembered_oldest_first(tmp_path):
    index = FileIndex(tmp_path, 2, 4096, index_nbytes(8))
    first, second, third = (random_key() for _ in range(3))
    records = [IndexRecord(1, 7, 4000, 9), IndexRecord(0, 3, 4096, 4), IndexRecord(0, 4, 1, 12)]
    keys = (first, second, third)
    index.commit([IndexChange(key, record) for key, record in zip(keys, records, strict=True)])
    index.commit([IndexChange(first), IndexChange(random_key()), IndexChange(first, records[0])])
    store_id = index.store_id
    index.close()
    index = FileIndex(tmp_path, 2, 4096, index_nbytes(8))
    assert index.store_id == store_id
    assert list(index.records().items()) == [
        (second, records[1]),
        (first, records[0]),
        (third, records[2]),
    ]
    index.commit([IndexChange(None, generation=5), IndexChange(third, records[2])])
    assert (list(index.records()), index.generation) == ([third], 0)  # its reader's to note
    index.close()
    index = FileIndex(tmp_path, 2, 4096, index_nbytes(8))
    assert index.generation == 5
    index.close()


def test_commit_is_all_or_nothing(tmp_path):
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(8))
    kept = random_key()
    index.commit([IndexChange(kept, IndexRecord(0, 0, 1, 1))])
    too_many = [IndexChange(random_key(), IndexRecord(0, i, 1, i)) for i in range(50_000)]
    with pytest.raises(lmdb.Error):
        index.commit([IndexChange(kept), *too_many])
    assert list(index.records()) == [kept]
    index.close()


@pytest.mark.parametrize("num_kept", [0, 300])
def test_commit_of_what_comes_and_goes_does_not_make_the_file_look_cut(tmp_path, num_kept):
    """R57: frames put and dropped between two commits. The next start would begin empty."""
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(4000))
    kept = {random_key(): IndexRecord(0, i, 1, i) for i in range(num_kept)}
    index.commit([IndexChange(key, record) for key, record in kept.items()])
    passing = [random_key() for _ in range(2000)]
    brought = [IndexChange(key, IndexRecord(0, i, 1, 1000 + i)) for i, key in enumerate(passing)]
    index.commit([*brought, *map(IndexChange, passing)])
    assert index_problem(index.path) is None
    index.close()
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(4000))
    assert index.records() == kept
    index.close()


def test_draft_of_a_process_that_was_killed_is_in_nobodys_way(tmp_path):
    """R67."""
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(8))
    records = {random_key(): IndexRecord(0, 0, 1, 1)}
    draft = index.path / "new"
    draft.mkdir()
    (draft / "data.mdb").write_bytes(b"half")
    index.close()
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(8))
    assert not draft.exists()
    index.rewrite(records)
    assert index.records() == records
    index.close()


@pytest.mark.parametrize("num", [1, 8, 300, 5000])
def test_map_is_large_enough_to_rewrite_everything_at_once(tmp_path, num):
    """Over and over: pages in use, pages just freed, and pages that are written."""
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(num))
    keys = [random_key() for _ in range(num)]
    chance = random.Random(num)
    for turn in range(25):
        changes = []
        for slot in chance.sample(range(num), chance.choice((1, num // 3 + 1, num, num))):
            changes.append(IndexChange(keys[slot]))
            keys[slot] = random_key()
            changes.append(IndexChange(keys[slot], IndexRecord(0, slot, 4096, turn)))
        index.commit(changes)
    index.commit([IndexChange(None, generation=1)])
    index.commit([IndexChange(k, IndexRecord(0, i, 4096, i)) for i, k in enumerate(keys)])
    assert list(index.records()) == keys
    index.close()


def test_foreign_environment_is_refused(tmp_path):
    env = lmdb.open(str(tmp_path / "index"), max_dbs=2)
    meta = env.open_db(b"meta")
    with env.begin(write=True) as txn:
        txn.put(b"store", b"something else", db=meta)
    env.close()
    with pytest.raises(StoreError, match="no index of a file store"):
        FileIndex(tmp_path, 1, 4096, 2**20)
    with lmdb.open(str(tmp_path / "index"), max_dbs=2) as env, env.begin() as txn:
        assert txn.get(b"store", db=env.open_db(b"meta", txn=txn)) == b"something else"


def test_file_that_is_no_environment_is_a_problem(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"x" * 10_000)
    assert "no LMDB meta page" in index_problem(tmp_path)
    assert index_problem(tmp_path / "nowhere") is None


def test_pages_that_a_commit_took_and_did_not_need_do_not_make_the_index_look_cut(tmp_path):
    """LMDB does not write them; the next life would take the index, and all frames, for lost."""
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(8000))
    kept = random_key()
    index.commit([IndexChange(kept, IndexRecord(0, 0, 1, 1))])
    keys = [random_key() for _ in range(3000)]
    come = [IndexChange(key, IndexRecord(0, i, 4096, i)) for i, key in enumerate(keys)]
    index.commit(come + [IndexChange(key) for key in keys])
    index.close()
    assert index_problem(index.path) is None
    index = FileIndex(tmp_path, 1, 4096, index_nbytes(8000))
    assert list(index.records()) == [kept]
    assert not index.outgrown
    index.rewrite(index.records())
    assert (index.path / "data.mdb").stat().st_size == index_nbytes(8000)
    assert (index.path / "data.mdb").stat().st_blocks * 512 < 2**17
    index.close()
