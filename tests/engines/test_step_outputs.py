"""What vLLM's outputs say: which loads failed, and how long steps took."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvtiers.connector.step import Reload
from kvtiers.control.answers import LoadDone
from kvtiers.engines.vllm.metadata import KVTiersWorkerMetadata
from kvtiers.engines.vllm.scheduler_side import SchedulerSide
from kvtiers.model.config import parse_mapping
from kvtiers.model.messages import StepOrders, WorkerReport

from .fakes import full, kv_cache_config, vllm_config


class Told:
    """vLLM's scheduler hooks over a connector that only notes what it is told."""

    def __init__(self):
        config = parse_mapping({"tiers": [{"kind": "dram", "capacity": "1MiB"}]})
        self.side = SchedulerSide(config, vllm_config(), kv_cache_config(full()))
        self.side.connector = self
        self.num_distrusts = 0
        self.asynchronous = True
        self.loads: list[LoadDone] = []
        self.steps: list[tuple[list[int], list[int]]] = []

    def reloadable(self, *_):
        return Reload(32, asynchronous=self.asynchronous)

    def allocated(self, *_):
        pass

    def reported(self, _):
        return self.loads

    def schedule(self, _):
        return StepOrders(1, 0)

    def step_ended(self):
        pass

    def step_took(self, num_new, num_context, seconds):
        self.steps.append((num_new, num_context))

    def distrust(self):
        self.num_distrusts += 1

    def load(self, request_id, block_ids, *, asynchronous=True):
        self.asynchronous = asynchronous
        request = SimpleNamespace(
            request_id=request_id, skip_reading_prefix_cache=False, block_hashes=[], num_tokens=33
        )
        self.side.num_matched(request, 0)
        blocks = [SimpleNamespace(is_null=False, block_id=b) for b in block_ids]
        self.side.allocated(request, SimpleNamespace(blocks=[blocks]), 32)

    def schedule_step(self, **num_tokens):
        new = [
            SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=[[]])
            for name in num_tokens
        ]
        cached = SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        )
        self.side.build_meta(
            SimpleNamespace(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=num_tokens,
                total_num_scheduled_tokens=sum(num_tokens.values()),
                preempted_req_ids=None,
                kv_connector_block_state=SimpleNamespace(resolve_block_ids=None),
            )
        )

    def output(self, invalid=(), over=()):
        self.loads = [LoadDone(request_id, 0, 2, 0.1) for request_id in over]
        meta = KVTiersWorkerMetadata(WorkerReport())
        self.side.output(
            SimpleNamespace(kv_connector_worker_meta=meta, invalid_block_ids=set(invalid))
        )
        return self.num_distrusts


def test_an_asynchronous_reload_that_failed_takes_back_nothing_that_others_computed():
    """MISSING is normal there: it must not cost the offloads of three steps and all requests."""
    told = Told()
    told.load("a", [5, 6])
    assert told.output(invalid=[6]) == 0  # one rank, and then
    assert told.output(invalid=[5, 6], over=["a"]) == 0  # all


def test_blocks_that_were_filled_again_are_no_excuse():
    told = Told()
    told.load("a", [5, 6])
    told.output(over=["a"])
    assert told.output(invalid=[6]) == 1


@pytest.mark.parametrize("invalid", [[7], [6, 7]])
def test_any_other_load_that_failed_does(invalid):
    told = Told()
    told.load("a", [5, 6])
    told.load("b", [7, 8], asynchronous=False)
    assert told.output(invalid=invalid, over=["a", "b"]) == 1


def test_steps_without_tokens_are_not_taken_for_others():
    """vLLM tells nothing of a step that had neither tokens nor news: one in 2 ms of waiting."""
    told = Told()
    for _ in range(5):
        told.schedule_step()
    told.schedule_step(a=10)
    told.output()
    told.schedule_step()
    told.output()
    told.schedule_step(b=20)
    told.output()
    assert told.steps == [([10], [0]), ([20], [0])]
