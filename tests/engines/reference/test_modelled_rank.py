"""What reloads and promotions take on paper: their links, each other, and the hand-over."""

from dataclasses import replace

import numpy as np
import pytest

from kvtiers.cost.links import LinkSeed
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.modelled_media import HandOver, ModelledLink, SharedStore
from kvtiers.engines.reference.modelled_rank import ModelledRank
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import parse_mapping
from kvtiers.model.keys import block_key, pack_keys
from kvtiers.model.messages import (
    NO_SLOT,
    JobId,
    StepOrders,
    Transfer,
    TransferKind,
    int64s,
)
from kvtiers.model.outcome import Outcome

from .small import prompt_of, small_shape

PER_BLOCK = 0.01  # of the store; the way to HBM takes a thousandth
TOGETHER = 16  # blocks that a store brings at once


def rank_of(notice_seconds=0.0, shared=None):
    links = {
        name: ModelledLink(LinkSeed(0.0, seconds, float("inf")), 1024, 1)
        for name, seconds in {
            "store>dram": PER_BLOCK,
            "dram>store": PER_BLOCK,
            "dram>hbm": PER_BLOCK / 1000,
            "hbm>dram": PER_BLOCK / 1000,
        }.items()
    }
    return ModelledRank(links, 1024, 1, shared or {}, 256, notice_seconds)


def load_of(job, kind, slots, *, stored, deadline=100.0):
    num = len(slots)
    return Transfer(
        job_id=JobId(job),
        epoch=0,
        kind=kind,
        keys=pack_keys(block_key(bytes([job, i]) + bytes(30), 0) for i in range(num)),
        block_ids=int64s(list(range(num))),
        slots=int64s(list(slots)),
        sources=np.full(num, stored, np.uint8),
        targets=np.zeros(num, np.uint8),
        stores=("store",),
        window=int64s([]),
        deadline=deadline,
        request_id=f"r{job}",
    )


def orders_of(*before, step=1, sync=()):
    return StepOrders(step=step, epoch=0, before=before, sync_loads=tuple(map(JobId, sync)))


def answered_at(rank, now=0.0):
    """Let time pass from event to event; returns when each job was answered, and how."""
    found = {}
    while (event := rank.next_event) is not None:
        now = max(now, event)
        _, report = rank.take(now, frozenset())
        for it in () if report is None else report.completions:
            found[it.job_id] = (now, it.outcomes.tolist())
    return {int(job): when for job, (when, _) in found.items()}, found


def test_a_reload_is_answered_a_while_after_its_last_copy():
    quick, slow = rank_of(), rank_of(notice_seconds=0.5)
    for rank in (quick, slow):
        rank.begin_step(orders_of(load_of(1, TransferKind.RELOAD, range(4), stored=1)), 0.0)
    assert answered_at(slow)[0][1] == pytest.approx(answered_at(quick)[0][1] + 0.5)


def test_a_step_that_waits_for_a_reload_notices_its_end_at_once():
    rank = rank_of(notice_seconds=0.5)
    reload = load_of(1, TransferKind.RELOAD, range(4), stored=1)
    ready = rank.begin_step(orders_of(reload, sync=[1]), 0.0)
    assert ready == pytest.approx(4 * PER_BLOCK, rel=0.01)
    loaded, report = rank.take(ready, frozenset([JobId(1)]))
    assert report is not None
    assert not loaded.failed_blocks


def test_a_reload_overtakes_a_promotion_after_the_blocks_that_were_asked_for():
    rank = rank_of()
    rank.begin_step(orders_of(load_of(1, TransferKind.PROMOTE, range(64), stored=1)), 0.0)
    rank.take(0.0, frozenset())  # the first blocks begin
    reload = load_of(2, TransferKind.RELOAD, range(100, 104), stored=1)
    rank.begin_step(orders_of(reload, step=2), PER_BLOCK)
    when, _ = answered_at(rank)
    assert when[2] == pytest.approx((TOGETHER + 4) * PER_BLOCK, rel=0.01)
    assert when[1] == pytest.approx(68 * PER_BLOCK, rel=0.01)  # nothing of it is lost


def test_a_reload_waits_for_blocks_that_another_one_brings():
    rank = rank_of()
    first = load_of(1, TransferKind.RELOAD, range(40), stored=1)
    second = load_of(2, TransferKind.RELOAD, range(40), stored=0)  # the same slots
    rank.begin_step(orders_of(first, second), 0.0)
    when, _ = answered_at(rank)
    assert when[2] == pytest.approx(40 * PER_BLOCK, rel=0.01)


