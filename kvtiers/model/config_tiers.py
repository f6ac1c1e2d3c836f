"""The tiers of the configuration: one model per kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from kvtiers.model.config_values import Budget, Capacity, Instance, Name, Paths, StorePath, as_tuple


class Section(BaseModel):
    """A mapping of the file: strict, complete, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class DramTier(Section):
    """The slab: pinned host memory, the only place where blocks land. First and once."""

    kind: Literal["dram"] = Field(description="`dram`.", examples=["dram"])
    capacity: Capacity = Field(
        description="Bytes of the slab, of one engine, divided over its ranks.",
        examples=["64GiB"],
    )
    pin: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Page-lock the slab for DMA. `auto`: where a GPU is present, and fall back; "
        "`on`: fail at start where that is impossible.",
    )
    high_watermark: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="Share of the slots in use above which blocks are written to `write: back` "
        "stores, ahead of need. Without such a store the slab simply fills up.",
    )
    low_watermark: float = Field(
        default=0.90,
        gt=0,
        le=1,
        validate_default=True,
        description="Share of the slots in use at which that stops; at most `high_watermark`.",
    )

    @field_validator("low_watermark")
    @classmethod
    def _low_is_not_above_high(cls, low: float, info: ValidationInfo) -> float:
        high = info.data.get("high_watermark")
        if high is not None and low > high:
            raise ValueError(
                f"{low:g} is above high_watermark {high:g}; write 'low_watermark: {high:g}' or less"
            )
        return low


# What every kind of store has.
Write = Annotated[
    Literal["through", "back"],
    Field(
        description="`through`: a block is stored as it is offloaded; `back`: before "
        "it leaves the slab."
    ),
]
Admit = Annotated[
    Literal["always", "second_touch", "cost"],
    Field(
        description="Which blocks are worth a write: all; those offered to the store a second "
        "time (`through`: offloaded again; `back`: leaving the slab again); or, by `cost`, those "
        "whose reload is expected to save more time than the write takes."
    ),
]


class MemoryTier(Section):
    """Unpinned host memory below the slab: the in-memory reference store."""

    kind: Literal["memory"] = Field(description="`memory`.", examples=["memory"])
    name: Name = Field(
        default="memory",
        description="Name of the store in metrics and decisions; unique.",
        examples=["memory2"],
    )
    capacity: Capacity = Field(
        description="Bytes of the store, of one engine, divided over its ranks.",
        examples=["64GiB"],
    )
    write: Write = "through"
    admit: Admit = "always"


class NvmeTier(Section):
    """Files of fixed slots on local disks, found again after a restart. One engine's own."""

    kind: Literal["nvme"] = Field(description="`nvme`.", examples=["nvme"])
    name: Name = Field(
        default="nvme",
        description="Name of the store in metrics and decisions; unique.",
        examples=["nvme2"],
    )
    paths: Annotated[Paths, BeforeValidator(as_tuple)] = Field(
        description="Folders to stripe over, best one per disk; made where missing.",
        examples=[["/mnt/nvme0/kvtiers"]],
    )
    capacity: Capacity = Field(
        description="Bytes on disk over all paths, of one engine, divided over its ranks: a hard "
        "bound, allocated at start.",
        examples=["1TiB"],
    )
    write: Write = "through"
    admit: Admit = "always"
    write_budget: Budget = Field(
        default=None,
        description="Bytes that may be written in any 24 hours, of one engine, divided over its "
        "ranks, to spare the disk; `null`: any number. What is beyond is not stored.",
        examples=["500GiB"],
    )
    io: Literal["auto", "native", "uring", "aiofiles"] = Field(
        default="auto",
        description="I/O engine. `native`: a pool of C++ threads; `uring`: io_uring; `aiofiles`: "
        "portable, and slow beside a busy engine; `auto`: `native` where it was built, else "
        "`aiofiles`.",
    )
    direct: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="By-pass the page cache (O_DIRECT). `auto`: where the file system allows; "
        "`on`: fail at start where it does not.",
    )
    instance: Instance = Field(
        default=None,
        description="Folder of this engine below each path, so that a restart finds its own; "
        "`null`: the engine's data-parallel index.",
        examples=["replica-0"],
    )


class LmdbTier(Section):
    """One LMDB environment that all engines of a host share."""

    kind: Literal["lmdb"] = Field(description="`lmdb`.", examples=["lmdb"])
    name: Name = Field(
        default="lmdb",
        description="Name of the store in metrics and decisions; unique.",
        examples=["lmdb2"],
    )
    path: StorePath = Field(
        description="Folder of the environment, the same for all engines that share it; made where "
        "missing.",
        examples=["/mnt/nvme0/shared.lmdb"],
    )
    capacity: Capacity = Field(
        description="Bytes of all frames of all engines; whoever makes the store decides. The file "
        "takes up to a quarter more.",
        examples=["200GiB"],
    )
    write: Write = "through"
    admit: Admit = "always"


StoreTier = MemoryTier | NvmeTier | LmdbTier
Tier = Annotated[DramTier | StoreTier, Field(discriminator="kind")]
