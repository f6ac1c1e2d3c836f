"""Promises of `kvtiers.cost.catalogue`: every figure has a source, and names are checked."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from kvtiers.cost.catalogue import (
    HARDWARE,
    STORAGE,
    hardware_of_driver,
    known_hardware,
    known_storage,
)
from kvtiers.cost.hardware import Figure, catalogued_links
from kvtiers.cost.known_models import known_model
from kvtiers.cost.links import read_link, reload_link, write_link
from kvtiers.model.errors import ConfigError

LLAMA_8B = known_model("llama-3.1-8b").shape
each_device = pytest.mark.parametrize("name", sorted(HARDWARE))
each_medium = pytest.mark.parametrize("name", sorted(STORAGE))


def figures(entry) -> list[Figure]:
    found = []
    for field in fields(entry):
        value = getattr(entry, field.name)
        values = value.values() if hasattr(value, "values") else [value]
        found += [v for v in values if is_dataclass(v)]
    return found


@each_device
def test_every_figure_of_a_device_is_positive_and_has_a_source(name):
    found = figures(HARDWARE[name])
    assert len(found) >= 9
    assert all(figure.value > 0 and len(figure.source) > 10 for figure in found)


@each_medium
def test_every_figure_of_a_medium_is_positive_and_has_a_source(name):
    found = figures(STORAGE[name])
    assert len(found) == 4
    assert all(figure.value > 0 and len(figure.source) > 10 for figure in found)


@each_device
def test_efficiencies_are_shares(name):
    entry = HARDWARE[name]
    shares = [*entry.matmul_efficiency.values(), entry.attention_efficiency]
    assert all(0.3 < share.value < 1 for share in shares)


def test_one_token_of_8b_takes_as_long_as_reading_its_weights():
    """4.5 ms on an H100 of 3.35 TB/s, and the step beside it."""
    prefill = HARDWARE["h100"].prefill(LLAMA_8B, 8192)
    read = 2 * (LLAMA_8B.linear_params + LLAMA_8B.head_params) / 3.35e12
    assert prefill.seconds(1) == pytest.approx(read + prefill.step_seconds, rel=1e-3)


def test_ranks_share_the_work_but_not_for_nothing():
    one, two, eight = (
        float(HARDWARE["h100"].prefill(LLAMA_8B, 8192, tensor_parallel_size=n).seconds(100_000))
        for n in (1, 2, 8)
    )
    assert one / 2 < two < one
    assert one / 8 < eight < two


def test_without_a_fast_link_between_ranks_more_of_them_gain_less():
    def gain(name: str) -> float:
        seconds = [
            float(HARDWARE[name].prefill(LLAMA_8B, 8192, tensor_parallel_size=n).seconds(8192))
            for n in (1, 4)
        ]
        return seconds[0] / seconds[1]

    assert gain("a100-pcie") < 0.6 * gain("a100")


def test_fp8_weights_are_read_and_multiplied_faster():
    bf16, fp8 = (HARDWARE["h100"].prefill(LLAMA_8B, 8192, dtype) for dtype in ("bf16", "fp8"))
    assert fp8.seconds(1) < 0.75 * bf16.seconds(1)
    assert fp8.seconds(8192) < 0.7 * bf16.seconds(8192)
    assert fp8.attention_flops_per_second == bf16.attention_flops_per_second


@pytest.mark.parametrize(("name", "dtype"), [("a100", "fp8"), ("epyc-9654", "bf16")])
def test_a_data_type_without_a_figure_is_refused(name, dtype):
    with pytest.raises(ConfigError, match=f"no figure for '{dtype}'; known: "):
        HARDWARE[name].speed(LLAMA_8B, dtype)


def test_links_on_paper_have_every_direction():
    links = catalogued_links(HARDWARE["h100"], {"disk": STORAGE["nvme-gen4"]}, copies_per_block=32)
    assert links.stores == ("disk",)
    assert links[read_link("disk")].bandwidth_bytes_per_second == pytest.approx(6.9e9)
    assert links[write_link("disk")].bandwidth_bytes_per_second == pytest.approx(4.1e9)
    assert links[reload_link()].seconds_per_piece == pytest.approx(32 * 4e-6)


def test_ranks_share_a_store_and_have_a_host_link_each():
    one, four = (
        catalogued_links(HARDWARE["h100"], {"disk": STORAGE["nvme-gen4"]}, num_ranks=n)
        for n in (1, 4)
    )
    disk, host = read_link("disk"), reload_link()
    shared = [links[disk].bandwidth_bytes_per_second for links in (one, four)]
    own = [links[host].bandwidth_bytes_per_second for links in (one, four)]
    assert shared[0] == pytest.approx(4 * shared[1])
    assert own[0] == own[1]


@pytest.mark.parametrize(
    ("known", "name", "hint"),
    [
        (known_hardware, "h10", "did you mean 'h100'"),
        (known_storage, "nvme-gen6", "did you mean 'nvme-gen"),
        (known_hardware, "abacus", "'abacus' is known. Known: a100, a100-pcie"),
    ],
)
def test_unknown_names_list_the_known_ones(known, name, hint):
    with pytest.raises(ConfigError) as refused:
        known(name)
    assert hint in str(refused.value)
    assert "Known: " in str(refused.value)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_the_driver_s_name_leads_to_the_figures(driver, name):
    assert hardware_of_driver(driver) is HARDWARE[name]


@pytest.mark.parametrize(
    "driver",
    ["NVIDIA GeForce RTX 3090", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)
def test_a_device_without_figures_is_not_guessed(driver):
    assert hardware_of_driver(driver) is None


def test_names_may_be_written_large():
    assert known_hardware("H100") is HARDWARE["h100"]
