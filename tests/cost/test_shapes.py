"""Promises of `kvtiers.cost.shapes`: the published sizes, and reasons where there are none."""

from __future__ import annotations

import pytest

from kvtiers.cost.prefill import FALLBACK_SHAPE
from kvtiers.cost.shapes import kv_nbytes_per_token, shape_from_hf_config

from .machine import LLAMA_8B, LLAMA_70B


@pytest.mark.parametrize(
    ("config", "linear", "quadratic", "equal_at", "kv_nbytes"),
    [
        (LLAMA_8B, 13.96e9, 262_144, 53_000, 131_072),
        (LLAMA_70B, 136.9e9, 1.311e6, 104_000, 327_680),
    ],
)
def test_llama_shapes_give_published_figures(config, linear, quadratic, equal_at, kv_nbytes):
    seed = shape_from_hf_config(config)
    assert seed.note == ""
    one, two = (float(seed.shape.prefill_flops(n)) for n in (1, 2))
    found_quadratic = (two - 2 * one) / 2
    found_linear = one - found_quadratic
    assert found_linear == pytest.approx(linear, rel=1e-3)
    assert found_quadratic == pytest.approx(quadratic, rel=1e-3)
    assert found_linear / found_quadratic == pytest.approx(equal_at, rel=0.01)
    assert kv_nbytes_per_token(config) == kv_nbytes


def test_fallback_is_llama_8b():
    assert shape_from_hf_config(LLAMA_8B).shape == FALLBACK_SHAPE


def test_fp8_cache_halves_kv_bytes():
    assert kv_nbytes_per_token(LLAMA_8B, element_nbytes=1) == 65_536


def test_head_dim_need_not_divide_hidden_size():
    config = {**LLAMA_8B, "model_type": "mistral", "hidden_size": 5120, "head_dim": 128}
    shape = shape_from_hf_config(config).shape
    assert shape.head_size == 128
    assert shape.linear_params == 32 * (2 * 5120 * 128 * 40 + 3 * 5120 * 14336)


def test_kv_heads_default_to_query_heads():
    config = {k: v for k, v in LLAMA_8B.items() if k != "num_key_value_heads"}
    assert kv_nbytes_per_token(config) == 4 * 131_072


def test_multi_query_attention_has_one_kv_head():
    assert kv_nbytes_per_token({**LLAMA_8B, "num_key_value_heads": 1}) == 131_072 // 8


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "intermediate_size"])
def test_missing_field_is_named(field):
    config = {k: v for k, v in LLAMA_8B.items() if k != field}
    seed = shape_from_hf_config(config)
    assert seed.shape is None
    assert repr(field) in seed.note
    assert kv_nbytes_per_token(config) is None


def test_feed_forward_without_gate_has_two_matrices():
    gated = shape_from_hf_config(LLAMA_8B).shape
    plain = shape_from_hf_config({**LLAMA_8B, "model_type": "starcoder2"}).shape
    assert gated.linear_params - plain.linear_params == 32 * 4096 * 14336


def test_unknown_type_is_taken_for_gated_and_says_so():
    seed = shape_from_hf_config({**LLAMA_8B, "model_type": "novel"})
    assert seed.shape == FALLBACK_SHAPE
    assert "'novel'" in seed.note


def test_latent_attention_has_no_shape():
    seed = shape_from_hf_config({**LLAMA_8B, "model_type": "deepseek_v3", "kv_lora_rank": 512})
    assert seed.shape is None
    assert "latent" in seed.note


def test_mixture_of_experts_counts_the_experts_used():
    mixtral = {
        **LLAMA_8B,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    seed = shape_from_hf_config(mixtral)
    assert "experts" in seed.note
    # 12.9 billion active weights, less 0.26 of embedding and output head
    assert seed.shape.linear_params == pytest.approx(12.6e9, rel=0.01)


def test_mixture_with_narrow_experts_needs_no_intermediate_size():
    config = {
        **{k: v for k, v in LLAMA_8B.items() if k != "intermediate_size"},
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    shape = shape_from_hf_config(config).shape
    attention = 2 * 4096 * 128 * 40
    assert shape.linear_params == 32 * (attention + 3 * 4096 * 8 * 768 + 4096 * 128)


def test_sliding_window_is_noted():
    assert "sliding" in shape_from_hf_config({**LLAMA_8B, "sliding_window": 4096}).note


def test_multimodal_configuration_is_looked_into():
    assert shape_from_hf_config({"text_config": LLAMA_8B}).shape == FALLBACK_SHAPE
