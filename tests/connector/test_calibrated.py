"""A calibration file seeds the links of the machine and the tiers that it was measured on."""

from __future__ import annotations

import json
import logging

import pytest

from kvtiers.connector.build import cost_model
from kvtiers.connector.calibrated import measured_seeds, tier_facts
from kvtiers.connector.machine import machine_facts
from kvtiers.connector.shape import EngineShape
from kvtiers.cost.calibration import Calibration, Cell, LinkFit, MachineFacts, fit_links
from kvtiers.cost.links import LinkModel, LinkSeed
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import ConfigError

HERE = MachineFacts(cpu="EPYC 7", gpus=("H100",), num_cores=8)
MIB = 2**20


def config(path=None, **nvme):
    tier = {"kind": "nvme", "paths": ["/mnt/a/kv"], "capacity": "1GiB", **nvme}
    tiers = [{"kind": "dram", "capacity": "1MiB"}, tier]
    return parse_mapping({"tiers": tiers, "cost": {"calibration": path and str(path)}})


def calibration(**changes):
    fields = {
        "date": "2026-11-29T12:00:00+00:00",
        "kvtiers": "0.1.0",
        "device": "cpu",
        "machine": machine_facts(),
        "tiers": {"nvme": tier_facts(config().stores[0])},
        "fits": {
            "dram>hbm": fit(1e-5, 1e-6, 20e9),
            "nvme>dram": fit(3e-4, 2e-5, 0.5e9),
            "dram>nvme": fit(4e-4, 2e-5, 0.7e9),
        },
    }
    return Calibration(**{**fields, **changes})


def fit(latency, piece, bandwidth):
    return LinkFit(
        latency_seconds=latency, seconds_per_piece=piece, bandwidth_bytes_per_second=bandwidth
    )


@pytest.fixture
def write(tmp_path):
    def to_file(found=None, **changes):
        path = tmp_path / "calibration.json"
        plain = (found or calibration()).to_plain()
        path.write_text(json.dumps({**plain, **changes}))
        return path

    return to_file


def test_the_cost_model_of_an_engine_starts_from_the_file(write):
    shape = EngineShape(16, (None,), 1, None, 8192, PrefillSpeed(0.005, 1e12))
    links = cost_model(config(write()), shape).links
    assert links["nvme>dram"].bandwidth_bytes_per_second == pytest.approx(0.5e9)
    assert links["dram>hbm"].latency_seconds == pytest.approx(1e-5)
    assert links["hbm>dram"].bandwidth_bytes_per_second == pytest.approx(50e9)  # not measured
    seeded = cost_model(config(), shape).links
    assert seeded["nvme>dram"].bandwidth_bytes_per_second == pytest.approx(2.4e9)


def test_without_a_file_nothing_is_known():
    assert measured_seeds(config()) == {}


def test_another_machines_file_is_passed_over_with_a_warning(write, caplog):
    path = write(calibration(machine=HERE))
    assert measured_seeds(config(path), machine=HERE)["nvme>dram"] == LinkSeed(3e-4, 2e-5, 0.5e9)
    fewer_cores = HERE.model_copy(update={"num_cores": 2})
    assert measured_seeds(config(path), machine=fewer_cores)
    assert not caplog.records
    for other in (MachineFacts(cpu="Xeon"), HERE.model_copy(update={"gpus": ("A100",)})):
        caplog.clear()
        assert measured_seeds(config(path), machine=other) == {}
        assert "run `kvtiers probe` again" in caplog.text
        assert "EPYC 7, H100" in caplog.text


def test_the_way_to_hbm_is_that_of_the_engines_device(write, caplog):
    path = write()
    assert "dram>hbm" in measured_seeds(config(path), "cpu")
    assert not caplog.records
    on_gpu = measured_seeds(config(path), "cuda")
    assert set(on_gpu) == {"nvme>dram", "dram>nvme"}
    assert "for an engine on cpu, not cuda" in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"paths": ["/mnt/b/kv"]}, "its paths was /mnt/a/kv, and is /mnt/b/kv"),
        ({"io": "uring"}, "its io was auto, and is uring"),
        ({"name": "disk"}, "tier disk: it was not measured"),
    ],
)
def test_a_tier_that_is_another_medium_keeps_its_built_in_seeds(write, caplog, changes, why):
    with caplog.at_level(logging.WARNING):
        seeds = measured_seeds(config(write(), **changes))
    assert set(seeds) == {"dram>hbm"}
    assert why in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no calibration"),
        ('{"format": "kvtiers-calibration", "version": 2}', "is of version 2, this kvtiers reads"),
        ('{"format": "kvtiers-calibration", "version": 1}', "fits: Field required"),
    ],
)
def test_a_file_that_is_none_stops_the_start_and_names_the_remedy(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.calibration: .*kvtiers probe") as caught:
        measured_seeds(config(path))
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="no such file"):
        measured_seeds(config(tmp_path / "none.json"))


def test_a_negative_term_is_named(write):
    plain = calibration().to_plain()["fits"]
    plain["nvme>dram"]["latency_seconds"] = -1.0
    with pytest.raises(ConfigError, match=r"fits\.nvme>dram\.latency_seconds"):
        measured_seeds(config(write(fits=plain)))


def test_what_a_later_program_adds_is_passed_over(write):
    assert measured_seeds(config(write(colour="blue")))


def test_a_fit_finds_the_terms_and_says_how_good_it_is():
    truth = LinkModel(3e-4, 2e-5, 0.5e9)
    cells = [
        Cell(
            link="nvme>dram",
            num_blocks=num,
            nbytes=num * size,
            seconds=(float(truth.seconds(num, num * size)),) * 3,
        )
        for num in (1, 4, 16, 64)
        for size in (MIB // 8, MIB, 4 * MIB)
    ]
    found = fit_links(cells, {"nvme>dram": LinkSeed(1e-3, 1e-4, 5e9)})["nvme>dram"]
    assert found.num_jobs == 36
    assert found.median_error < 0.01
    assert found.bandwidth_bytes_per_second == pytest.approx(0.5e9, rel=0.02)
    assert found.latency_seconds == pytest.approx(3e-4, rel=0.05)


def test_machine_is_told_by_the_kernels_files(tmp_path):
    gpu = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\n")
    found = machine_facts(tmp_path)
    assert (found.cpu, found.gpus) == ("AMD EPYC 9654", ("NVIDIA H100 80GB HBM3",))
    assert machine_facts(tmp_path / "none").cpu == ""
