"""From configuration and hellos to what control works with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtiers.connector.build import control_settings, cost_model, slots_for
from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.shape import EngineShape
from kvtiers.connector.stores import RankStores
from kvtiers.cost.links import LinkSeed, reload_link
from kvtiers.cost.planner import Objective, PlanPolicy
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.data.slab import Slab
from kvtiers.model.config import parse_mapping
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.errors import CapacityError, ProtocolError
from kvtiers.model.keys import Rank
from kvtiers.model.messages import Hello, StoreHello

KIB = 2**10


def config(dram="1MiB", **store):
    tiers = [{"kind": "dram", "capacity": dram}]
    if store:
        tiers.append({"kind": "memory", **store})  # or of another kind
    return parse_mapping({"tiers": tiers})


def shape(num_ranks=1, windows=(None,)):
    return EngineShape(16, windows, num_ranks, None, 8192, PrefillSpeed(0.005, 1e12))


def hello(idx=0, num_slots=8, payload=(60 * KIB,), slot=64 * KIB, pinned=True):
    stores = {"memory": StoreHello(7 + idx)}
    return Hello(Rank(idx), bytes(32), num_slots, slot, payload, pinned, stores)


def test_capacity_is_that_of_the_smallest_rank():
    """R74: pages of 478,080 and 524,160 bytes under the same budget."""
    hellos = [
        hello(0, num_slots=17, payload=(478_080,), slot=478_080),
        hello(1, num_slots=16, payload=(524_160,), slot=524_160),
    ]
    settings = control_settings(config(capacity="8MiB"), shape(2), hellos)
    assert settings.num_slots == 16
    assert settings.block_nbytes == 524_160
    assert settings.stores[0].capacity_blocks == 7


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_slab_without_a_single_slot_is_refused_with_what_would_do(num_ranks):
    """R118: never a silent zero."""
    with pytest.raises(CapacityError, match=rf"over {num_ranks} rank.*at least \d+MiB"):
        slots_for(config(), num_ranks, 2 * 2**20)


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_a_store_without_a_single_block_is_refused(kind, tmp_path):
    """R118: the second tier, divided over its ranks; a shared one would answer FULL for ever."""
    slab = Slab(2, 64 * KIB, pin="off")
    where = {"path": str(tmp_path / "shared")} if kind == "lmdb" else {}
    small = config(kind=kind, capacity="100KiB", **where)
    with pytest.raises(CapacityError, match=r"over 2 rank.*at least 1MiB") as found:
        RankStores(small, slab, "0", 0, 2).close()
    assert found.value.path == ("tiers", 1)
    slab.close()


def test_ranks_that_differ_in_their_stores_are_refused():
    for other in ({}, {"memory": StoreHello(None)}):
        hellos = [hello(0), replace(hello(1), stores=other)]
        with pytest.raises(ProtocolError, match="disagree on store 'memory'"):
            control_settings(config(capacity="8MiB"), shape(2), hellos)


def test_every_slot_is_used():
    assert slots_for(config("1MiB"), 2, 64 * KIB) == 8


def test_ranks_may_differ_in_what_they_could_pin():
    """R70: one rank of eight was refused; all go on, with the slots that all have."""
    hellos = [hello(i, pinned=i != 3) for i in range(8)]
    connector = SchedulerConnector(config(), shape(8))
    connector.connect(hellos)
    assert connector.controller.settings.num_slots == 8


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_rank_that_did_not_say_hello_is_missed(num):
    connector = SchedulerConnector(config(), shape(2))
    with pytest.raises(ProtocolError, match=f"{num} ranks said hello, expected 2"):
        connector.connect([hello(i) for i in range(num)])


def test_one_rank_that_speaks_twice_is_not_two():
    connector = SchedulerConnector(config(), shape(2))
    with pytest.raises(ProtocolError, match="twice"):
        connector.connect([hello(1), hello(1)])


def test_ranks_of_another_model_are_refused():
    connector = SchedulerConnector(config(), shape(2))
    other = replace(hello(1), fingerprint=bytes(31) + b"x")
    with pytest.raises(ProtocolError, match="fingerprints"):
        connector.connect([hello(0), other])


def test_ranks_with_other_groups_are_refused():
    hellos = [hello(0), hello(1, payload=(KIB, KIB))]
    with pytest.raises(ProtocolError, match=r"\[1, 2\] KV groups, expected 1"):
        control_settings(config(), shape(2), hellos)


def test_bytes_of_a_block_are_those_that_are_stored():
    """R111: what the ranks measured of their tensors, over all groups; not a guess by dtype."""
    settings = control_settings(
        config(), shape(1, (None, 64)), [hello(payload=(20 * KIB, 10 * KIB))]
    )
    assert settings.block_nbytes == 30 * KIB


def test_write_budget_is_divided_over_the_ranks_and_frames_count_whole_slots():
    tiers = [
        {"kind": "dram", "capacity": "1MiB"},
        {"kind": "nvme", "paths": ["/nowhere"], "capacity": "1GiB", "write_budget": "48GiB"},
    ]
    hellos = [replace(hello(i), stores={"nvme": StoreHello(9)}) for i in range(3)]
    settings = control_settings(parse_mapping({"tiers": tiers}), shape(3), hellos)
    (store,) = settings.stores
    assert (store.write_budget_nbytes, store.frame_nbytes) == (16 * 2**30, 64 * KIB)


@pytest.mark.parametrize(
    ("slot", "num_together"), [(64 * KIB, 16), (1032 * KIB, 15), (17000 * KIB, 1)]
)
def test_control_is_told_how_many_frames_come_together(slot, num_together):
    """The last portion is what goes to HBM when everything else is there."""
    hellos = [hello(0, slot=slot), hello(1, slot=slot - 4 * KIB)]
    frames = control_settings(config(capacity="256MiB"), shape(2), hellos).frames
    assert frames.num_together == num_together


def test_kv_groups_have_their_own_bytes():
    hellos = [hello(payload=(40 * KIB, 20 * KIB))]
    settings = control_settings(config(), shape(windows=(None, 64)), hellos)
    assert [settings.group_nbytes(idx) for idx in range(2)] == [40 * KIB, 20 * KIB]


def test_objective_deadline_and_seeds_reach_the_cost_model():
    options = {
        "tiers": [{"kind": "dram", "capacity": "1MiB"}],
        "cost": {"objective": "throughput", "margin": 0.2},
        "reload": {"deadline": "3s"},
    }
    seed = LinkSeed(1e-5, 1e-6, 7e9)
    cost = cost_model(parse_mapping(options), replace(shape(), seed_link=seed))
    assert cost.policy == PlanPolicy(CostMode.AUTO, 0.2, Objective.THROUGHPUT, 3.0)
    assert cost.links[reload_link()].bandwidth_bytes_per_second == pytest.approx(7e9)
    assert cost.prefill.flops_per_second == pytest.approx(1e12)
