"""The time that bytes need on the links between HBM, the slab and the stores."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.cost.learning import LearnedSum
from kvtiers.cost.trust import Standing, Trust
from kvtiers.model.messages import DRAM, HBM, Link

logger = logging.getLogger(__name__)

Float64s = npt.NDArray[np.float64]

_SEED_JOBS: Final = 5  # until then a link has no best of its own: its seed may be far too fast
_GOOD_TRIAL: Final = 4.0  # times what a link took at its best; stalls take a hundred times as long


class StoreKind(StrEnum):
    """Kinds of stores, each with seeds of its own."""

    MEMORY = "memory"  # host memory, for tests and as a fake
    NVME = "nvme"  # files on a local disk
    LMDB = "lmdb"  # one memory-mapped file
    OTHER = "other"  # anything else, such as a store over the network


@dataclass(frozen=True, slots=True)
class LinkSeed:
    """What is believed of a link before it is measured.

    Attributes:
        latency_seconds: of one job, however small.
        seconds_per_piece: of one piece beside its bytes: a system call, a DMA descriptor.
        bandwidth_bytes_per_second: of large copies; may be infinite.
    """

    latency_seconds: float
    seconds_per_piece: float
    bandwidth_bytes_per_second: float


# PCIe 5 x16 with pinned memory: 50 to 54 GB/s one way, about 4 us a copy call (H100, published).
HBM_SEED: Final = LinkSeed(50e-6, 4e-6, 50e9)
# Latencies are orders of magnitude. Bandwidths were measured on a 2-core EPYC VM, November 2026:
# memcpy on one core 12 GB/s; O_DIRECT disk, 2 MiB, depth 16 2.4 read and 4.6 written; LMDB
# 1.9 read cold, 0.34 written and synced.
STORE_READ_SEEDS: Final[Mapping[StoreKind, LinkSeed]] = {
    StoreKind.MEMORY: LinkSeed(20e-6, 5e-6, 12e9),
    StoreKind.NVME: LinkSeed(200e-6, 20e-6, 2.4e9),
    StoreKind.LMDB: LinkSeed(200e-6, 20e-6, 1.9e9),
    StoreKind.OTHER: LinkSeed(1e-3, 100e-6, 1e9),
}
STORE_WRITE_SEEDS: Final[Mapping[StoreKind, LinkSeed]] = {
    StoreKind.MEMORY: LinkSeed(20e-6, 5e-6, 12e9),
    StoreKind.NVME: LinkSeed(200e-6, 20e-6, 4.6e9),
    StoreKind.LMDB: LinkSeed(5e-3, 20e-6, 0.34e9),
    StoreKind.OTHER: LinkSeed(1e-3, 100e-6, 1e9),
}


def built_in_seeds(
    stores: Mapping[str, StoreKind], hbm: LinkSeed = HBM_SEED
) -> dict[str, LinkSeed]:
    """Return the seeds of all links of a machine that was not measured, by link name.

    Args:
        stores: store name to kind.
        hbm: the way between slab and HBM, either way; a piece is all that one block consists of.
    """
    seeds = {offload_link(): hbm, reload_link(): hbm}
    for store, kind in stores.items():
        seeds[read_link(store)] = STORE_READ_SEEDS[kind]
        seeds[write_link(store)] = STORE_WRITE_SEEDS[kind]
    return seeds


class LinkModel:
    """Predict ``latency + pieces * seconds_per_piece + bytes / bandwidth`` of a job and its queue.

    The arguments are seeds, corrected by `observe`; a seed of 0 (or an infinite bandwidth) says
    that the term does not exist, and is not learnt. A block counts as one piece: a link that cuts
    blocks up has a larger ``seconds_per_piece``. Small pieces and few at a time make less of the
    bandwidth: see `effective_bandwidth`.
    """

    def __init__(
        self,
        latency_seconds: float,
        seconds_per_piece: float,
        bandwidth_bytes_per_second: float,
    ) -> None:
        if not bandwidth_bytes_per_second > 0:
            raise ValueError(f"bandwidth {bandwidth_bytes_per_second} bytes/s is not positive")
        self._cost = LearnedSum(
            (latency_seconds, seconds_per_piece, 1.0 / bandwidth_bytes_per_second)
        )
        self._at_best = self._cost.coefficients
        self._last_job: tuple[float, float, float] | None = None

    @classmethod
    def of(cls, seed: LinkSeed) -> LinkModel:
        """Return the model of a link that nothing was measured of."""
        return cls(seed.latency_seconds, seed.seconds_per_piece, seed.bandwidth_bytes_per_second)

    @property
    def latency_seconds(self) -> float:
        """Of one job, as known now."""
        return self._cost.coefficients[0]

    @property
    def seconds_per_piece(self) -> float:
        """Of one piece beside its bytes, as known now."""
        return self._cost.coefficients[1]

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """Of large copies, as known now."""
        seconds_per_byte = self._cost.coefficients[2]
        return 1.0 / seconds_per_byte if seconds_per_byte > 0 else math.inf

    @property
    def num_observed(self) -> int:
        """How many jobs were learnt from."""
        return self._cost.num_observed

    def seconds(
        self, num_blocks: npt.ArrayLike, nbytes: npt.ArrayLike, queued_nbytes: float = 0.0
    ) -> Float64s:
        """Return the predicted seconds until a job is done; 0 for a job of no blocks.

        What is queued ahead is taken to lie in pieces as large as those of the last measured job,
        since an engine's blocks are all alike: a queue of small ones takes longer than its bytes.

        Args:
            num_blocks: of the job, a number or an array. nbytes: of all its blocks; broadcasts.
            queued_nbytes: bytes ahead of it on the link.
        """
        blocks = np.asarray(num_blocks, dtype=np.float64)
        latency, per_piece, per_byte = self._cost.coefficients
        _, last_blocks, last_nbytes = self._last_job or (1.0, 0.0, 0.0)
        pieces = blocks + (queued_nbytes * last_blocks / last_nbytes if last_nbytes else 0.0)
        size = np.asarray(nbytes, dtype=np.float64) + queued_nbytes
        return np.where(blocks > 0, latency + pieces * per_piece + size * per_byte, 0.0)

    def effective_bandwidth(self, piece_nbytes: float, num_pieces: float = 1.0) -> float:
        """Return the bytes per second of jobs of `num_pieces` pieces each."""
        seconds = float(self.seconds(num_pieces, num_pieces * piece_nbytes))
        return num_pieces * piece_nbytes / seconds if seconds > 0 else math.inf

    def observe(self, num_blocks: int, nbytes: int, seconds: float) -> None:
        """Learn from one finished job; one without blocks is left out."""
        if num_blocks > 0 and nbytes >= 0:
            job = (1.0, float(num_blocks), float(nbytes))
            self._cost.observe(job, seconds)
            self._last_job = job
            self._remember_best()

    def seconds_at_best(self, num_blocks: int, nbytes: int) -> float:
        """Return the seconds of a job on an idle link that is as fast as it has been at best."""
        return _dot(self._at_best, (1.0, float(num_blocks), float(nbytes)))

    def hope(self) -> None:
        """Believe the link to be twice as fast, at most as fast as it has been at its best.

        For a link that was found slow and is avoided since: nothing is measured of it, and
        without hope nothing ever would be.
        """
        if self._last_job is not None:
            best = _dot(self._at_best, self._last_job) / self._cost.seconds(self._last_job)
            if best < 1.0:
                self._cost.scale(max(best, 0.5))

    def recovered(self, num_blocks: int, nbytes: int, seconds: float) -> None:
        """Scale the model to a job that shows that a stall is over; measurements of it are void."""
        predicted = float(self.seconds(num_blocks, nbytes))
        if 0 < seconds < predicted:
            self._cost.scale(seconds / predicted)

    def fit(self, jobs: Sequence[Link]) -> None:
        """Learn from many jobs at once, as of a calibration; see `LearnedSum.fit`."""
        moved = [job for job in jobs if job.num_blocks > 0]
        if moved:
            rows = [(1.0, float(job.num_blocks), float(job.nbytes)) for job in moved]
            self._cost.fit(rows, [job.seconds for job in moved])
            self._at_best = self._cost.coefficients

    def _remember_best(self) -> None:
        """Keep the coefficients with which the last job takes the least."""
        if self._last_job is not None:
            now = self._cost.coefficients
            seeded = self._cost.num_observed <= _SEED_JOBS
            if seeded or _dot(now, self._last_job) < _dot(self._at_best, self._last_job):
                self._at_best = now


class Links(Mapping[str, LinkModel]):
    """All links of a machine by name, as in `kvtiers.model.messages.Link`, with their queues.

    A link's queue is what was `submitted` and is not `done`; control keeps it up to date.

    Args:
        stores: names of the stores, in the order that `Transfer.stores` gives them.
        models: link name to model; at least ``"dram>hbm"`` and ``"STORE>dram"`` for each store.
    """

    def __init__(self, stores: Sequence[str], models: Mapping[str, LinkModel]) -> None:
        self.stores = tuple(stores)
        self._models = dict(models)
        self._queued = dict.fromkeys(self._models, 0)
        self._moved_seconds = dict.fromkeys(self._models, 0.0)
        self._trust = {name: Trust() for name in self._models}
        for name in (reload_link(), *map(read_link, self.stores)):
            if name not in self._models:
                raise ValueError(f"no model for link {name!r}, only for {sorted(self._models)}")

    @classmethod
    def seeded(
        cls,
        stores: Mapping[str, StoreKind],
        hbm: LinkSeed = HBM_SEED,
        measured: Mapping[str, LinkSeed] | None = None,
    ) -> Links:
        """Return the links of a machine on which no engine has moved anything yet.

        Args:
            stores: store name to kind, in the order of `Transfer.stores`. hbm: see
                `built_in_seeds`.
            measured: link name to the seeds of a calibration, which replace the built-in ones;
                links that this machine does not have are passed over.
        """
        seeds = built_in_seeds(stores, hbm)
        seeds |= {name: seed for name, seed in (measured or {}).items() if name in seeds}
        return cls(tuple(stores), {name: LinkModel.of(seed) for name, seed in seeds.items()})

    def __getitem__(self, name: str) -> LinkModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def observe(self, link: Link) -> None:
        """Learn from what one link did.

        A link that was not named at construction, as after a rank's restart with another
        configuration, gets a model of its own rather than stopping the engine.
        """
        model = self._models.get(link.name)
        if model is None:
            logger.warning("link %r was not configured; measuring it anyway", link.name)
            model = LinkModel.of(STORE_READ_SEEDS[StoreKind.OTHER])
            self._models[link.name] = model
            self._queued[link.name] = 0
            self._trust[link.name] = Trust()
        trust = self._trust[link.name]
        if trust.standing is Standing.ON_TRIAL and link.num_blocks > 0:
            well = model.seconds_at_best(link.num_blocks, link.nbytes) * _GOOD_TRIAL
            if link.seconds <= well:
                trust.regain()
                model.recovered(link.num_blocks, link.nbytes, link.seconds)
            else:
                trust.fail()
        model.observe(link.num_blocks, link.nbytes, link.seconds)

    def stalled(self, name: str, now: float) -> None:
        """Note that a job's deadline passed on a link: it is not used for a while.

        The wait doubles with every stall in a row, and ends with trials; see `Trust`. A trial is
        judged by the next job that is measured.
        """
        self._trust[name].lose(now)

    def revisit(self, now: float) -> None:
        """Let time pass: waits end, and links that nothing was measured of are hoped for again."""
        for name, model in self._models.items():
            if self._trust[name].pass_time(now, model.num_observed):
                model.hope()

    @property
    def standings(self) -> tuple[int, ...]:
        """What all links may be used for, to be compared: a plan is void once it changes."""
        return tuple(trust.standing.value for trust in self._trust.values())

    def standing(self, name: str) -> Standing:
        """Return what a link may be used for."""
        return self._trust[name].standing

    def moved(self, links: Sequence[Link]) -> None:
        """Add up for how long links were busy; learns nothing."""
        for link in links:
            self._moved_seconds[link.name] = self._moved_seconds.get(link.name, 0.0) + link.seconds

    @property
    def moved_seconds(self) -> Mapping[str, float]:
        """Link name to the seconds that it was busy so far, over all ranks; a copy."""
        return dict(self._moved_seconds)

    def submitted(self, name: str, nbytes: int) -> None:
        """Count bytes that were ordered on a link. Raises KeyError: no such link."""
        self._queued[name] += nbytes

    def done(self, name: str, nbytes: int) -> None:
        """Count ordered bytes that were copied, failed or were dropped; never below 0."""
        self._queued[name] = max(0, self._queued[name] - nbytes)

    def queued_nbytes(self, name: str) -> int:
        """Return the bytes that were submitted on a link and are not done."""
        return self._queued[name]

    def without_queues(self) -> Links:
        """Return the same links, the models shared, with nothing queued."""
        return Links(self.stores, self._models)


def _dot(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(c * x for c, x in zip(coefficients, features, strict=True))


def offload_link() -> str:
    """Return the name of the link from HBM to the slab."""
    return f"{HBM}>{DRAM}"


def reload_link() -> str:
    """Return the name of the link from the slab to HBM."""
    return f"{DRAM}>{HBM}"


def read_link(store: str) -> str:
    """Return the name of the link from a store to the slab."""
    return f"{store}>{DRAM}"


def write_link(store: str) -> str:
    """Return the name of the link from the slab to a store."""
    return f"{DRAM}>{store}"
