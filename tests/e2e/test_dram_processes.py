"""Scheduler, workers and server in processes of their own."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from kvtiers.observe.metrics import BLOCKS_OFFLOADED, TOKENS_RELOADED

from .answers import differences, random_prompt
from .api_server import api_server
from .harness import EngineOptions, Engines, Refuses
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References
from .tiers import dram, memory, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIGURATIONS = {
    "DRAM": dram(reload={"sync_below": "0ms"}),
    "synchronous loads": dram(reload={"sync_below": "1s"}),
    "memory below a tiny DRAM": dram("4MiB", memory(), policy={"offload": "lazy"}),
}


def counted(name: str) -> float:
    """Return a counter's value on this process's page, over all its labels."""
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    )


@pytest.mark.parametrize(
    ("pool", "config", "tensor_parallel_size"),
    [
        (SMALL_POOL, "DRAM", 1),
        (SMALL_POOL, "DRAM", 2),
        (SMALL_POOL, "synchronous loads", 2),
        (SMALL_POOL, "memory below a tiny DRAM", 2),
        (SMALL_HYBRID_POOL, "DRAM", 2),
    ],
    ids=["multiprocess", "TP 2", "TP 2, sync", "TP 2, two tiers", "TP 2, two KV groups"],
)
def test_processes_answer_like_one_process_without_kvtiers(
    engines: Engines,
    references: References,
    pool: EngineOptions,
    config: str,
    tensor_parallel_size: int,
) -> None:
    options = replace(
        tiered(pool, CONFIGURATIONS[config]),
        multiprocess=True,
        tensor_parallel_size=tensor_parallel_size,
        log_stats=True,
    )
    scenarios = [scenario for scenario in SCENARIOS if not scenario.in_process]
    expected = {scenario: references.answers(scenario, pool) for scenario in scenarios}
    before = counted(TOKENS_RELOADED), counted(BLOCKS_OFFLOADED)
    for scenario in scenarios:
        actual = scenario.drive(engines.get(options))
        assert not differences(expected[scenario], actual), scenario
    assert counted(BLOCKS_OFFLOADED) > before[1]
    assert counted(TOKENS_RELOADED) - before[0] >= 28 * 32
    engines.shutdown()


def test_the_server_reloads_and_says_so_on_its_page(engines: Engines, tmp_path: Path) -> None:
    yaml = tmp_path / "kvtiers.yaml"
    yaml.write_text("tiers: [{kind: dram, capacity: 256MiB}]\ncost: {mode: always}\n")
    plain = EngineOptions(log_stats=True)
    prompt = random_prompt(333, seed=6)
    [expected] = engines.get(plain).generate([prompt], 12)
    engines.shutdown()
    options = replace(plain, kvtiers=str(yaml))
    directory = engines.model_directory(options.model)
    with api_server(options, directory, tmp_path / "server.log") as server:
        assert server.complete(prompt, 12).token_ids == expected.token_ids
        server.reset_prefix_cache()
        assert server.complete(prompt, 12).token_ids == expected.token_ids
        page = server.metrics()
        assert on_page(page, TOKENS_RELOADED, tier="dram") == 320
        assert on_page(page, BLOCKS_OFFLOADED, tier="dram") >= 10
        assert on_page(page, "kvtiers_tier_capacity_blocks", tier="dram") == 1985
        server.reset_prefix_cache(reset_connector=True)
        assert server.complete(prompt, 12).token_ids == expected.token_ids
        assert on_page(server.metrics(), TOKENS_RELOADED, tier="dram") == 320
        assert server.stop() == 0, server.log()


def on_page(page: str, name: str, **labels: str) -> float:
    """Return one value of a Prometheus page."""
    values = []
    for line in page.splitlines():
        match = re.fullmatch(re.escape(name) + r"\{(.*)\} (\S+)", line)
        if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
            values.append(float(match[2]))
    assert len(values) == 1, f"{name} stands {len(values)} times on the page"
    return values[0]


BAD_CONFIGURATIONS: dict[str, tuple[Any, str]] = {
    "unknown key": ("tiers: [{kind: dram, capacty: 1GiB}]", "kvtiers.yaml:1: .*did you mean"),
    "wrong unit": ("tiers:\n  - {kind: dram, capacity: 1GX}", "kvtiers.yaml:2: .*1GX"),
    "too small for one block": (
        "tiers: [{kind: dram, capacity: 64KiB}]",
        "does not hold one block",
    ),
    "impossible list": ("tiers: [{kind: memory, capacity: 1GiB}]", "kvtiers.yaml:1: .*dram"),
    "a store without a path": (
        "tiers:\n  - {kind: dram, capacity: 1GiB}\n  - {kind: nvme, capacity: 1TiB}",
        "kvtiers.yaml:3: .*paths: is missing",
    ),
}


@pytest.mark.parametrize(
    ("text", "message"), BAD_CONFIGURATIONS.values(), ids=BAD_CONFIGURATIONS.keys()
)
def test_a_bad_configuration_is_refused_before_the_engine_starts(
    refuses: Refuses, tmp_path: Path, text: str, message: str
) -> None:
    yaml = tmp_path / "kvtiers.yaml"
    yaml.write_text(text)
    refuses(EngineOptions(kvtiers=str(yaml)), message)


def test_an_unreadable_configuration_is_refused(refuses: Refuses, tmp_path: Path) -> None:
    refuses(EngineOptions(kvtiers=str(tmp_path / "absent.yaml")), "no such file")


def test_a_policy_that_fails_requests_is_spoken_of_at_start(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    options = EngineOptions(kvtiers=dram(), kv_transfer={"kv_load_failure_policy": "fail"})
    with caplog.at_level(logging.WARNING, logger="kvtiers"):
        engines.get(options)
    assert any('"kv_load_failure_policy": "recompute"' in text for text in caplog.messages)
    engines.shutdown()


def test_a_role_that_cannot_work_is_refused(refuses: Refuses) -> None:
    options = EngineOptions(kvtiers=dram(), kv_transfer={"kv_role": "kv_producer"})
    refuses(options, "write 'kv_both'")


def test_an_unknown_option_beside_the_configuration_is_refused(refuses: Refuses) -> None:
    options = EngineOptions(kv_transfer={"kv_connector": "KVTiersConnector"})
    extra = {"kv_connector_extra_config": {"confg": "kvtiers.yaml"}}
    refuses(replace(options, kv_transfer={**options.kv_transfer, **extra}), "'confg'.*'config'")


def test_the_connector_is_registered_by_its_entry_point() -> None:
    script = (
        "from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
        "print(F.get_connector_class_by_name('KVTiersConnector').__name__)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["KVTiersConnector"], done.stderr
