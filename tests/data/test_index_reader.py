"""The index reader answers every lookup, in pieces, without anybody waiting for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lmdb_box import FORMAT, MIB, NBYTES, settings_of

from kvtiers.control.presence import Belief, PresenceTable
from kvtiers.data import index_reader
from kvtiers.data.index_reader import PIECE_KEYS, IndexReader
from kvtiers.data.key_space import KeySpace
from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_files import DATA
from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.data.lmdb_store import LMDBStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.keys import BlockKey, Rank, block_key, pack_keys
from kvtiers.model.messages import NOT_LOOKED_UP, Lookup, Presence
from kvtiers.model.outcome import Outcome
from kvtiers.testing.late_index import HANGS, LateInventory

FINGERPRINT = bytes(range(32))
RANKS = [Rank(tensor=0), Rank(tensor=1)]
NAME = "shared"


def block(number: int) -> BlockKey:
    return block_key(number.to_bytes(32, "big"), 0)


def lookup(*numbers: int, epoch: int = 0) -> Lookup:
    return Lookup(NAME, pack_keys(block(n) for n in numbers), epoch)


class Engine:
    """A store per rank over one file, and a reader beside control."""

    def __init__(self, path: Path, **more: object) -> None:
        self.path = path
        self.slab = Slab(64, FORMAT.slot_nbytes, pin="off")
        self.stores = [LMDBStore(self.slab, settings_of(path, 4 * MIB)) for _ in RANKS]
        self.reader = make_reader(path, **more)

    def put(self, *numbers: int, ranks: tuple[int, ...] = (0, 1), generation: int = 0) -> None:
        for rank in ranks:
            space = KeySpace(FINGERPRINT, RANKS[rank], generation)
            refs = [FrameRef(space.name(block(n)), i, NBYTES) for i, n in enumerate(numbers)]
            self.stores[rank].put(refs)
            while not (answers := self.stores[rank].poll()):
                time.sleep(0.0005)
            assert set(answers[0].outcomes) == {Outcome.OK}

    def ask(self, *numbers: int) -> list[int]:
        self.reader.ask(lookup(*numbers))
        return flags(self.reader, len(numbers))

    def close(self) -> None:
        self.reader.close()
        for store in self.stores:
            store.close()
        self.slab.close()


def make_reader(path: Path, **more: object) -> IndexReader:
    spaces = [KeySpace(FINGERPRINT, rank) for rank in RANKS]
    return IndexReader({NAME: settings_of(path, 4 * MIB)}, spaces, **more)  # type: ignore[arg-type]


def collect(reader: IndexReader, num_keys: int, seconds: float = 10.0) -> list[Presence]:
    found: list[Presence] = []
    deadline = time.monotonic() + seconds
    while sum(len(answer.present) for answer in found) < num_keys:
        assert time.monotonic() < deadline
        found += reader.answers()
        time.sleep(0.0005)
    return found


def flags(reader: IndexReader, num_keys: int) -> list[int]:
    return [flag for answer in collect(reader, num_keys) for flag in answer.present.tolist()]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "shared.lmdb")
    yield engine
    engine.close()


def test_key_is_present_if_every_rank_has_its_frame(engine: Engine) -> None:
    engine.put(1, 2)
    engine.put(3, ranks=(0,))
    engine.put(4, ranks=(1,))
    assert engine.ask(1, 2, 3, 4, 5) == [1, 1, 0, 0, 0]


def test_control_believes_the_answers(engine: Engine) -> None:
    engine.put(1)
    engine.reader.ask(lookup(1, 2, epoch=3))
    table = PresenceTable()
    for answer in collect(engine.reader, 2):
        assert answer.epoch == 3
        table.answered(answer)
    assert table.of(NAME, block(1)) is Belief.PRESENT
    assert table.of(NAME, block(2)) is Belief.ABSENT


def test_store_closed_beside_it_stays_readable(engine: Engine) -> None:
    """The environment is shared with the stores of this process, and counted."""
    engine.put(1)
    assert engine.ask(1) == [1]
    for store in engine.stores:
        store.close()
    assert engine.ask(1, 2) == [1, 0]


def test_generation_changes_between_lookups(engine: Engine) -> None:
    engine.put(1)
    engine.put(2, generation=1)
    long = [1, 2] * PIECE_KEYS  # its second piece is looked up after the change was asked for
    engine.reader.ask(lookup(*long))
    engine.reader.enter(1)
    engine.reader.ask(lookup(1, 2))
    assert flags(engine.reader, len(long) + 2) == [1, 0] * PIECE_KEYS + [0, 1]


def test_long_lookup_is_answered_in_pieces_and_delays_no_other(engine: Engine) -> None:
    engine.put(1)
    engine.reader.ask(lookup(*range(20 * PIECE_KEYS), epoch=1))
    engine.reader.ask(lookup(1, epoch=2))
    answers = collect(engine.reader, 20 * PIECE_KEYS + 1)
    order = [answer.epoch for answer in answers]
    assert len(order) == 21
    assert order.index(2) < 20
    column = b"".join(answer.keys for answer in answers if answer.epoch == 1)
    assert column == lookup(*range(20 * PIECE_KEYS)).keys


def test_lookup_that_takes_too_long_says_what_it_did_not_look_up(tmp_path: Path) -> None:
    now = [0.0]
    engine = Engine(tmp_path / "shared.lmdb", lookup_seconds=1.0, clock=lambda: now[0])
    engine.put(1)
    assert engine.ask(1) == [1]
    env = REGISTRY.acquire(settings_of(engine.path, 4 * MIB))
    begun = threading.Event()

    def clock() -> float:
        begun.set()
        return now[0]

    engine.reader.close()
    engine.reader = make_reader(engine.path, lookup_seconds=1.0, clock=clock)
    engine.reader.ask(lookup(1))
    assert flags(engine.reader, 1) == [1]
    engine.reader.ask(Lookup(NAME, lookup(*range(1000)).keys))
    now[0] = 5.0
    found = collect(engine.reader, 1000)
    assert set(np.concatenate([answer.present for answer in found])[PIECE_KEYS:]) == {NOT_LOOKED_UP}
    engine.reader.ask(lookup(1))  # nobody was told that it is not there
    assert flags(engine.reader, 1) == [1]
    REGISTRY.release(env)
    engine.close()


def test_late_answer_is_true_and_says_how_late_it_is() -> None:
    spaces = [KeySpace(FINGERPRINT, rank) for rank in RANKS]
    of_ranks = [space.name(block(1))[:8] for space in spaces]
    late = LateInventory(of_ranks, 0.2)
    reader = IndexReader({}, spaces, inventories={NAME: late}, lookup_seconds=60.0)
    reader.ask(lookup(1, 2))
    (answer,) = collect(reader, 2)
    assert answer.present.tolist() == [1, 0]
    assert 0.2 <= answer.seconds < 10.0
    reader.close()


@pytest.mark.alone
def test_close_leaves_a_lookup_behind_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    hung = LateInventory([b""], HANGS)
    reader = IndexReader({}, [KeySpace(FINGERPRINT, RANKS[0])], inventories={NAME: hung})
    reader.ask(lookup(1))
    started = time.monotonic()
    reader.close()
    assert time.monotonic() - started < 5.0
    assert "shared: a lookup does not end" in caplog.text
    hung.release()


@pytest.mark.alone
def test_calls_return_at_once_while_the_store_is_away(engine: Engine) -> None:
    engine.put(1)
    assert engine.ask(1) == [1]
    (engine.path / DATA).unlink()
    started = time.monotonic()
    for _ in range(100):
        engine.reader.ask(lookup(*range(100)))
        engine.reader.answers()
    assert time.monotonic() - started < 0.5
    collect(engine.reader, 1, seconds=10)


def test_file_that_goes_is_absent_and_found_again(engine: Engine) -> None:
    engine.put(1)
    assert engine.ask(1) == [1]
    (engine.path / DATA).chmod(0)
    assert engine.ask(1, 2) == [0, 0]
    (engine.path / DATA).chmod(0o600)
    deadline = time.monotonic() + 10
    while engine.ask(1) != [1]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_look_that_fails_in_any_way_does_not_end_the_reader(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R60: an idle reader looks whether the file is back."""
    failed = threading.Event()

    def check(_: LMDBAccess) -> None:
        failed.set()
        raise ValueError("bug")

    engine.put(1)
    monkeypatch.setattr(index_reader, "_IDLE_SECONDS", 0.001)
    monkeypatch.setattr(LMDBAccess, "check", check)
    assert engine.ask(1) == [1]
    assert failed.wait(20)
    assert engine.ask(1) == [1]


