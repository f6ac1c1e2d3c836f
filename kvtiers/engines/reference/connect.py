"""Puts kvtiers below the reference model's KV: both of its sides, in one process."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from kvtiers.connector.rank import RankFacts, WrapStore, build_host_rank, build_torch_rank
from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.shape import EngineShape
from kvtiers.connector.worker import WorkerConnector
from kvtiers.cost.hardware import rough_speed
from kvtiers.cost.shapes import model_shape
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.paged_kv import PagedKV
from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.model.config import Config
from kvtiers.model.fingerprint import Fingerprint, Scalar
from kvtiers.model.frame import VERSION
from kvtiers.model.keys import Rank
from kvtiers.model.layout import KVLayout

_SEED_STEP_SECONDS: Final = 0.001  # an order of magnitude, not measured


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine tells kvtiers of itself.

    Attributes:
        max_tokens_per_step: budget of a step.
        num_layer_ranges: KV groups that a block is cut into. instance: see `RankFacts`.
        wrap_store: see `build_host_rank`.
    """

    max_tokens_per_step: int
    num_layer_ranges: int = 1
    instance: str = "0"
    wrap_store: WrapStore | None = None


def connect(
    model: ReferenceModel, kv: PagedKV, config: Config, engine: EngineFacts
) -> tuple[SchedulerConnector, WorkerConnector]:
    """Return the scheduler's side and the copying side, connected.

    Raises:
        CapacityError, StoreError: a tier cannot be had.
    """
    device, layout = model.device.type, kv.layout(engine.num_layer_ranges)
    fingerprint = _fingerprint(model.shape, device, layout)
    facts = RankFacts(Rank(), 1, fingerprint, engine.instance)
    shape = EngineShape(
        block_size=kv.block_size,
        windows=(None,) * engine.num_layer_ranges,
        num_ranks=1,
        model=model_shape(model.shape.to_hf_config()),
        max_tokens_per_step=engine.max_tokens_per_step,
        seed_speed=rough_speed(device, _SEED_STEP_SECONDS, kv_element_nbytes=model.shape.itemsize),
        num_layer_ranges=engine.num_layer_ranges,
        instance=engine.instance,
    )
    if device == "cpu":
        worker = build_host_rank(config, layout, kv.addresses(), facts, engine.wrap_store)
    else:
        worker = build_torch_rank(config, layout, kv.flat(), facts, engine.wrap_store)
    with ExitStack() as made:
        made.callback(worker.close)
        scheduler = SchedulerConnector(config, shape, time.monotonic)
        made.callback(scheduler.close)
        scheduler.connect([worker.hello])
        made.pop_all()
    return scheduler, worker


def disconnect(scheduler: SchedulerConnector | None, worker: WorkerConnector | None) -> None:
    """Close the copying side and then the other, whatever the first one raises."""
    with ExitStack() as closing:
        for side in (scheduler, worker):
            if side is not None:
                closing.callback(side.close)


def _fingerprint(shape: ReferenceShape, device: str, layout: KVLayout) -> Fingerprint:
    """Return everything that changes the meaning of a reference engine's KV bytes.

    The weights follow from shape, seed and device.
    """
    payloads = {f"group{group.group}": group.describe_payload() for group in layout.groups}
    facts: dict[str, Scalar] = {"frame": VERSION, "engine": "reference", "device": device}
    return Fingerprint.of({**facts, **shape.facts(), **payloads})
