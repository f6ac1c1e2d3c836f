"""Free slots of files: each is given once, clean ones first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.data.file_slots import FileSlots, Place


def test_batches_lie_in_runs_shared_by_the_files():
    slots = FileSlots(2, 8)
    places, change = slots.take(6, 0)
    assert places == [Place(0, 0), Place(0, 1), Place(0, 2), Place(1, 0), Place(1, 1), Place(1, 2)]
    assert change == 0
    assert slots.num_free == 10


def test_one_at_a_time_goes_round_the_files():
    slots = FileSlots(3, 2)
    assert [slots.take(1, 0)[0][0].file_idx for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_file_without_room_is_made_up_for_by_the_others():
    slots = FileSlots(2, 3, taken=[Place(0, 0), Place(0, 1), Place(0, 2)])
    assert slots.take(3, 0)[0] == [Place(1, 0), Place(1, 1), Place(1, 2)]
    assert slots.take(1, 0) == ([], 0)


def test_stale_slots_come_last_and_say_what_they_wait_for():
    slots = FileSlots(1, 3)
    first, second, _ = slots.take(3, 0)[0]
    slots.give(first, 5)
    slots.give(second)
    assert slots.take(2, 4) == ([first, second], 5)
    slots.give(first, 6)
    assert slots.take(1, 6) == ([first], 0)


def test_spare_slots_are_written_while_others_become_clean():
    slots = FileSlots(1, 6, num_spare=2)
    assert slots.num_slots == slots.num_free == 4
    first, *_ = slots.take(9, 0)[0]
    assert slots.num_free == 0
    assert slots.take(1, 0) == ([], 0)
    slots.give(first, 7)
    assert (slots.num_free, slots.newest_stale) == (1, 0)
    assert slots.take(1, 0) == ([Place(0, 4)], 0)
    slots.give(Place(0, 4), 8)
    assert slots.newest_stale == 8


@settings(deadline=None)
@given(st.data())
def test_no_slot_is_given_twice_or_lost(data):
    num_files, per_file = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    every = [Place(f, s) for f in range(num_files) for s in range(per_file)]
    taken = set(data.draw(st.lists(st.sampled_from(every), unique=True)))
    slots = FileSlots(num_files, per_file, taken)
    committed = change = 0
    for _ in range(20):
        if data.draw(st.booleans()):
            num = data.draw(st.integers(0, 8))
            free = slots.num_free
            places, wanted = slots.take(num, committed)
            assert len(places) == min(num, free)
            assert not taken & set(places)
            assert wanted <= change
            taken |= set(places)
        elif taken:
            place = data.draw(st.sampled_from(sorted(taken)))
            change += 1
            slots.give(place, data.draw(st.sampled_from([None, change])))
            taken.discard(place)
        committed = data.draw(st.integers(committed, change))
        assert slots.num_free + len(taken) == slots.num_slots