def test_of_a_portion_nothing_is_there_before_all_of_it():
    rank = rank_of()
    first = load_of(1, TransferKind.RELOAD, range(40), stored=1)
    second = load_of(2, TransferKind.RELOAD, range(2), stored=0)
    rank.begin_step(orders_of(first, second), 0.0)
    when, _ = answered_at(rank)
    assert when[2] == pytest.approx(TOGETHER * PER_BLOCK, rel=0.01)


def test_a_reload_hurries_the_promotion_that_it_waits_for():
    rank = rank_of()
    rank.begin_step(orders_of(load_of(1, TransferKind.PROMOTE, range(40), stored=1)), 0.0)
    waits = load_of(2, TransferKind.RELOAD, range(40), stored=0)
    rank.begin_step(orders_of(waits, step=2), 0.0)
    when, _ = answered_at(rank)
    assert when[2] == pytest.approx(40 * PER_BLOCK, rel=0.01)


def test_what_of_a_promotion_has_not_begun_in_time_is_given_up():
    rank = rank_of()
    promote = load_of(1, TransferKind.PROMOTE, range(64), stored=1, deadline=20 * PER_BLOCK - 1e-6)
    rank.begin_step(orders_of(promote), 0.0)
    _, found = answered_at(rank)
    outcomes = found[JobId(1)][1]
    assert outcomes == [Outcome.OK] * 20 + [Outcome.TIMED_OUT] * 44


def test_a_block_without_a_slot_is_missing():
    rank = rank_of()
    rank.begin_step(orders_of(load_of(1, TransferKind.RELOAD, [NO_SLOT, 3], stored=0)), 0.0)
    assert answered_at(rank)[1][JobId(1)][1] == [Outcome.MISSING, Outcome.OK]


def test_a_block_that_a_shared_store_holds_is_used_and_not_written_again():
    """A block in use is put again now and then, so that the store sees that it is used."""
    store = SharedStore(4)
    rank = rank_of(shared={"store": store})
    written = []
    for job, names in enumerate(["abcd", "abe", "ab"]):
        put = replace(
            load_of(job, TransferKind.DEMOTE, range(len(names)), stored=0),
            keys=pack_keys(block_key(name.encode().ljust(32), 0) for name in names),
            targets=np.ones(len(names), np.uint8),
        )
        rank.begin_step(orders_of(put, step=job + 1), float(job))
        done = rank.next_event
        _, report = rank.take(done, frozenset())
        assert report.completions[0].outcomes.tolist() == [Outcome.OK] * len(names)
        written.append((round((done - job) / PER_BLOCK), sum(it.num_blocks for it in report.links)))
    assert written == [(4, 4), (1, 1), (0, 0)]
    held = [name for name in "abcde" if store.holds(block_key(name.encode().ljust(32), 0))]
    assert held == ["a", "b", "d", "e"]  # c was not used for longest


def test_planning_a_reload_and_the_step_around_it_take_their_time():
    over = HandOver(plan_seconds=0.25, idle_seconds=0.5, notice_seconds=1.0)
    assert over.before_step(0, computes=False) == 0.0
    assert over.before_step(2, computes=True) == 0.5
    assert over.before_step(2, computes=False) == 1.0


@pytest.mark.parametrize(("sync_below", "more"), [("0s", 1.75), ("1s", 0.25)])
def test_a_reload_on_paper_takes_its_hand_over(sync_below, more):
    """Between steps: planned, around a step of its own, noticed; within a step: only planned."""
    shape = small_shape()

    def ttft(over):
        machine = ModelledMachine(
            model_shape(shape.to_hf_config()),
            PrefillSpeed(1e-3, 1e10),
            shape.kv_nbytes_per_token,
            hand_over=over,
        )
        config = parse_mapping(
            {
                "tiers": [{"kind": "dram", "capacity": "8MiB", "pin": "off"}],
                "cost": {"mode": "always"},
                "reload": {"sync_below": sync_below},
            }
        )
        settings = EngineSettings(num_blocks=24, max_model_len=256, max_num_batched_tokens=256)
        engine, served = modelled_engine(settings, machine, config), []
        for i, seed in enumerate((1, 2, 1)):  # the second puts the first out of HBM
            engine.add(NewRequest(str(i), engine.now, 1, prompt_of(250, seed=seed)))
            while engine.num_unfinished:
                served += engine.step().finished
            engine.settle()
        assert sum(served[-1].reloaded_by_tier.values()) > 0
        return served[-1].ttft_seconds

    assert ttft(HandOver(0.25, 0.5, 1.0)) - ttft(HandOver()) == pytest.approx(more)
