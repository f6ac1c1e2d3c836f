"""Just enough of vLLM's configuration objects for the adapter's questions about them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

NUM_BLOCKS, HEADS, HEAD_SIZE = 8, 2, 4


def hf_config(**changes: Any) -> SimpleNamespace:
    facts = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "rope_theta": 10000.0,
        **changes,
    }
    return SimpleNamespace(to_dict=lambda: dict(facts))


def vllm_config(**changes: Any) -> SimpleNamespace:
    """A configuration; keys are ``section__field``, or ``hf__field`` for the model's own."""
    hf = {key[4:]: value for key, value in changes.items() if key.startswith("hf__")}
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "some/model",
            "revision": "main",
            "hf_config": hf_config(**hf),
            "hf_text_config": hf_config(**hf),
            "hf_overrides": {},
            "dtype": "torch.bfloat16",
            "quantization": None,
            "max_model_len": 4096,
        },
        "cache_config": {
            "cache_dtype": "auto",
            "prefix_caching_hash_algo": "sha256",
            "enable_prefix_caching": True,
        },
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "scheduler_config": {"max_num_batched_tokens": 2048, "async_scheduling": False},
        "device_config": {"device_type": "cpu"},
        "load_config": {"load_format": "auto"},
        "kv_transfer_config": {
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {},
        },
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if section != "hf":
            sections[section][name] = value
    spaces = {name: SimpleNamespace(**fields) for name, fields in sections.items()}
    return SimpleNamespace(lora_config=None, **spaces)


def full(block_size: int = 16, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16, **more
    )


def sliding(window: int, block_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        sliding_window=window,
    )


def kv_cache_config(*specs: Any, **more: Any) -> KVCacheConfig:
    """One KV group of two layers for each specification."""
    groups = [
        KVCacheGroupSpec([f"layer{2 * i}", f"layer{2 * i + 1}"], spec)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(NUM_BLOCKS, [], groups, **more)


def kv_caches(config: KVCacheConfig, *, token_major: bool = False) -> dict[str, torch.Tensor]:
    """The tensors that vLLM would register: [blocks, heads, tokens, content], in either order."""
    caches = {}
    for group in config.kv_cache_groups:
        size = group.kv_cache_spec.block_size
        for name in group.layer_names:
            if token_major:
                shape = (NUM_BLOCKS, size, HEADS, 2 * HEAD_SIZE)
                caches[name] = torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2)
            else:
                shape = (NUM_BLOCKS, HEADS, size, 2 * HEAD_SIZE)
                caches[name] = torch.zeros(shape, dtype=torch.bfloat16)
    return caches