def test_store_that_is_made_later_is_found_then(tmp_path: Path) -> None:
    path = tmp_path / "shared.lmdb"
    reader = make_reader(path)
    reader.ask(lookup(1))
    assert flags(reader, 1) == [0]
    assert not path.exists()  # a question makes nothing
    engine = Engine(path)
    engine.put(1)
    deadline = time.monotonic() + 10
    while True:
        reader.ask(lookup(1))
        if flags(reader, 1) == [1]:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    reader.close()
    engine.close()


def test_absent_is_asked_again_and_present_once_the_last_rank_has_written(engine: Engine) -> None:
    """What another process writes later is found later: no answer is remembered."""
    assert engine.ask(1, 2) == [0, 0]
    engine.put(1, 2, ranks=(0,))
    assert engine.ask(1, 2) == [0, 0]
    engine.put(2, ranks=(1,))
    assert engine.ask(1, 2) == [0, 1]
    engine.stores[0].delete([KeySpace(FINGERPRINT, RANKS[0]).name(block(2))])
    engine.stores[0].keys()  # waits for the deletion
    assert engine.ask(1, 2) == [0, 0]


def test_store_that_nobody_has_made_is_absent_long_before_the_deadline(tmp_path: Path) -> None:
    for path in (tmp_path / "shared.lmdb", tmp_path / "no" / "parent"):
        reader = make_reader(path, lookup_seconds=60.0)
        for _ in range(3):
            reader.ask(lookup(*range(PIECE_KEYS * 3)))
        found = collect(reader, 9 * PIECE_KEYS, seconds=5.0)
        assert not any(answer.present.any() for answer in found)
        reader.close()
        assert not path.exists()


def test_unknown_store_is_absent(engine: Engine) -> None:
    engine.reader.ask(Lookup("other", lookup(1, 2).keys))
    assert flags(engine.reader, 2) == [0, 0]


def test_growth_and_eviction_are_seen(engine: Engine) -> None:
    engine.put(*range(10))
    assert engine.ask(0) == [1]
    for n in range(1000, 2000, 50):
        engine.put(*range(n, n + 50))
    assert engine.ask(0, 1999) == [0, 1]
    env = REGISTRY.acquire(settings_of(engine.path, 4 * MIB))
    env.grow(32 * MIB)
    REGISTRY.release(env)
    for n in range(3000, 3400, 50):
        engine.put(*range(n, n + 50))
    assert engine.ask(3000, 3399) == [1, 1]


def test_key_column_must_be_whole(engine: Engine) -> None:
    with pytest.raises(ValueError, match="37 bytes"):
        engine.reader.ask(Lookup(NAME, bytes(37)))


def test_no_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no key spaces"):
        IndexReader({NAME: settings_of(tmp_path / "x")}, [])


def test_close_twice_is_no_error(engine: Engine) -> None:
    engine.reader.close()
    engine.reader.close()
