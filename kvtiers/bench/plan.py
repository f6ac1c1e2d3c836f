"""What a measured comparison of recompute and reload runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvtiers.cost.model_source import read_model_config
from kvtiers.data.host_memory import available_memory
from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.model.errors import ConfigError
from kvtiers.model.frame import ALIGNMENT, round_up, slot_nbytes_of
from kvtiers.model.units import format_size

SMALL: Final = "small"
RECOMPUTE: Final = "recompute"
DRAM: Final = "dram"
NVME: Final = "nvme"
LMDB: Final = "lmdb"
DEVICES: Final = ("cpu", "cuda")
TIERS: Final = (DRAM, NVME, LMDB)
DEFAULT_LENGTHS: Final = (256, 512, 1024, 2048, 4096)
STAGING_SLOTS: Final = 64  # of a slab that shall keep nothing: what one job stages through
MIB: Final = 2**20

# A second of a CPU core computes a few thousand tokens of it, and attention is no small part.
_SMALL_MODEL: Final = {
    "num_hidden_layers": 8,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 1024,
    "vocab_size": 2048,
}
_MAX_VOCABULARY: Final = 8192  # of a model that is cut down; only a prompt's last token needs it


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A model, prompts, tiers and bounds.

    Attributes:
        lengths: tokens of the prompts, ascending. Every second one, from the first on, is fitted
            to; the others judge.
        num_repeats: of every measurement; medians count.
        throttle: bytes per second that stores below DRAM are slowed down to; None: as they are.
        balanced: whether the throttle is found at the start: so that the middle length takes as
            long to load as to compute.
        num_threads: of torch on the CPU. num_stages: layer ranges of overlapped loads.
        max_seconds: after which no new measurement begins. max_disk_nbytes: of the stores.
    """

    model_name: str
    shape: ReferenceShape
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    num_repeats: int = 5
    tiers: tuple[str, ...] = TIERS
    throttle: float | None = None
    balanced: bool = False
    block_size: int = 32
    max_tokens_per_step: int = 8192
    num_stages: int = 8
    num_threads: int = 1
    device: str = "cpu"
    max_seconds: float = 600.0
    max_disk_nbytes: int = 4 * 2**30
    seed: int = field(default=0)

    def __post_init__(self) -> None:
        if len(self.lengths) < 3 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(
                f"lengths {self.lengths}: give at least three, ascending: two are fitted to, one "
                "judges"
            )
        if self.lengths[0] <= self.block_size:
            raise ConfigError(f"length {self.lengths[0]} is not more than a block, nothing is kept")
        if self.num_repeats < 1 or not self.max_seconds > 0:
            raise ConfigError("at least one repeat, and some seconds, are needed")
        unknown = set(self.tiers) - set(TIERS)
        if unknown or DRAM not in self.tiers:
            below = ", ".join(name for name in TIERS if name != DRAM)
            given = ", ".join(map(repr, self.tiers))
            raise ConfigError(f"tiers {given}: {DRAM} is always measured, below it any of {below}")
        if self.throttle is not None and not self.throttle > 0:
            raise ConfigError(f"a throttle of {self.throttle} bytes/s; must be > 0")
        if self.device not in DEVICES:
            raise ConfigError(f"no device {self.device!r}; known: {', '.join(DEVICES)}")
        if not 1 <= self.num_stages <= self.shape.num_layers:
            raise ConfigError(
                f"{self.num_stages} stages; must be 1 to the {self.shape.num_layers} layers"
            )
        self._check_room()

    @property
    def block_nbytes(self) -> int:
        """Payload bytes of one block."""
        return self.block_size * self.shape.kv_nbytes_per_token

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest prompt."""
        return -(-self.lengths[-1] // self.block_size)

    @property
    def stores(self) -> tuple[str, ...]:
        """The tiers on disk."""
        return tuple(tier for tier in self.tiers if tier != DRAM)

    @property
    def fitted_lengths(self) -> tuple[int, ...]:
        """The lengths that the model is calibrated on; it is judged by the others."""
        return self.lengths[::2]

    @property
    def middle_length(self) -> int:
        """The length that `balanced` is about."""
        return self.lengths[len(self.lengths) // 2]

    def slots_nbytes(self, num_slots: int, num_groups: int = 1) -> int:
        """Return a capacity that holds so many slots of a group's frames, in whole MiB."""
        slot = slot_nbytes_of(-(-self.block_nbytes // num_groups)) + ALIGNMENT
        return round_up(num_slots * slot, MIB)

    @property
    def store_nbytes(self) -> int:
        """Capacity of each store: the longest prompt, once."""
        return self.slots_nbytes(self.num_blocks + 2) + 2 * MIB

    @property
    def split_store_nbytes(self) -> int:
        """Capacity of the store of layer ranges."""
        stages = self.num_stages
        return self.slots_nbytes((self.num_blocks + 2) * stages, stages) + 2 * MIB

    @property
    def disk_nbytes(self) -> int:
        """Bytes on disk at most; LMDB's file takes up to a quarter more than its frames."""
        per_store = {NVME: 1.0, LMDB: 1.25}
        total = sum(self.store_nbytes * per_store[store] for store in self.stores)
        return int(total) + (self.split_store_nbytes if self.stores else 0)

    @property
    def memory_nbytes(self) -> int:
        """Bytes of host memory at most: weights, the KV of each engine, the largest slabs."""
        kv = self.num_blocks * self.block_nbytes
        return self.shape.num_params * self.shape.itemsize + (len(self.tiers) + 4) * kv + 512 * MIB

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON, by which results of equal plans are told."""
        return dict(json.loads(json.dumps(asdict(self))))

    def _check_room(self) -> None:
        if self.disk_nbytes > self.max_disk_nbytes:
            raise ConfigError(
                f"prompts of {self.lengths[-1]} tokens need {format_size(self.disk_nbytes)} of "
                f"disk, {format_size(self.max_disk_nbytes)} are allowed; give shorter lengths, "
                "fewer layers, or more room"
            )
        available = available_memory()
        if available is not None and self.memory_nbytes > available.nbytes:
            raise ConfigError(
                f"{self.model_name} with prompts of {self.lengths[-1]} tokens needs about "
                f"{format_size(round_up(self.memory_nbytes, MIB))} of memory, {available.bound} "
                f"leaves {format_size(available.nbytes)}; cut it down with fewer layers or a "
                "smaller hidden size"
            )


def load_reference_shape(
    model: str, num_layers: int | None = None, hidden_size: int | None = None, dtype: str = ""
) -> ReferenceShape:
    """Return the shape of a model by name or file, cut down where asked.

    Args:
        model: `SMALL`, a name that `known_model` knows, or a ``config.json`` or its folder.
        num_layers, hidden_size: of the smaller model; None keeps them. Heads keep their size,
            and the feed-forward block its ratio.
        dtype: of weights and KV; "" as configured.

    Raises:
        ConfigError: no such model, or one of a kind that the reference model is not.
    """
    config = {**_read_config(model)}
    if hidden_size is not None:
        _narrow(config, hidden_size)
    if num_layers is not None:
        config["num_hidden_layers"] = min(num_layers, int(config.get("num_hidden_layers") or 0))
    if num_layers is not None or hidden_size is not None:
        config["vocab_size"] = min(int(config.get("vocab_size") or 0), _MAX_VOCABULARY)
    if dtype:
        config["dtype"] = dtype
    return ReferenceShape.from_hf_config(config)


def _read_config(model: str) -> Mapping[str, Any]:
    if model == SMALL:
        return _SMALL_MODEL
    config, _source = read_model_config(model)
    text: Mapping[str, Any] = config.get("text_config", config)
    return text


def _narrow(config: dict[str, Any], hidden_size: int) -> None:
    """Make a configuration narrower in place."""
    whole = ReferenceShape.from_hf_config(config)
    if hidden_size < whole.head_size or hidden_size > whole.hidden_size:
        raise ConfigError(
            f"a hidden size of {hidden_size}; must be from {whole.head_size}, one head, to "
            f"{whole.hidden_size}, as the model has it"
        )
    share = hidden_size / whole.hidden_size
    queries_per_kv = whole.num_heads // whole.num_kv_heads
    kv_heads = max(1, round(whole.num_kv_heads * share))
    config.update(
        hidden_size=hidden_size,
        head_dim=whole.head_size,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * queries_per_kv,
        intermediate_size=max(64, round(whole.intermediate_size * share / 64) * 64),
    )
