"""The torch engine drives every tier of kvtiers, and whatever fails there changes no token."""

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.torch_runner import torch_engine
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import ConfigError, ProtocolError
from kvtiers.model.outcome import Outcome
from kvtiers.testing.faults import FaultyStore, Flip, LateStore, WrapperStore

from .test_torch_engine import NUM_OUTPUTS, POOLS, new_requests, prompts, serve, settings_of
from .test_torch_machine import MODEL, config_of, generated

KINDS = ("dram", "memory", "nvme", "lmdb", "all")
FAULTS = {
    "failed": Outcome.FAILED,
    "missing": Outcome.MISSING,
    "corrupt": Outcome.CORRUPT,
    "flipped": Flip(300),
    "raises": OSError("the disk is gone"),
}


@pytest.fixture(scope="module")
def expected():
    return {request.request_id: generated(request) for request in new_requests()}


@pytest.fixture
def engines():
    """Make engines that are closed at the end."""
    made = []

    def make(settings, *more):
        made.append(torch_engine(MODEL, settings, *more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def again():
    return [NewRequest(f"again{i}", 0.0, NUM_OUTPUTS, p) for i, p in enumerate(prompts())]


def again_of(tokens):
    """Return the tokens of `again` under the names of `new_requests`."""
    return {name.replace("again", "r"): ids for name, ids in tokens.items()}


def by_tier(served):
    found = {}
    for it in served.values():
        for tier, num in it.reloaded_by_tier.items():
            found[tier] = found.get(tier, 0) + num
    return found


@pytest.mark.parametrize("mode", PreemptMode)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_over_every_tier_under_preemption(engines, tmp_path, kind, mode, expected):
    """Over stores, DRAM holds less than the requests, so that what lies below is used too."""
    settings = settings_of(POOLS["tight"], preemption=mode)
    dram = "1MiB" if kind == "dram" else "64KiB"
    engine = engines(settings, config_of(tmp_path, kind, dram=dram))
    tokens, _ = serve(engine, new_requests())
    assert tokens == expected
    assert engine.gauges.num_preemptions > 0
    tokens, served = serve(engine, again())
    assert again_of(tokens) == expected
    found = by_tier(served)
    assert sum(found.values()) > 0
    if kind in ("memory", "nvme", "lmdb"):
        assert found.get(kind, 0) > 0


@pytest.mark.parametrize("kind", ["nvme", "lmdb", "all"])
def test_another_life_reloads_what_the_first_computed(engines, tmp_path, kind, expected):
    config = config_of(tmp_path, kind, dram="1MiB")  # so that nothing is dropped for want of room
    first = engines(settings_of(POOLS["ample"]), config)
    serve(first, new_requests())
    first.close()
    tokens, served = serve(engines(settings_of(POOLS["ample"]), config), again())
    assert again_of(tokens) == expected
    # But for its last token and what does not fill a block, each prompt comes from below.
    assert sum(it.num_reloaded_tokens for it in served.values()) >= sum(
        (len(prompt) - 1) // 4 * 4 for prompt in prompts()
    ) - 4 * len(prompts())


class Breaking(FaultyStore):
    """Fails every second call of a verb."""

    def __init__(self, store, verb, fault):
        super().__init__(store, store._slab)
        self.verb, self.fault = verb, fault
        for call in range(1, 2000, 2):
            self.fail(verb, fault, on=call)


@pytest.mark.parametrize("mode", PreemptMode)
@pytest.mark.parametrize("kind", ["memory", "nvme", "lmdb"])
@pytest.mark.parametrize("fault", FAULTS)
def test_reads_that_fail_change_no_token(engines, tmp_path, kind, fault, mode, expected):
    stores = []

    def wrap(_, store):
        stores.append(Breaking(store, "get", FAULTS[fault]))
        return stores[-1]

    settings = settings_of(POOLS["tight"], preemption=mode)
    engine = engines(settings, config_of(tmp_path, kind), wrap)
    assert serve(engine, new_requests())[0] == expected
    assert again_of(serve(engine, again())[0]) == expected
    assert stores[0].calls["get"] > 0


@pytest.mark.parametrize("fault", ["failed", "raises"])
@pytest.mark.parametrize("kind", ["memory", "nvme", "lmdb"])
def test_writes_that_fail_change_no_token(engines, tmp_path, kind, fault, expected):
    def wrap(_, store):
        return Breaking(store, "put", FAULTS[fault])

    settings = settings_of(POOLS["tight"], preemption=PreemptMode.SWAP)
    engine = engines(settings, config_of(tmp_path, kind), wrap)
    assert serve(engine, new_requests())[0] == expected
    assert again_of(serve(engine, again())[0]) == expected


def test_answers_that_come_late_and_out_of_order_change_no_token(engines, tmp_path, expected):
    def wrap(_, store):
        return LateStore(store, polls=40, seed=1)

    settings = settings_of(POOLS["tight"], preemption=PreemptMode.SWAP)
    engine = engines(settings, config_of(tmp_path, "nvme"), wrap)
    assert serve(engine, new_requests())[0] == expected
    assert again_of(serve(engine, again())[0]) == expected


def test_a_store_that_never_answers_is_not_waited_for_without_end(engines, tmp_path):
    def wrap(_, store):
        return LateStore(store, polls=1_000_000)

    engine = engines(settings_of(POOLS["ample"]), config_of(tmp_path, "nvme"), wrap)
    engine.add(new_requests()[0])
    while engine.num_unfinished:
        engine.step()
    with pytest.raises(ProtocolError, match=r"still busy after 0.2 s"):
        engine.settle(0.2)


def test_blocks_that_come_range_by_range_are_refused_where_they_are_loaded_whole(engines):
    ranges = {"reload": {"layer_ranges": 2}}
    tiers = [{"kind": "dram", "capacity": "64KiB", "pin": "off"}]
    with pytest.raises(ConfigError, match=r"reload.layer_ranges is 2; this engine loads whole"):
        engines(settings_of(POOLS["ample"]), parse_mapping({"tiers": tiers, **ranges}))


class Losing(WrapperStore):
    """Loses the middle frame of each read just before: the load fails half-way."""

    num_lost = 0

    def get(self, frames):
        if len(frames) > 1:
            type(self).num_lost += 1
            self.inner.delete([frames[len(frames) // 2].key])
        return self.inner.get(frames)


@pytest.mark.parametrize("kind", ["nvme", "lmdb"])
def test_a_load_that_fails_half_way_keeps_what_came_before(engines, tmp_path, kind, expected):
    config = config_of(tmp_path, kind)
    first = engines(settings_of(POOLS["ample"]), config)
    serve(first, new_requests())
    first.close()
    Losing.num_lost = 0
    engine = engines(settings_of(POOLS["ample"]), config, lambda _, store: Losing(store))
    tokens, served = serve(engine, again())
    assert again_of(tokens) == expected
    assert Losing.num_lost > 0
    found = [it.num_reloaded_tokens for it in served.values()]
    assert 0 < sum(found) < sum((len(prompt) - 1) // 4 * 4 for prompt in prompts())
    for it in served.values():  # what a request reloaded is what tiers say they brought
        assert sum(it.reloaded_by_tier.values()) == it.num_reloaded_tokens


@pytest.mark.parametrize("kind", ["nvme", "lmdb"])
def test_a_damaged_medium_is_found_out(engines, tmp_path, kind, expected):
    """Every byte from the second half of each data file on is turned while nobody runs."""
    config = config_of(tmp_path, kind)
    first = engines(settings_of(POOLS["ample"]), config)
    serve(first, new_requests())
    first.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 65536]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        half = len(data) // 2 if kind == "nvme" else len(data)
        for at in range(16384 + 700, half, 1024):
            data[at] ^= 0xFF
        path.write_bytes(data)
    tokens, served = serve(engines(settings_of(POOLS["ample"]), config), again())
    assert again_of(tokens) == expected
    assert sum(it.num_reloaded_tokens for it in served.values()) < sum(map(len, prompts())) // 2
