"""Orders to the owner of a file store: taken once, answered when durable, never in the way."""

import json
import os

import pytest
from lmdb_box import key_of

from kvtiers.data.file_orders import (
    LOOK_SECONDS,
    ORDER,
    TAKEN,
    Order,
    OrderBox,
    Verb,
    forget_orders,
    is_answered,
    leave_order,
    withdraw_order,
)
from kvtiers.model.errors import StoreError

LATER = 2.0**33


class Store:
    """Keys in the order in which they were put."""

    def __init__(self):
        self.held = [key_of(n) for n in range(5)]

    def keys(self):
        return list(self.held)

    def delete(self, keys):
        for key in keys:
            if key in self.held:
                self.held.remove(key)

    def clear(self):
        self.held.clear()


class History:
    """Durable when the test says so."""

    num_queued, num_committed, wanted = 0, 0, 0

    def want(self, number):
        self.wanted = number


class Scene:
    def __init__(self, folder):
        self.now = 0.0
        self.folder, self.store, self.history = folder, Store(), History()
        self.box = OrderBox(folder, self.history, lambda: self.now)

    def look(self):
        self.now += LOOK_SECONDS
        self.box.attend(self.store)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


@pytest.mark.parametrize(
    ("order", "left"),
    [
        (Order(Verb.CLEAR, LATER), []),
        (Order(Verb.EVICT, LATER, keep_frames=2), [3, 4]),
        (Order(Verb.EVICT, LATER, keep_frames=9), [0, 1, 2, 3, 4]),
        (Order(Verb.DELETE, LATER, keys=(key_of(1), key_of(77))), [0, 2, 3, 4]),
    ],
)
def test_an_order_is_carried_out_and_answered_when_durable(scene, order, left):
    leave_order(scene.folder, order)
    scene.history.num_queued = 7
    scene.look()
    assert scene.store.held == [key_of(n) for n in left]
    assert scene.history.wanted == 7
    scene.look()
    assert not is_answered(scene.folder)
    scene.history.num_committed = 7
    scene.look()
    assert is_answered(scene.folder)
    assert list(scene.folder.iterdir()) == []


def test_the_owner_looks_seldom(scene):
    scene.look()
    leave_order(scene.folder, Order(Verb.CLEAR, LATER))
    scene.box.attend(scene.store)
    assert scene.store.held
    scene.look()
    assert not scene.store.held


def test_closing_answers_what_was_committed(scene):
    leave_order(scene.folder, Order(Verb.CLEAR, LATER))
    scene.history.num_queued = 1
    scene.look()
    scene.box.close()
    assert not is_answered(scene.folder)
    scene.history.num_committed = 1
    scene.box.close()
    assert is_answered(scene.folder)


def test_what_a_killed_owner_had_begun_the_next_one_ends(scene):
    leave_order(scene.folder, Order(Verb.CLEAR, LATER))
    (scene.folder / ORDER).rename(scene.folder / TAKEN)
    scene.look()
    assert not scene.store.held


def test_an_order_that_is_withdrawn_is_not_carried_out(scene):
    leave_order(scene.folder, Order(Verb.CLEAR, LATER))
    assert withdraw_order(scene.folder)
    scene.look()
    assert len(scene.store.held) == 5
    assert not withdraw_order(scene.folder)


def test_a_second_order_waits_for_the_first(scene):
    leave_order(scene.folder, Order(Verb.CLEAR, LATER))
    with pytest.raises(StoreError, match="another order waits"):
        leave_order(scene.folder, Order(Verb.EVICT, LATER))
    scene.history.num_queued = 1
    scene.look()
    with pytest.raises(StoreError, match="another order waits"):
        leave_order(scene.folder, Order(Verb.EVICT, LATER))
    forget_orders(scene.folder)
    leave_order(scene.folder, Order(Verb.EVICT, LATER))


GOOD = {"version": 1, "verb": "clear", "expires": LATER, "keep_frames": 0, "keys": []}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 1, "verb": "clear", "keep_frames": 0, "keys": [], "expires": 1%s}'
        % (b"0" * 400),
        json.dumps(GOOD | {"version": 2}).encode(),
        json.dumps(GOOD | {"verb": "format"}).encode(),
        json.dumps(GOOD | {"expires": 1.7e9}).encode(),
        json.dumps(GOOD | {"expires": "soon"}).encode(),
        json.dumps(GOOD | {"verb": "evict", "keep_frames": -1}).encode(),
        json.dumps(GOOD | {"verb": "evict", "keep_frames": None}).encode(),
        json.dumps(GOOD | {"verb": "delete", "keys": ["00"]}).encode(),
        json.dumps(GOOD | {"verb": "delete", "keys": [7]}).encode(),
        json.dumps({k: v for k, v in GOOD.items() if k != "keys"}).encode(),
    ],
)
def test_what_is_no_order_is_removed_and_nothing_else(scene, text, caplog):
    (scene.folder / ORDER).write_bytes(text)
    scene.look()
    assert len(scene.store.held) == 5
    assert is_answered(scene.folder)
    assert "is not carried out" in caplog.text


def test_a_link_is_not_followed(scene, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "order"
    elsewhere.write_text(json.dumps(GOOD))
    (scene.folder / ORDER).symlink_to(elsewhere)
    scene.look()
    assert len(scene.store.held) == 5
    assert elsewhere.exists()


def test_an_order_says_everything(scene):
    keys = tuple(key_of(n) for n in range(3))
    order = Order(Verb.DELETE, 12.5, keep_frames=3, keys=keys)
    assert Order.decode(order.encode()) == order


def test_drafts_that_a_killed_command_has_left_are_swept_at_the_start(tmp_path):
    """R67: not one that is being written."""
    old, young = (tmp_path / f"{ORDER}.{pid}.tmp" for pid in (7, 8))
    for draft in (old, young):
        draft.write_text("half")
    os.utime(old, (0, 0))
    Scene(tmp_path)
    assert list(tmp_path.iterdir()) == [young]
