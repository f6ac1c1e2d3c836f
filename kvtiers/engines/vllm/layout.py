"""From vLLM's registered KV tensors to a `KVLayout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvtiers.engines.vllm.ranges import ranges_of
from kvtiers.engines.vllm.support import group_specs
from kvtiers.model.errors import UnsupportedEngineError
from kvtiers.model.layout import Axis, GroupLayout, KVLayout, TensorView

# vLLM 0.32 registers one logical [blocks, heads, tokens, content] view per layer, K and V
# side by side in the content; whatever the physical order, the strides tell it.
_AXES = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CONTENT)


def window_of(group: Any) -> int | None:
    """Return how many tokens the attention of a KV group looks back, None for all.

    Only a group that vLLM manages as a window may lack what lies before it. Without the hybrid
    manager vLLM records the window of some of a group's layers in a `FullAttentionSpec`, and
    serves prefixes of any length from its blocks.
    """
    windows = {
        int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else None
        for spec in group_specs(group).values()
    }
    return windows.pop() if len(windows) == 1 else None


def layout_of(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], num_ranges: int = 1
) -> tuple[KVLayout, list[int]]:
    """Describe the registered tensors.

    Args:
        kv_caches: layer name to tensor, as `register_kv_caches` gets them.
        num_ranges: of layers, each a KV group of its own; more than 1 only of one KV group.

    Returns:
        the layout, and the address of each of its allocations.

    Raises:
        UnsupportedEngineError: a layer without tensor, or a tensor of another form.
        LayoutError: strides that make no sense.
    """
    bases: list[int] = []
    sizes: list[int] = []
    groups = []
    parts = [
        (group, names)
        for group in kv_cache_config.kv_cache_groups
        for names in ranges_of(group.layer_names, num_ranges)
    ]
    for idx, (group, names) in enumerate(parts):
        views = []
        for name in names:
            if name not in kv_caches:
                raise UnsupportedEngineError(f"KV group {idx}: layer {name} has no KV tensor")
            views.append(_view(name, kv_caches[name], bases, sizes))
        dtypes = {str(kv_caches[name].dtype) for name in names}
        groups.append(
            GroupLayout.from_views(
                views,
                group=idx,
                num_blocks=int(kv_cache_config.num_blocks),
                block_size=int(group.kv_cache_spec.block_size),
                dtype="+".join(sorted(dtypes)),
                window=window_of(group),
            )
        )
    return KVLayout(tuple(sizes), tuple(groups)), bases


def flat_allocations(kv_caches: Mapping[str, Any], bases: Sequence[int]) -> list[torch.Tensor]:
    """Return a flat uint8 tensor over each allocation that `layout_of` found, the same memory."""
    storages = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    return [
        torch.empty(0, dtype=torch.uint8, device=storages[base].device).set_(storages[base])
        for base in bases
    ]


def _view(name: str, tensor: Any, bases: list[int], sizes: list[int]) -> TensorView:
    if tensor.dim() != len(_AXES):
        raise UnsupportedEngineError(
            f"layer {name}: KV tensor of shape {tuple(tensor.shape)}; this version of kvtiers "
            "knows [blocks, heads, tokens, content]"
        )
    storage = tensor.untyped_storage()
    base = storage.data_ptr()
    if base not in bases:
        bases.append(base)
        sizes.append(storage.nbytes())
    itemsize = tensor.element_size()
    return TensorView(
        layer=name,
        allocation=bases.index(base),
        offset=tensor.data_ptr() - base,
        axes=_AXES,
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
    )
