"""Seeds of a vLLM engine's speed and of its link to HBM, until they are measured."""

from __future__ import annotations

import logging
from typing import Any, Final

from vllm.platforms import current_platform

from kvtiers.cost.catalogue import hardware_of_driver
from kvtiers.cost.hardware import Hardware, rough_speed
from kvtiers.cost.links import LinkSeed
from kvtiers.cost.prefill import FALLBACK_SHAPE, ModelShape, PrefillSpeed

logger = logging.getLogger(__name__)

_FP8_METHODS: Final = ("fp8", "fbgemm_fp8", "modelopt")
_STEP_SECONDS: Final = 0.005  # launch and sampling of a step, an order of magnitude
# memcpy on one core, 12 GB/s: measured on a 2-core EPYC VM, November 2026.
_MEMCPY: Final = LinkSeed(20e-6, 5e-6, 12e9)


def engine_hardware(device: str) -> Hardware | None:
    """Return the figures of the device that this process sees; None where there are none."""
    if device != "cuda":
        return None
    name = str(current_platform.get_device_name())
    hardware = hardware_of_driver(name)
    if hardware is None:
        logger.info("cost model: no figures for %r; its steps will tell", name)
    return hardware


def seed_speed(
    vllm_config: Any, shape: ModelShape | None, hardware: Hardware | None
) -> PrefillSpeed:
    """Return the speed of an engine with a model, on catalogued hardware or any other."""
    num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if hardware is None:
        return rough_speed(vllm_config.device_config.device_type, _STEP_SECONDS, num_ranks)
    quantized = vllm_config.model_config.quantization in _FP8_METHODS
    dtype = "fp8" if quantized and "fp8" in hardware.peak_flops else "bf16"
    return hardware.speed(shape or FALLBACK_SHAPE, dtype, num_ranks)


def seed_link(device: str, hardware: Hardware | None, num_layers: int) -> LinkSeed | None:
    """Return the way between slab and HBM; None where only the default is known.

    Args:
        num_layers: copies that one block needs.
    """
    if hardware is None:
        return _MEMCPY if device == "cpu" else None
    copy = hardware.seconds_per_copy.value
    return LinkSeed(copy, num_layers * copy, hardware.host_bandwidth.value)
