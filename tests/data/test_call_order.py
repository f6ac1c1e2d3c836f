"""Reads overtake changes, except those of their own keys."""

from __future__ import annotations

import threading

from kvtiers.data.call_order import Call, CallOrder, Verb
from kvtiers.data.store import FrameRef, StoreTicket
from kvtiers.testing.store_machine import store_key_of


def call(verb: Verb, *numbers: int) -> Call:
    keys = tuple(store_key_of(n) for n in numbers)
    frames = tuple(FrameRef(key, 0, 1) for key in keys) if verb in (Verb.PUT, Verb.GET) else ()
    return Call(verb, keys, frames, StoreTicket(1))


def submitted(*calls: Call) -> CallOrder:
    order = CallOrder()
    for one in calls:
        order.submit(one)
    return order


def test_read_of_other_keys_overtakes() -> None:
    put, get = call(Verb.PUT, 1), call(Verb.GET, 2)
    assert submitted(put, get).next_read() is get


def test_read_waits_for_the_change_of_its_key() -> None:
    put, get, other = call(Verb.PUT, 1), call(Verb.GET, 1), call(Verb.GET, 3)
    order = submitted(put, get, other)
    assert order.next_read() is other
    assert order.next_changes(16, 0.0) == [put]
    order.done(put)
    assert order.next_read() is get


def test_change_waits_for_the_read_of_its_key() -> None:
    for verb in (Verb.PUT, Verb.DELETE, Verb.CLEAR):
        get, change = call(Verb.GET, 1), call(verb, *([] if verb is Verb.CLEAR else [1]))
        order = submitted(get, change)
        assert order.next_changes(16, 0.0) == []
        taken = order.next_read()
        assert taken is get
        assert order.next_changes(16, 0.0) == []
        order.done(get)
        assert order.next_changes(16, 0.0) == [change]


def test_read_after_clear_waits_for_it() -> None:
    clear, get = call(Verb.CLEAR), call(Verb.GET, 1)
    order = submitted(clear, get)
    waiter = threading.Thread(target=order.next_read, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    assert order.next_changes(16, 0.0) == [clear]
    order.done(clear)
    waiter.join(5)
    assert not waiter.is_alive()


def test_puts_are_taken_together_and_others_alone() -> None:
    puts = [call(Verb.PUT, n, n + 10) for n in range(4)]
    delete = call(Verb.DELETE, 0)
    order = submitted(*puts[:3], delete, puts[3])
    assert order.next_changes(4, 0.0) == puts[:2]
    assert order.next_changes(4, 0.0) == [puts[2]]
    assert order.next_changes(4, 0.0) == [delete]
    assert order.next_changes(4, 0.0) == [puts[3]]


def test_close_lets_what_was_submitted_run() -> None:
    put, get = call(Verb.PUT, 1), call(Verb.GET, 2)
    order = submitted(put, get)
    order.close()
    assert order.next_changes(16, 0.0) == [put]
    assert order.next_changes(16, 0.0) is None
    assert order.next_read() is get
    assert order.next_read() is None


def test_settling_waits_for_changes_before_it_only() -> None:
    put, later = call(Verb.PUT, 1), call(Verb.PUT, 2)
    order = submitted(put)
    assert not order.settle_changes(0.0)
    order.next_changes(1, 0.0)
    order.done(put)
    assert order.settle_changes(0.0)
    order.submit(later)
    assert not order.settle_changes(0.0)
