"""A store that keeps failing is left alone, keeps what it holds, and is used again."""

from __future__ import annotations

import logging

import pytest

from kvtiers.control.breaker import NUM_FAILURES
from kvtiers.control.settings import StoreSettings
from kvtiers.model.messages import TransferKind
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import OFFLOADS_DROPPED, STORE_OFF

from .scenes import DISK, SHARED, Scene, chain, dram, reloads, resident

FAILED, OK = Outcome.FAILED, Outcome.OK
BACK = StoreSettings("disk", 64, "back")
NUM_HANGS = 2
NUM = 4  # blocks of a document, and slots of DRAM


def documents(scene: Scene, num: int) -> list[list]:
    """Documents that only the store has, all but the last."""
    docs = [chain(f"{i}-", NUM) for i in range(num)]
    for keys in docs:
        assert scene.offload(keys) == NUM
    return docs


def fail_load(scene: Scene, keys: list, request: str, outcome: Outcome = FAILED) -> None:
    """Reload a document, every block of which fails."""
    assert scene.hits(keys, request=request) == len(keys)
    job_id = scene.load(keys, request=request)
    scene.step()
    scene.answer(job_id, dict.fromkeys(range(len(keys)), outcome))


def broken_for_reads(outcome: Outcome = FAILED) -> tuple[Scene, list[list]]:
    """A scene whose disk has just been switched off for reads."""
    scene = Scene(dram(NUM, DISK))
    docs = documents(scene, NUM_FAILURES + 1)
    for i in range(NUM_HANGS if outcome is Outcome.TIMED_OUT else NUM_FAILURES):
        assert scene.controller.gates.readable(0)
        fail_load(scene, docs[i], f"r{i}", outcome)
    return scene, docs


@pytest.mark.parametrize("outcome", [FAILED, Outcome.TIMED_OUT])
def test_a_store_that_keeps_failing_is_not_hit_any_more(outcome):
    scene, docs = broken_for_reads(outcome)
    assert not scene.controller.gates.readable(0)
    assert scene.hits(docs[0], request="new") == 0
    assert scene.controller.counters.value(STORE_OFF, ("disk", "read")) == 1
    assert scene.controller.counters.value(STORE_OFF, ("disk", "write")) == 0


def test_an_answer_that_was_remembered_is_forgotten_when_its_store_is_switched_off():
    scene = Scene(dram(NUM, DISK))
    docs = documents(scene, NUM_FAILURES + 1)
    for i in range(NUM_HANGS):
        assert scene.hits(docs[0], request="waits") == NUM
        fail_load(scene, docs[i], f"r{i}", Outcome.TIMED_OUT)
    assert scene.hits(docs[0], request="waits") == 0


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.CORRUPT])
def test_frames_that_are_gone_or_spoiled_do_not_switch_a_store_off(outcome):
    scene, docs = broken_for_reads(outcome)
    assert scene.controller.gates.readable(0)
    assert scene.hits(docs[0], request="new") == 0  # they are forgotten, each by itself


def test_a_store_that_failed_for_a_while_keeps_its_inventory_and_is_read_again():
    scene, docs = broken_for_reads()
    held = scene.controller.stores[0].num_entries
    scene.settle()
    scene.now += 1.0
    assert scene.hits(docs[0], request="early") == 0  # no request is the guinea pig
    scene.settle()  # a probe goes, and comes back well
    assert scene.controller.gates.readable(0)
    assert scene.controller.stores[0].num_entries == held
    assert scene.hits(docs[0], request="early") == NUM  # what was remembered is asked anew
    assert scene.hits(docs[0], request="late") == NUM
    assert scene.controller.counters.value(STORE_OFF, ("disk", "read")) == 0


def test_while_it_fails_one_small_probe_after_another_goes_and_longer_apart():
    scene, _ = broken_for_reads()
    scene.settle()
    scene.ranks[0].stores["disk"].broken = True
    probed_at = []
    for tenth in range(1, 80):
        scene.now = tenth / 10
        for order in scene.step().before:
            assert order.kind is TransferKind.PROMOTE
            assert order.num_blocks == len(order.window) == 1
            probed_at.append(scene.now)
            scene.answer(order.job_id)
    assert probed_at == [1.0, 3.0, 7.0]
    assert scene.controller.dram.num_busy == 0


def test_a_probe_that_hangs_is_not_followed_by_another_before_its_slot_is_free():
    scene, _ = broken_for_reads()
    scene.settle()
    scene.now = 1.0
    (probe,) = scene.step().before
    rank = scene.ranks[0]
    scene.controller.completed(rank.answer(probe.job_id, late=True), scene.now)
    scene.now = 50.0
    assert scene.step().before == ()
    scene.answer(probe.job_id)  # the store has let go
    assert len(scene.step().before) == 1


