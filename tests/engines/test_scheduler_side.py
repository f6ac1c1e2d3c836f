"""What the adapter measures of vLLM's steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvtiers.connector.step import Reload
from kvtiers.engines.vllm import scheduler_side
from kvtiers.engines.vllm.scheduler_side import SchedulerSide
from kvtiers.model.config import default_config
from kvtiers.model.messages import NO_BLOCK, StepOrders

from .fakes import full, kv_cache_config, vllm_config


class Recorder:
    """In place of the connector: notes what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], float]] = []
        self.num_ended = 0
        self.prefetched: list[int] = []
        self.tables: list[list[list[int]]] = []  # of blocks, whenever it is given one

    def arrived(self, request_id, hashes) -> None:
        pass

    def prefetch(self, request_id, num_tokens, num_local_tokens) -> None:
        self.prefetched.append(num_local_tokens)

    def reloadable(self, *_) -> Reload:
        return Reload(0, asynchronous=False)

    def allocated(self, request_id, block_ids, *_) -> None:
        self.tables.append(block_ids)

    def finished(self, request_id, block_ids) -> None:
        self.tables.append(block_ids)

    def schedule(self, step) -> StepOrders:
        self.tables += map(step.block_ids, step.num_computed_tokens)
        return StepOrders(1, 0, num_scheduled_tokens=step.num_scheduled_tokens)

    def step_took(self, num_new, num_context, seconds) -> None:
        self.steps.append((num_new, seconds))

    def step_ended(self) -> None:
        self.num_ended += 1


@pytest.fixture
def side(monkeypatch):
    side = SchedulerSide(default_config(), vllm_config(), kv_cache_config(full()))
    side.connector.close()
    side.connector = Recorder()
    side.now = 0.0
    monkeypatch.setattr(scheduler_side.time, "monotonic", lambda: side.now)
    return side


def begin(side: SchedulerSide, table: Sequence[int] = (1,), **num_tokens: int) -> None:
    """Schedule a step with so many new tokens of each request."""
    new = [
        SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=([1],)) for name in num_tokens
    ]
    cached = SimpleNamespace(
        req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
    )
    side.build_meta(
        SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            preempted_req_ids=(),
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: (list(table),)),
        )
    )


def end(side: SchedulerSide) -> None:
    """vLLM hands an output over."""
    side.output(SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=set()))


def test_step_is_measured_from_its_start_to_its_output(side):
    begin(side, a=100)
    side.now = 2.0
    end(side)
    assert side.connector.steps == [([100], 2.0)]
    assert side.connector.num_ended == 1


def test_step_without_tokens_that_ends_unseen_spoils_no_later_measurement(side):
    """vLLM hands over no output of a step that ran no model and had no news."""
    begin(side)
    side.now = 1.0
    begin(side, a=100)
    side.now = 4.0
    end(side)
    begin(side, a=1)
    side.now = 4.5
    end(side)
    assert side.connector.steps == [([100], 3.0), ([1], 0.5)]


def test_news_of_a_step_without_tokens_are_no_step(side):
    begin(side)
    end(side)
    assert side.connector.steps == []
    assert side.connector.num_ended == 0


def test_steps_that_overlap_are_measured_one_after_another(side):
    begin(side, a=100)
    side.now = 1.0
    begin(side, b=50)
    side.now = 3.0
    end(side)
    side.now = 4.0
    end(side)
    assert side.connector.steps == [([100], 3.0), ([50], 1.0)]


def test_what_vllms_prefix_cache_has_is_not_brought_ahead(side):
    """R31: the leading blocks; what it has behind a gap is of no use."""
    cached = {b"a", b"b", b"d"}
    pool = SimpleNamespace(get_cached_block=lambda block_hash, groups: block_hash in cached)
    side.kv_cache_manager = SimpleNamespace(block_pool=pool)
    request = SimpleNamespace(request_id="r", num_tokens=65, skip_reading_prefix_cache=False)
    for hashes in ([b"a", b"b", b"c", b"d"], [b"c"], []):
        request.block_hashes = hashes
        side.arrived(request)
    assert side.connector.prefetched == [2 * 16, 0, 0]


@pytest.mark.parametrize("null", [0, 9])
def test_vllms_null_block_is_no_block(side, null):
    """R89: it stands for what a window has left behind, and holds nobody's tokens."""
    if null:
        pool = SimpleNamespace(null_block=SimpleNamespace(block_id=null))
        side.kv_cache_manager = SimpleNamespace(block_pool=pool)
    request = SimpleNamespace(
        request_id="r", num_tokens=65, block_hashes=[], skip_reading_prefix_cache=False
    )
    side.num_matched(request, 0)
    table = [SimpleNamespace(is_null=b == null, block_id=b) for b in (null, 5)]
    side.allocated(request, SimpleNamespace(blocks=[table]), 0)
    begin(side, [null, 6], r=1)
    side.finished(request, ([null, 7],))
    assert side.connector.tables == [[[NO_BLOCK, n]] for n in (5, 6, 7)]
