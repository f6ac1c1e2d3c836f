"""What a failed load takes back, as vLLM's scheduler tells of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvtiers.connector.step import Reload
from kvtiers.control.answers import LoadDone
from kvtiers.engines.vllm.metadata import KVTiersWorkerMetadata
from kvtiers.engines.vllm.scheduler_side import SchedulerSide
from kvtiers.model.config import parse_mapping
from kvtiers.model.messages import WorkerReport

from .fakes import full, kv_cache_config, vllm_config


class Told:
    """vLLM's scheduler hooks over a connector that only notes what it is told."""

    def __init__(self):
        config = parse_mapping({"tiers": [{"kind": "dram", "capacity": "1MiB"}]})
        self.side = SchedulerSide(config, vllm_config(), kv_cache_config(full()))
        self.side.connector = self
        self.num_distrusts = self.num_allocated = 0
        self.asynchronous = True
        self.loads: list[LoadDone] = []

    def reloadable(self, *_):
        return Reload(32, asynchronous=self.asynchronous)

    def allocated(self, *_):
        self.num_allocated += 1

    def will_fill(self, _):
        pass

    def reported(self, _):
        return self.loads

    def distrust(self):
        self.num_distrusts += 1

    def load(self, request_id, block_ids, *, asynchronous=True):
        self.asynchronous = asynchronous
        request = SimpleNamespace(
            request_id=request_id, skip_reading_prefix_cache=False, block_hashes=[], num_tokens=33
        )
        self.side.num_matched(request, 0)
        blocks = [SimpleNamespace(is_null=False, block_id=b) for b in block_ids]
        for _ in range(2):  # R17: the second call changes nothing
            self.side.allocated(request, SimpleNamespace(blocks=[blocks]), 32)
        assert self.num_allocated == 1
        self.num_allocated = 0

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


def test_what_a_failed_load_in_a_step_left_in_vllms_prefix_cache_is_taken_out():
    """R32: all of its request from the load on; not what is only under way between steps."""
    told, evicted = Told(), []
    told.side.kv_cache_manager = SimpleNamespace(evict_blocks=evicted.append)
    told.load("a", [5, 6])
    told.load("b", [7, 8], asynchronous=False)
    told.load("c", [9], asynchronous=False)
    told.output(invalid=[5, 8])
    assert evicted == [{7, 8}]
    told.output(invalid=[8])
    assert evicted == [{7, 8}]