def test_one_frame_that_fails_again_and_again_goes_and_the_store_stays():
    scene = Scene(dram(NUM, DISK))
    bad, good, *_ = documents(scene, 3)
    fail_load(scene, bad[:1], "r0")
    assert scene.hits(bad, request="r1") == NUM  # once is no proof
    scene.load(good, request="good")
    scene.settle()
    scene.controller.dram.reset()
    fail_load(scene, bad[:1], "r2")
    assert scene.hits(bad, request="r3") == 0
    assert scene.controller.gates.readable(0)
    assert scene.hits(good, request="r4") == NUM


def test_a_frame_that_was_written_anew_has_a_clean_record():
    scene = Scene(dram(NUM, DISK))
    bad, good, *_ = documents(scene, 3)
    for turn in range(2):
        fail_load(scene, bad, f"bad{turn}")
        scene.load(good, request=f"good{turn}")
        scene.settle()
        scene.controller.dram.reset()
    scene.offload(bad)
    scene.controller.dram.reset()
    fail_load(scene, bad, "again")
    assert scene.hits(bad, request="new") == NUM


def test_a_copier_that_fails_is_not_the_store_s_fault():
    scene = Scene(dram(2 * NUM, DISK))
    docs = documents(scene, NUM_FAILURES + 2)
    for i in range(NUM_FAILURES):
        keys = docs[i]
        extra = docs[-1][:1]
        job_id = scene.load([*extra, *keys], request=f"r{i}")
        scene.step()
        scene.answer(job_id, dict.fromkeys(range(NUM + 1), FAILED))
        scene.controller.dram.reset()
        scene.offload(extra)
    assert scene.controller.gates.readable(0)


def test_a_load_that_waited_long_for_its_slots_says_nothing_of_the_store():
    scene = Scene(dram(NUM, DISK))
    docs = documents(scene, 2)
    for turn in range(NUM_HANGS):
        scene.controller.dram.reset()
        scene.step()
        scene.offload(chain(f"busy{turn}-", NUM), settle=False)
        (offload,) = scene.step().after
        job_id = scene.load(docs[0], request=f"r{turn}")
        assert reloads(scene.step()) == []
        scene.now += 6.0
        scene.answer(offload.job_id)
        scene.answer(offload.job_id)
        assert len(reloads(scene.step())) == 1
        scene.answer(job_id, dict.fromkeys(range(NUM), Outcome.TIMED_OUT))
    assert scene.controller.gates.readable(0)


def test_a_load_that_never_got_a_slot_says_nothing_of_the_store():
    scene = Scene(dram(NUM, DISK))
    docs = documents(scene, 2)
    scene.controller.dram.reset()
    scene.step()
    scene.offload(chain("busy", NUM), settle=False)
    scene.step()
    for turn in range(NUM_HANGS):
        job_id = scene.load(docs[0], request=f"r{turn}")
        scene.now += 10.0
        (order,) = reloads(scene.step())
        assert order.window.tolist() == []
        done = scene.answer(job_id)
        assert done is not None
        assert done.num_failed == NUM
    assert scene.controller.gates.readable(0)


def test_a_shared_store_keeps_what_is_believed_of_it_and_is_not_asked_while_it_is_off():
    scene = Scene(dram(NUM, SHARED))
    docs = documents(scene, NUM_FAILURES + 1)
    for i in range(NUM_FAILURES):
        fail_load(scene, docs[i], f"r{i}")
    scene.settle()
    scene.controller.take_lookups()
    unheard = chain("unheard", 2)
    assert scene.hits(docs[0], request="new") == scene.hits(unheard, request="other") == 0
    assert scene.controller.take_lookups() == []
    scene.now = 1.0
    scene.settle()
    assert scene.hits(docs[0], request="late") == NUM


def test_a_store_of_which_nothing_is_known_is_trusted_until_its_first_failure():
    scene, _ = broken_for_reads()
    scene.settle()
    scene.controller.reset()
    scene.settle()
    scene.now += 1.0
    scene.settle()
    assert scene.controller.gates.readable(0)
    (keys, *_) = documents(scene, 2)
    fail_load(scene, keys, "first")
    assert not scene.controller.gates.readable(0)


