"""Figures of devices and media, and the speeds and link seeds that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvtiers.cost.links import (
    LinkModel,
    Links,
    LinkSeed,
    offload_link,
    read_link,
    reload_link,
    write_link,
)
from kvtiers.cost.prefill import ModelShape, PrefillModel, PrefillSpeed
from kvtiers.model.errors import ConfigError

WEIGHT_NBYTES: Final[Mapping[str, float]] = MappingProxyType({"fp32": 4, "bf16": 2, "fp8": 1})
# Orders of magnitude, for devices without figures: one CPU core with AVX-512 and its memory, and a
# fast GPU at half its peak.
_ROUGH_FLOPS: Final = {"cpu": 1e11, "cuda": 4e14}
_ROUGH_MEMORY_BANDWIDTH: Final = {"cpu": 1.2e10, "cuda": 2e12}  # bytes per second


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and its way to the host.

    Attributes:
        title: for reports.
        peak_flops: dense operations per second, by data type of the weights.
        matmul_efficiency: share of the peak that large matrix products reach, by data type.
        attention_dtype: data type of attention, whatever the weights have.
        attention_efficiency: share of that peak that attention reaches.
        memory_nbytes: of the accelerator. memory_bandwidth: bytes per second.
        host_bandwidth: bytes per second between host and accelerator, one way, as measured.
        seconds_per_copy: of one copy call beside its bytes.
        peer_bandwidth: bytes per second between ranks, one way.
        step_seconds: of an engine step beside reading weights and multiplying.
    """

    title: str
    peak_flops: Mapping[str, Figure]
    matmul_efficiency: Mapping[str, Figure]
    attention_dtype: str
    attention_efficiency: Figure
    memory_nbytes: Figure
    memory_bandwidth: Figure
    host_bandwidth: Figure
    seconds_per_copy: Figure
    peer_bandwidth: Figure
    step_seconds: Figure

    def speed(
        self, shape: ModelShape, dtype: str = "bf16", tensor_parallel_size: int = 1
    ) -> PrefillSpeed:
        """Return the speed of an engine with a model on `tensor_parallel_size` of these devices.

        Between ranks, every layer sums twice over all of them: a ring sends
        ``2 (ranks - 1) / ranks`` of a token's hidden state (2 bytes an element).

        Raises:
            ConfigError: there is no figure for that data type.
        """
        if dtype not in self.peak_flops:
            known = ", ".join(sorted(self.peak_flops))
            raise ConfigError(f"{self.title} has no figure for {dtype!r}; known: {known}")
        ranks = tensor_parallel_size
        efficiency = self.matmul_efficiency.get(dtype) or next(
            iter(self.matmul_efficiency.values())
        )
        matmul = ranks * self.peak_flops[dtype].value * efficiency.value
        exchanged = 2 * shape.num_layers * 2 * (ranks - 1) / ranks * 2 * shape.hidden_size
        per_token = float(shape.linear_flops(1))
        seconds = per_token / matmul + exchanged / self.peer_bandwidth.value
        attention = self.peak_flops[self.attention_dtype].value * self.attention_efficiency.value
        return PrefillSpeed(
            step_seconds=self.step_seconds.value,
            flops_per_second=per_token / seconds,
            attention_flops_per_second=ranks * attention,
            flops_per_byte=per_token / seconds / (ranks * self.memory_bandwidth.value),
            weight_element_nbytes=WEIGHT_NBYTES[dtype],
            # Ranks divide KV heads among them; what has none, each of them reads whole.
            kv_bytes_per_second=(ranks if shape.num_kv_heads else 1) * self.memory_bandwidth.value,
        )

    def prefill(
        self,
        shape: ModelShape,
        max_tokens_per_step: int,
        dtype: str = "bf16",
        tensor_parallel_size: int = 1,
    ) -> PrefillModel:
        """Return the prefill model of such an engine; see `speed`."""
        speed = self.speed(shape, dtype, tensor_parallel_size)
        return PrefillModel.of(speed, shape, max_tokens_per_step)


@dataclass(frozen=True, slots=True)
class Storage:
    """One medium below DRAM.

    Attributes:
        title: for reports.
        read_bandwidth, write_bandwidth: bytes per second of large pieces.
        latency_seconds: of one job, however small.
        seconds_per_piece: of one block beside its bytes.
    """

    title: str
    read_bandwidth: Figure
    write_bandwidth: Figure
    latency_seconds: Figure
    seconds_per_piece: Figure


def rough_speed(
    device: str, step_seconds: float, num_ranks: int = 1, kv_element_nbytes: float = 2.0
) -> PrefillSpeed:
    """Return the speed of an engine on a device without figures, until its steps are measured.

    Args:
        device: "cpu" or "cuda"; any other is taken for a GPU. step_seconds: of a step beside its
            operations. num_ranks: devices of one engine.
    """
    known = device if device in _ROUGH_FLOPS else "cuda"
    return PrefillSpeed(
        step_seconds,
        _ROUGH_FLOPS[known] * num_ranks,
        kv_bytes_per_second=_ROUGH_MEMORY_BANDWIDTH[known] * num_ranks,
        kv_element_nbytes=kv_element_nbytes,
    )


def catalogued_seeds(
    hardware: Hardware,
    stores: Mapping[str, Storage],
    copies_per_block: int = 1,
    num_ranks: int = 1,
) -> dict[str, LinkSeed]:
    """Return the seeds of all links of a machine of the catalogue, by link name.

    Args:
        stores: by name. copies_per_block: copy calls that HBM needs for one block.
        num_ranks: that share each store; every rank has a way to the host of its own.
    """
    per_copy = hardware.seconds_per_copy.value
    host = LinkSeed(per_copy, copies_per_block * per_copy, hardware.host_bandwidth.value)
    seeds = {offload_link(): host, reload_link(): host}
    for name, storage in stores.items():
        fixed = (storage.latency_seconds.value, storage.seconds_per_piece.value)
        seeds[read_link(name)] = LinkSeed(*fixed, storage.read_bandwidth.value / num_ranks)
        seeds[write_link(name)] = LinkSeed(*fixed, storage.write_bandwidth.value / num_ranks)
    return seeds


def catalogued_links(
    hardware: Hardware,
    stores: Mapping[str, Storage],
    copies_per_block: int = 1,
    num_ranks: int = 1,
) -> Links:
    """Return the links of a machine of the catalogue; see `catalogued_seeds`.

    Args:
        stores: by name, in the order of `Transfer.stores`.
    """
    seeds = catalogued_seeds(hardware, stores, copies_per_block, num_ranks)
    return Links(tuple(stores), {name: LinkModel.of(seed) for name, seed in seeds.items()})
