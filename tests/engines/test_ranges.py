"""Ranges of layers in vLLM: how a KV group is cut, and who may not have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvtiers.engines.vllm import KVTiersConnector
from kvtiers.engines.vllm.identity import engine_fingerprint, engine_shape
from kvtiers.engines.vllm.layout import layout_of
from kvtiers.engines.vllm.ranges import check_layers, ranges_of
from kvtiers.engines.vllm.worker_side import WorkerSide
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import ConfigError, UnsupportedEngineError

from .fakes import NUM_BLOCKS, full, kv_cache_config, kv_caches, sliding, vllm_config

NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(12)]


def one_group(names) -> KVCacheConfig:
    return KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(names), full())])


@pytest.mark.parametrize("num_ranges", [1, 2, 5, 12])
def test_layers_are_cut_in_the_order_of_the_model_each_once(num_ranges):
    shuffled = sorted(NAMES)  # 0, 1, 10, 11, 2, ...
    found = ranges_of(shuffled, num_ranges)
    assert len(found) == num_ranges
    flat = [name for names in found for name in names]
    assert flat == (shuffled if num_ranges == 1 else NAMES)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_layers_without_an_index_stay_where_they_are():
    assert ranges_of(["b", "a", "c"], 3) == [["b"], ["a"], ["c"]]


@pytest.mark.parametrize("num_ranges", [2, 3])
def test_the_ranges_hold_the_bytes_of_the_one_group(num_ranges):
    config = one_group(NAMES)
    caches = kv_caches(config)
    (whole,) = layout_of(config, caches)[0].groups
    layout, bases = layout_of(config, caches, num_ranges)
    assert [group.group for group in layout.groups] == list(range(num_ranges))
    assert sum(group.payload_nbytes for group in layout.groups) == whole.payload_nbytes
    pages = [page for group in layout.groups for page in group.pages]
    assert pages == list(whole.pages)
    assert {group.block_size for group in layout.groups} == {whole.block_size}
    assert len(bases) == len(layout.allocations)


def test_another_number_of_ranges_is_other_kv():
    config = one_group(NAMES)
    layouts = [layout_of(config, kv_caches(config), num)[0] for num in (1, 2, 4)]
    digests = {engine_fingerprint(vllm_config(), layout).digest for layout in layouts}
    assert len(digests) == 3


def test_the_shape_has_a_group_for_each_range():
    shape = engine_shape(vllm_config(), one_group(NAMES), 4)
    assert (shape.windows, shape.num_layer_ranges) == ((None,) * 4, 4)
    assert shape.loads_in_step


@pytest.mark.parametrize(
    ("change", "cache", "num_ranges", "message"),
    [
        (
            {"scheduler_config__async_scheduling": True},
            one_group(NAMES),
            2,
            "write --no-async-scheduling, or remove reload.layer_ranges",
        ),
        ({}, kv_cache_config(full(), sliding(64)), 2, "has 2 KV groups"),
        ({}, one_group(NAMES), 13, "12 layers with KV; write 12 at most"),
    ],
    ids=["asynchronous scheduling", "several groups", "too many"],
)
def test_ranges_that_no_step_can_wait_for_are_refused_on_both_sides(
    change, cache, num_ranges, message
):
    tiers = [{"kind": "dram", "capacity": "1MiB"}]
    config = parse_mapping({"tiers": tiers, "reload": {"layer_ranges": num_ranges}})
    with pytest.raises(UnsupportedEngineError, match=message):
        engine_shape(vllm_config(**change), cache, num_ranges)
    with pytest.raises(UnsupportedEngineError, match=message):
        WorkerSide(config, vllm_config(**change), cache)
    engine_shape(vllm_config(**change), cache, 1)


def test_layers_that_vllm_does_not_wait_for_are_refused():
    """An indexer reads its own KV before the attention that waits."""
    layers = {NAMES[0]: Attention.__new__(Attention), NAMES[1]: object()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    check_layers(2, config, NAMES[:1])
    check_layers(1, config, NAMES[:2])
    for name in NAMES[1:3]:  # of another kind, and unknown
        with pytest.raises(UnsupportedEngineError, match=f"does not wait for layer {name}"):
            check_layers(2, config, [name])


@pytest.mark.parametrize(("section", "needed"), [({}, False), ({"layer_ranges": 2}, True)])
def test_graphs_of_a_whole_step_are_given_up_where_layers_wait(section, needed):
    config = {"tiers": [{"kind": "dram", "capacity": "1MiB"}], "reload": section}
    assert KVTiersConnector.requires_piecewise_for_cudagraph({"config": config}) is needed


def test_wrong_configuration_is_told_of_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match=r"<inline>: tiers: 1 is not a list"):
        KVTiersConnector.requires_piecewise_for_cudagraph({"config": {"tiers": 1}})