def test_one_rank_that_cannot_read_is_enough():
    scene = Scene(dram(NUM, DISK), num_ranks=2)
    docs = documents(scene, NUM_FAILURES + 1)
    for i in range(NUM_FAILURES):
        job_id = scene.load(docs[i], request=f"r{i}")
        scene.step()
        scene.answer(job_id, rank=0)
        scene.answer(job_id, dict.fromkeys(range(NUM), FAILED), rank=1)
    assert not scene.controller.gates.readable(0)
    scene.now = 1.0
    (probe,) = scene.step().before
    scene.answer(probe.job_id, rank=0)
    assert not scene.controller.gates.readable(0)
    scene.answer(probe.job_id, rank=1)
    assert scene.controller.gates.readable(0)


# -- writes ---------------------------------------------------------------------------


def fail_writes(scene: Scene, num: int) -> None:
    scene.ranks[0].stores["disk"].broken = True
    for i in range(num):
        scene.offload(chain(f"lost{i}-", 1))


def test_a_store_that_cannot_be_written_gets_nothing_until_a_probe_of_one_block_succeeds():
    scene = Scene(dram(16, DISK))
    fail_writes(scene, NUM_FAILURES)
    off = ("disk", "write")
    assert scene.controller.counters.value(STORE_OFF, off) == 1
    assert scene.controller.gates.readable(0)
    keys = chain("b", 4)
    scene.offload(keys, settle=False)
    (order,) = scene.step().after
    assert not order.targets.any()
    scene.settle()
    assert resident(scene, keys) == [0, 1, 2, 3]  # DRAM goes on
    assert scene.controller.counters.value(OFFLOADS_DROPPED, ("off_disk",)) == 4
    scene.ranks[0].stores["disk"].broken = False
    scene.now = 1.0
    scene.step()
    scene.offload(chain("c", 4), settle=False)
    (order,) = scene.step().after
    assert order.targets.tolist() == [1, 0, 0, 0]
    scene.settle()
    assert scene.controller.counters.value(STORE_OFF, off) == 0
    scene.offload(chain("d", 4), settle=False)
    (order,) = scene.step().after
    assert order.targets.tolist() == [1, 1, 1, 1]
    scene.settle()


def test_blocks_that_never_reached_dram_say_nothing_of_the_store():
    scene = Scene(dram(16, DISK))
    for i in range(2 * NUM_FAILURES):
        scene.offload(chain(f"{i}-", 1), settle=False)
        (order,) = scene.step().after
        scene.answer(order.job_id, {0: FAILED})
        scene.settle()
    assert scene.controller.counters.value(STORE_OFF, ("disk", "write")) == 0


def test_a_full_store_is_not_a_broken_one():
    scene = Scene(dram(16, DISK))
    scene.ranks[0].stores["disk"].capacity_frames = 0
    for i in range(2 * NUM_FAILURES):
        scene.offload(chain(f"{i}-", 1))
    assert scene.controller.counters.value(STORE_OFF, ("disk", "write")) == 0


def test_demotion_rests_while_its_store_is_off_and_dram_drops_what_it_must():
    scene = Scene(dram(8, BACK, high_watermark=0.5, low_watermark=0.25))
    scene.ranks[0].stores["disk"].broken = True
    num_demotes = 0
    for i in range(12):
        scene.offload(chain(f"{i}-", 1), settle=False)
        for _ in range(5):
            orders = scene.step()
            num_demotes += sum(order.kind is TransferKind.DEMOTE for order in orders.before)
            for order in (*orders.before, *orders.after):
                scene.answer(order.job_id)
    assert num_demotes == NUM_FAILURES
    dropped = scene.controller.counters.value("kvtiers_blocks_evicted_total", ("dram",))
    assert dropped == 4  # what twelve blocks are too many, and no more
    assert scene.controller.dram.num_entries == 8
    scene.ranks[0].stores["disk"].broken = False
    scene.now = 1.0
    (probe,) = scene.step().before
    assert probe.num_blocks == 1
    assert scene.controller.dram.num_entries == 8  # and nothing leaves unwritten beside it
    scene.settle()
    assert scene.controller.counters.value(STORE_OFF, ("disk", "write")) == 0


def test_each_change_is_told_once(caplog):
    with caplog.at_level(logging.INFO, "kvtiers.control"):
        scene, _ = broken_for_reads()
        scene.settle()
        scene.now = 1.0
        scene.settle()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert all("disk" in text and "read" in text for _, text in told)


def test_requests_that_reload_from_dram_are_served_while_a_store_is_off():
    scene, docs = broken_for_reads()
    scene.settle()
    scene.offload(docs[-1])
    assert scene.hits(docs[-1], request="dram") == NUM
    scene.load(docs[-1], request="dram")
    orders = scene.step()
    assert len(reloads(orders)) == 1
    (done,) = scene.settle()
    assert (done.num_loaded, done.num_failed) == (NUM, 0)
