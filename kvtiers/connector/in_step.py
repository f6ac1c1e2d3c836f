"""Which reloads may run within the engine step that computes the rest."""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.connector.shape import EngineShape
from kvtiers.control.answers import Answer
from kvtiers.control.controller import Controller
from kvtiers.model.config import Config
from kvtiers.model.keys import BlockKey


def in_step_seconds(config: Config, shape: EngineShape) -> float:
    """Return the seconds below which a load from DRAM runs within a step; 0: none does."""
    checked = config.integrity == "all"  # a checksum may fail, and the step could not go back
    return config.reload.sync_below if shape.loads_in_step and not checked else 0.0


def may_load_in_step(
    controller: Controller,
    config: Config,
    shape: EngineShape,
    keys: Sequence[Sequence[BlockKey]],
    answer: Answer,
) -> bool:
    """Whether a reload runs within the step that computes the rest.

    It does if it was planned to overlap that, or if it is quick and comes from DRAM only, so that
    no medium can fail it; and if it needs to wait for no other job.

    Args:
        keys: of the request, per KV group, from block 0.
    """
    if not shape.loads_in_step:
        return False
    if answer.plan is not None and answer.plan.in_step:
        return controller.at_hand(keys, answer.match)
    num_blocks = answer.num_blocks or 0
    if (answer.match.sources[:, :num_blocks] != 0).any():
        return False
    num_frames = num_blocks * shape.num_layer_ranges
    frame_nbytes = controller.settings.block_nbytes // shape.num_layer_ranges
    seconds = controller.cost.predict_load_seconds([num_frames], frame_nbytes)
    if seconds >= in_step_seconds(config, shape):
        return False  # before every block is looked at
    return controller.at_hand(keys, answer.match)
