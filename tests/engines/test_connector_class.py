"""The class that vLLM instantiates: how it may be made, and what it says when it cannot be."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtiers.connector.worker import Loaded
from kvtiers.engines.vllm import KVTiersConnector
from kvtiers.engines.vllm.metadata import KVTiersWorkerMetadata
from kvtiers.engines.vllm.plugin import NAME, register
from kvtiers.model.errors import ConfigError, ProtocolError
from kvtiers.model.messages import WorkerReport

from .fakes import full, kv_cache_config, sliding, vllm_config

INLINE = {"config": {"tiers": [{"kind": "dram", "capacity": "64MiB"}]}}


def config(extra=INLINE):
    return vllm_config(kv_transfer_config__kv_connector_extra_config=extra)


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("by_name", [False, True])
def test_constructor_takes_the_arguments_in_vllms_order_and_by_name(role, by_name):
    """R113: three positional, or as the factory names them; the third reaches the base class."""
    cache = kv_cache_config(full())
    if by_name:
        connector = KVTiersConnector(vllm_config=config(), role=role, kv_cache_config=cache)
    else:
        connector = KVTiersConnector(config(), role, cache)
    assert connector.role is role
    assert connector.__dict__["_kv_cache_config"] is cache
    connector.shutdown()
    connector.shutdown()


def test_two_connectors_live_in_one_process():
    """R91: scheduler and worker side of one engine, and of another."""
    cache = kv_cache_config(full())
    made = [KVTiersConnector(config(), role, cache) for role in [*KVConnectorRole] * 2]
    assert len({id(connector) for connector in made}) == 4
    for connector in made:
        connector.shutdown()


def test_start_says_where_the_configuration_comes_from(tmp_path, caplog):
    """R116: once an engine, so that nobody wonders which file is in force."""
    path = tmp_path / "kvtiers.yaml"
    path.write_text("tiers: [{kind: dram, capacity: 64MiB}]")
    with caplog.at_level(logging.INFO):
        for role in KVConnectorRole:
            KVTiersConnector(config({"config": str(path)}), role, kv_cache_config(full()))
    told = [record.message for record in caplog.records if "configuration from" in record.message]
    assert told == [f"kvtiers configuration from {path}"]


def test_an_unknown_extra_key_is_named():
    extra = {**INLINE, "cpu_bytes": 1}
    with pytest.raises(ConfigError, match="cpu_bytes"):
        KVTiersConnector(config(extra), KVConnectorRole.SCHEDULER, kv_cache_config(full()))


def test_work_before_the_tensors_are_registered_is_a_clear_error():
    connector = KVTiersConnector(config(), KVConnectorRole.WORKER, kv_cache_config(full()))
    with pytest.raises(ProtocolError, match="has not registered its KV caches"):
        connector.get_handshake_metadata()


def test_lookups_before_the_ranks_said_hello_are_a_clear_error():
    connector = KVTiersConnector(config(), KVConnectorRole.SCHEDULER, kv_cache_config(full()))
    request = SimpleNamespace(
        request_id="r", block_hashes=[], num_tokens=5, skip_reading_prefix_cache=False
    )
    with pytest.raises(ProtocolError, match="have not said hello"):
        connector.get_num_new_matched_tokens(request, 0)


@pytest.mark.parametrize(
    ("specs", "failed_requests", "failed_blocks"),
    [([full()], set(), {7, 8}), ([full(), sliding(64)], {"b"}, set())],
    ids=["one group", "several groups"],
)
def test_failed_loads_are_told_as_vllm_can_take_them_back(specs, failed_requests, failed_blocks):
    """R35: block ids say nothing of the other KV groups, so the whole request starts again."""
    connector = KVTiersConnector(config(), KVConnectorRole.WORKER, kv_cache_config(*specs))
    loaded = Loaded(frozenset("ab"), frozenset("b"), frozenset({7, 8}))
    connector.worker_side._connector = SimpleNamespace(take_loaded=lambda: loaded)
    told = connector.get_transfer_results(set())
    assert (told.finished_recving, told.failed_recving) == ({"a", "b"}, failed_requests)
    assert connector.get_block_ids_with_load_errors() == failed_blocks
    assert connector.get_block_ids_with_load_errors() == set()


def test_what_ranks_report_is_put_together():
    """R22: each of them answers every job."""
    metas = [KVTiersWorkerMetadata(WorkerReport(counters={f"rank{i}": 1})) for i in range(3)]
    together = metas[0].aggregate(metas[1]).aggregate(metas[2])
    assert together.report.counters == {"rank0": 1, "rank1": 1, "rank2": 1}


def test_registration_may_be_repeated():
    register()
    register()
    assert NAME in KVConnectorFactory._registry


def test_a_removed_helper_of_vllm_is_loud(monkeypatch):
    """R114: no broad except between the plugin and what vLLM no longer has."""
    monkeypatch.delitem(KVConnectorFactory._registry, NAME, raising=False)
    monkeypatch.delattr(KVConnectorFactory, "register_connector")
    with pytest.raises(AttributeError, match="register_connector"):
        register()
