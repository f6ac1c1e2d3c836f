"""What must hold of tiers and controllers at any time, checked from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtiers.control.controller import Controller
from kvtiers.control.tier import Entry, Residence, Tier
from kvtiers.model.messages import TransferKind
from kvtiers.testing.sim_rank import SimRank


def check_tier(tier: Tier, gone: Iterable[Entry] = (), windows: Iterable[int] = ()) -> None:
    """Assert that a tier's books agree with each other.

    Args:
        gone: doomed entries that jobs may still hold. windows: slots of all windows.
    """
    served = list(tier.entries())
    doomed = [entry for entry in gone if entry.slot >= 0]
    held = [entry.slot for entry in served + doomed] + list(windows)
    shared = [slot for slot, num in Counter(held).items() if num > 1]
    assert not shared, f"slots {shared} have two owners"
    assert all(0 <= slot < tier.capacity_blocks for slot in held)
    assert tier.num_free + len(held) == tier.capacity_blocks, "a slot is lost"
    assert tier.num_entries == len(served)
    assert all(tier.get(entry.key) is entry and not entry.doomed for entry in served)
    assert tier.num_pins == sum(entry.pins for entry in [*served, *gone])
    idle = [e for e in served if e.pins == 0 and e.residence is Residence.READY]
    assert tier.num_busy == len(held) - len(idle)
    _check_victim(tier, served)


def _check_victim(tier: Tier, served: list[Entry]) -> None:
    """Only READY, unpinned blocks leave, tails or backed below, and one does if there is one."""
    parents = {entry.parent_key for entry in served}
    loose = [entry for entry in served if entry.backed or entry.key not in parents]
    may_leave = [e for e in loose if e.pins == 0 and e.residence is Residence.READY]
    assert [entry for entry in served if entry.evictable] == may_leave
    victim = tier.next_victim()
    assert tier.next_victim() is victim
    assert (victim in may_leave) if may_leave else (victim is None)


def check_controller(controller: Controller) -> None:
    """Assert that every pin, reservation and window belongs to a running job, and no other."""
    jobs = list(controller.jobs)
    held = [row.entry for job in jobs for row in job.rows if row.entry is not None]
    windows = [slot for job in jobs for slot in job.window]
    assert controller.dram.num_pins == len(held)
    gone = list({id(entry): entry for entry in held if entry.doomed}.values())
    check_tier(controller.dram, gone, windows)
    reserved = [e for e in controller.dram.entries() if e.residence is Residence.RESERVED]
    landing = {id(row.entry) for job in jobs for row in job.rows if row.lands}
    assert {id(entry) for entry in reserved} <= landing, "a reservation without a job"
    for idx, tier in enumerate(controller.stores):
        if tier is not None:
            rows = [(job, row.store_entries.get(idx)) for job in jobs for row in job.rows]
            used = [(job, entry) for job, entry in rows if entry is not None]
            check_tier(tier, {id(e): e for _, e in used if e.doomed}.values())
            reads = (TransferKind.RELOAD, TransferKind.PROMOTE)
            pins = sum(job.kind in reads for job, _ in used)
            assert tier.num_pins == pins
    if not jobs:
        assert len(controller.fences) == 0


def check_quiet(controller: Controller) -> None:
    """Assert that a controller without work holds nothing that it could not give at once."""
    check_controller(controller)
    assert not controller.busy
    assert controller.dram.num_busy == 0
    assert controller.dram.num_pins == 0
    links = controller.cost.links
    queued = {name: links.queued_nbytes(name) for name in links}
    assert not any(queued.values()), queued


def check_empty(controller: Controller) -> None:
    """Assert that a reset controller without work has all its slots back."""
    check_quiet(controller)
    for tier in (controller.dram, *controller.stores):
        if tier is not None:
            assert tier.num_free == tier.capacity_blocks
            assert tier.num_entries == 0


def check_stores(controller: Controller, ranks: Iterable[SimRank]) -> None:
    """Assert that ranks hold in a private store what control thinks they hold, not more."""
    for settings, tier in zip(controller.settings.stores, controller.stores, strict=True):
        if tier is not None:
            keys = {entry.key for entry in tier.entries()}
            for rank in ranks:
                store = rank.stores[settings.name]
                held = {key for _, _, key in store.frames - store.inherited.keys()}
                assert held <= keys, "a frame that control has forgotten"
