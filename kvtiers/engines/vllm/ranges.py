"""Ranges of layers in vLLM: who may have them, and which layer belongs to which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvtiers.model.errors import UnsupportedEngineError
from kvtiers.model.layer_ranges import layer_ranges

_OPTION: Final = "reload.layer_ranges"
_REMOVE: Final = f"or remove {_OPTION}"


def check_ranges(num_ranges: int, vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse ranges of layers where no step could wait for them one by one.

    Raises:
        UnsupportedEngineError: with the reason and what would help.
    """
    if num_ranges == 1:
        return
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        raise UnsupportedEngineError(
            f"{_OPTION} is {num_ranges}, but the model has {len(groups)} KV groups, and of several "
            f"vLLM cannot be told which block of a step did not come; remove {_OPTION}"
        )
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        raise UnsupportedEngineError(
            f"{_OPTION} is {num_ranges}, but with asynchronous scheduling the next step already "
            f"runs on a load that failed; write --no-async-scheduling, {_REMOVE}"
        )
    num_layers = len(groups[0].layer_names)
    if num_ranges > num_layers:
        raise UnsupportedEngineError(
            f"{_OPTION} is {num_ranges}, but the model has {num_layers} layers with KV; write "
            f"{num_layers} at most"
        )


def check_layers(num_ranges: int, vllm_config: Any, layer_names: Iterable[str]) -> None:
    """Refuse ranges of layers where vLLM would read a layer's KV without waiting for it.

    Raises:
        UnsupportedEngineError: with the layer and what would help.
    """
    from vllm.model_executor.layers.attention import (  # noqa: PLC0415 - not on the scheduler's side
        Attention,
        MLAAttention,
    )

    if num_ranges == 1:
        return
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        if not isinstance(layers.get(name), Attention | MLAAttention):
            raise UnsupportedEngineError(
                f"{_OPTION} is {num_ranges}, but vLLM does not wait for layer {name} "
                f"({type(layers.get(name)).__name__}) before it reads its KV; remove {_OPTION}"
            )


def ranges_of(layer_names: Sequence[str], num_ranges: int) -> list[list[str]]:
    """Return the layers of each range, in the order of their index in the model.

    vLLM may name them in another order. Layers without an index stay where they are.
    """
    if num_ranges == 1:
        return [list(layer_names)]
    indices = [_index(name) for name in layer_names]
    ordered = list(layer_names)
    if all(index is not None for index in indices):
        ordered = [name for _, name in sorted(zip(indices, layer_names, strict=True))]
    return [ordered[r.start : r.stop] for r in layer_ranges(len(ordered), num_ranges)]


def _index(layer_name: str) -> int | None:
    return next((int(part) for part in layer_name.split(".") if part.isdigit()), None)
