"""Which reloads may run within the engine step that computes the rest."""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.connector.shape import EngineShape
from kvtiers.control.answers import Answer
from kvtiers.control.controller import Controller
from kvtiers.model.config import Config
from kvtiers.model.keys import BlockKey


def in_step_seconds(config: Config, shape: EngineShape) -> float:
    """Return what loads within a step may take at most; 0 where there are none."""
    checked = config.integrity == "all"  # a checksum may fail, and the step could not go back
    return config.reload.sync_below if shape.loads_in_step and not checked else 0.0


def may_load_in_step(
    controller: Controller,
    config: Config,
    shape: EngineShape,
    keys: Sequence[Sequence[BlockKey]],
    answer: Answer,
) -> bool:
    """Whether a reload is quick and cannot fail for reasons of its medium.

    Args:
        keys: of the request, per KV group, from block 0.
    """
    num_blocks, start = answer.num_blocks or 0, answer.match.start
    if (answer.match.sources[:, :num_blocks] != 0).any():
        return False
    seconds = controller.cost.predict_load_seconds([num_blocks], controller.settings.block_nbytes)
    return seconds < in_step_seconds(config, shape) and controller.ready(
        keys, start, start + num_blocks
    )
