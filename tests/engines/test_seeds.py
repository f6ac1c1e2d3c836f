"""What is believed of an engine's speed before its steps are measured."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvtiers.cost.catalogue import HARDWARE
from kvtiers.cost.prefill import FALLBACK_SHAPE
from kvtiers.engines.vllm import seeds
from kvtiers.engines.vllm.identity import engine_shape
from kvtiers.engines.vllm.seeds import engine_hardware, seed_link, seed_speed

from .fakes import full, kv_cache_config, vllm_config


@pytest.fixture
def device(monkeypatch):
    """Let this process see a device."""

    class Platform:
        name = "NVIDIA H100 80GB HBM3"

        def get_device_name(self) -> str:
            return self.name

    platform = Platform()
    monkeypatch.setattr(seeds, "current_platform", platform)
    return platform


def test_known_gpu_has_the_figures_of_the_catalogue(device):
    assert engine_hardware("cuda") is HARDWARE["h100"]
    config = vllm_config(device_config__device_type="cuda")
    shape = engine_shape(config, kv_cache_config(full()))
    assert shape.seed_speed == HARDWARE["h100"].speed(shape.model)
    assert shape.seed_link.bandwidth_bytes_per_second == HARDWARE["h100"].host_bandwidth.value
    assert shape.seed_link.seconds_per_piece == 2 * HARDWARE["h100"].seconds_per_copy.value


def test_ranks_and_weights_of_8_bits_make_it_faster(device):
    config = vllm_config(device_config__device_type="cuda")
    eight_bits = vllm_config(
        device_config__device_type="cuda",
        model_config__quantization="fp8",
        parallel_config__tensor_parallel_size=2,
    )
    hardware = engine_hardware("cuda")
    one = seed_speed(config, FALLBACK_SHAPE, hardware)
    two = seed_speed(eight_bits, FALLBACK_SHAPE, hardware)
    assert two.flops_per_second > 2 * one.flops_per_second
    assert two.weight_element_nbytes == 1


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Some other device"])
def test_gpu_without_figures_starts_from_a_guess_and_learns(device, name):
    device.name = name
    config = vllm_config(device_config__device_type="cuda")
    shape = engine_shape(config, kv_cache_config(full()))
    assert shape.seed_speed.flops_per_second == 4e14
    assert shape.seed_link is None


def test_cpu_has_a_seed_of_its_own():
    shape = engine_shape(vllm_config(), kv_cache_config(full()))
    assert shape.seed_speed.flops_per_second == 1e11
    assert shape.seed_link == seed_link("cpu", None, 2)
    assert shape.seed_link.bandwidth_bytes_per_second == 12e9
