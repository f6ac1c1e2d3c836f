"""Blocks that vLLM gives away are first read by the offloads that still run: R05."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvtiers.engines.vllm.metadata import KVTiersHandshake
from kvtiers.engines.vllm.scheduler_side import SchedulerSide
from kvtiers.model.config import parse_mapping
from kvtiers.model.keys import Rank
from kvtiers.model.messages import Hello, StepOrders

from .fakes import full, kv_cache_config, vllm_config

NOTHING = SimpleNamespace(
    req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
)


def request_of(name: str, **more: object) -> SimpleNamespace:
    hashes = [f"{name}{i}".encode().ljust(32, b".") for i in range(4)]
    facts = {"skip_reading_prefix_cache": False, "num_tokens": 65, "block_hashes": hashes, **more}
    return SimpleNamespace(request_id=name, **facts)


def table(*block_ids: int) -> SimpleNamespace:
    return SimpleNamespace(blocks=[[SimpleNamespace(is_null=False, block_id=b) for b in block_ids]])


def new(name: str, num_computed: int, *block_ids: int) -> SimpleNamespace:
    ids = (list(block_ids),)
    return SimpleNamespace(req_id=name, num_computed_tokens=num_computed, block_ids=ids)


def step(
    side: SchedulerSide,
    *arrivals: SimpleNamespace,
    cached: SimpleNamespace = NOTHING,
    resolved: tuple[int, ...] = (),
) -> StepOrders:
    """Schedule 64 tokens of each request that begins, one of each that goes on."""
    num_tokens = {it.req_id: 64 for it in arrivals} | dict.fromkeys(cached.req_ids, 1)
    return side.build_meta(
        SimpleNamespace(
            scheduled_new_reqs=arrivals,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            preempted_req_ids=(),
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: (list(resolved),)),
        )
    ).orders


@pytest.fixture
def side() -> SchedulerSide:
    """A request has ended, and blocks 3 to 6 of it are still to be read."""
    config = parse_mapping({"tiers": [{"kind": "dram", "capacity": "8MiB"}]})
    side = SchedulerSide(config, vllm_config(), kv_cache_config(full()))
    hello = Hello(Rank(), bytes(32), 8, 2**20, (2**20,), pinned=False)
    side.connect({(0, 0): KVTiersHandshake(hello)})
    first = request_of("first")
    side.arrived(first)
    side.num_matched(first, 0)
    side.allocated(first, table(3, 4, 5, 6), 0)
    (offload,) = step(side, new("first", 0, 3, 4, 5, 6), resolved=(3, 4, 5, 6)).after
    assert offload.block_ids.tolist() == [3, 4, 5, 6]
    side.finished(first, ([3, 4, 5, 6],))
    return side


def fenced(orders: StepOrders) -> list[int]:
    return sorted(block for blocks in orders.fences.values() for block in blocks.tolist())


@pytest.mark.parametrize("asked", [True, False])
def test_blocks_for_a_load_of_another_connector(side, asked):
    """Their request is in no step while it waits; ours has offered nothing, or was not asked."""
    other = request_of("other")
    if asked:
        assert side.num_matched(other, 0) == (0, False)
    side.allocated(other, table(5, 6, 7, 1), 0)
    assert fenced(step(side)) == [5, 6]
    assert fenced(step(side)) == []


def test_blocks_of_a_request_that_begins(side):
    """Not those that it has from the prefix cache: nobody writes into them."""
    assert fenced(step(side, new("other", 16, 3, 4, 7))) == [4]


@pytest.mark.parametrize(("resumed", "expected"), [(False, [3, 4]), (True, [4])])
def test_blocks_of_a_request_that_goes_on_or_comes_back(side, resumed, expected):
    cached = SimpleNamespace(
        req_ids=["other"],
        num_computed_tokens=[16],
        new_block_ids=[([3, 4],)],
        resumed_req_ids={"other"} if resumed else set(),
    )
    assert fenced(step(side, cached=cached)) == expected


def test_a_namesake_of_an_aborted_request_was_offered_nothing(side):
    """R20: it was looked up, and never given blocks."""
    other = request_of("other")
    side.num_matched(other, 0)
    side.finished(other, ([],))
    side.allocated(other, table(5, 6), 0)
    assert fenced(step(side)) == [5, 6]


def test_a_request_that_may_not_read_the_cache_is_not_asked_about(side):
    """R92: nor is anything brought ahead for it."""
    request = request_of("first", skip_reading_prefix_cache=True)
    asked = []
    side.connector.reloadable = side.connector.prefetch = lambda *what: asked.append(what)
    side.arrived(request)
    assert side.num_matched(request, 0) == (0, False)
    assert asked == []
