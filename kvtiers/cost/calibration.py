"""The calibration file: what the links of one machine were measured to take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtiers.cost.links import LinkModel, LinkSeed
from kvtiers.model.errors import ConfigError
from kvtiers.model.messages import Link

FORMAT: Final = "kvtiers-calibration"
VERSION: Final = 1
_REMEDY: Final = "measure with `kvtiers probe --out FILE`, or write null"


class _Part(BaseModel):
    """A mapping of the file; what a later program adds to it is passed over."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class MachineFacts(_Part):
    """What tells machines apart.

    Attributes:
        cpu: its model, as the kernel names it; "" if it does not say.
        gpus: models of all GPUs, in the driver's order.
        num_cores: that the measuring process could use.
    """

    cpu: str
    gpus: Annotated[tuple[str, ...], Field(strict=False)] = ()
    num_cores: int = 0


class TierFacts(_Part):
    """Which medium was measured under a tier's name.

    Attributes:
        kind: as in the configuration. paths: folders of the tier, beside which it was measured.
        filesystem: of the first one. io, direct: how it was opened; "" where that means nothing.
    """

    kind: str
    paths: Annotated[tuple[str, ...], Field(strict=False)] = ()
    filesystem: str = ""
    io: str = ""
    direct: str = ""


class Cell(_Part):
    """Jobs of one link that were alike.

    Attributes:
        num_blocks: of each job, ordered at once. nbytes: of all its blocks.
        seconds: of each job, in the order measured.
    """

    link: str
    num_blocks: Annotated[int, Field(ge=1)]
    nbytes: Annotated[int, Field(ge=1)]
    seconds: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False)]

    @property
    def median_seconds(self) -> float:
        """Of one job."""
        return float(np.median(self.seconds))

    @property
    def bytes_per_second(self) -> float:
        """Of the median job."""
        return self.nbytes / self.median_seconds


class LinkFit(_Part):
    """One link's terms, and how well they explain its jobs.

    Attributes:
        median_error: of ``|predicted - measured| / measured``. num_jobs: fitted to.
    """

    latency_seconds: Annotated[float, Field(ge=0)]
    seconds_per_piece: Annotated[float, Field(ge=0)]
    bandwidth_bytes_per_second: Annotated[float, Field(gt=0)]
    median_error: float = 0.0
    num_jobs: int = 0

    @property
    def seed(self) -> LinkSeed:
        """What a link's model starts from."""
        return LinkSeed(
            self.latency_seconds, self.seconds_per_piece, self.bandwidth_bytes_per_second
        )


class Calibration(_Part):
    """One measurement of a machine.

    Attributes:
        date: in UTC, ISO 8601. kvtiers: the version that measured.
        device: what the way to HBM was measured for, "cpu" or "cuda".
        tiers: store name to medium. fits: link name to terms. cells: all measurements.
    """

    format: Literal["kvtiers-calibration"] = FORMAT
    version: Literal[1] = VERSION
    date: str
    kvtiers: str
    device: str
    machine: MachineFacts
    tiers: dict[str, TierFacts]
    fits: dict[str, LinkFit]
    cells: Annotated[tuple[Cell, ...], Field(strict=False)] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return self.model_dump(mode="json")


def fit_links(cells: Sequence[Cell], seeds: Mapping[str, LinkSeed]) -> dict[str, LinkFit]:
    """Return the terms of every link that was measured.

    Args:
        seeds: link name to what is believed of it; it settles what the cells say nothing about.
    """
    return {
        name: _fit([cell for cell in cells if cell.link == name], seeds[name])
        for name in dict.fromkeys(cell.link for cell in cells)
    }


def _fit(cells: Sequence[Cell], seed: LinkSeed) -> LinkFit:
    model = LinkModel.of(seed)
    jobs = [
        Link(cell.link, cell.num_blocks, cell.nbytes, seconds)
        for cell in cells
        for seconds in cell.seconds
    ]
    model.fit(jobs)
    errors = [
        abs(float(model.seconds(job.num_blocks, job.nbytes)) - job.seconds) / job.seconds
        for job in jobs
    ]
    return LinkFit(
        latency_seconds=model.latency_seconds,
        seconds_per_piece=model.seconds_per_piece,
        bandwidth_bytes_per_second=model.bandwidth_bytes_per_second,
        median_error=float(np.median(errors)),
        num_jobs=len(jobs),
    )


def load_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    Raises:
        ConfigError: it cannot be read, is none, or of another version; says what, and the remedy.
    """
    where = f"cost.calibration: {path}"
    try:
        plain = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file; {_REMEDY}") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}); {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON ({error}); {_REMEDY}") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ConfigError(f"{where}: is no calibration: no 'format' of {FORMAT!r}; {_REMEDY}")
    if plain.get("version") != VERSION:
        raise ConfigError(
            f"{where}: is of version {plain.get('version')!r}, this kvtiers reads {VERSION}; "
            f"{_REMEDY}"
        )
    try:
        return Calibration.model_validate(plain)
    except ValidationError as error:
        lines = [
            f"{where}: {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}; {_REMEDY}"
            for fault in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from error
