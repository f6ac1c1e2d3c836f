"""Promises of `kvtiers.cost.shapes`: the published sizes, and reasons where there are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.known_models import KNOWN_MODELS
from kvtiers.cost.prefill import FALLBACK_SHAPE
from kvtiers.cost.shapes import model_shape, shape_from_hf_config
from kvtiers.model.errors import ConfigError

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
    assert model_shape(config).kv_nbytes_per_token() == kv_nbytes


def test_fallback_costs_what_llama_8b_costs():
    shape = shape_from_hf_config(LLAMA_8B).shape
    for n, context in ((1, 0), (1000, 0), (8192, 100_000)):
        assert FALLBACK_SHAPE.prefill_flops(n, context) == shape.prefill_flops(n, context)


def test_fp8_cache_halves_kv_bytes():
    assert model_shape(LLAMA_8B).kv_nbytes_per_token(1) == 65_536


def test_head_dim_need_not_divide_hidden_size():
    config = {**LLAMA_8B, "model_type": "mistral", "hidden_size": 5120, "head_dim": 128}
    shape = shape_from_hf_config(config).shape
    assert shape.head_size == 128
    assert shape.linear_params == 32 * (2 * 5120 * 128 * 40 + 3 * 5120 * 14336)


def test_kv_heads_default_to_query_heads():
    config = {k: v for k, v in LLAMA_8B.items() if k != "num_key_value_heads"}
    assert model_shape(config).kv_nbytes_per_token() == 4 * 131_072


def test_multi_query_attention_has_one_kv_head():
    assert model_shape({**LLAMA_8B, "num_key_value_heads": 1}).kv_nbytes_per_token() == 131_072 // 8


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "intermediate_size"])
def test_missing_field_is_named(field):
    config = {k: v for k, v in LLAMA_8B.items() if k != field}
    seed = shape_from_hf_config(config)
    assert seed.shape is None
    assert repr(field) in seed.note
    with pytest.raises(ConfigError, match=repr(field)):
        model_shape(config)


def test_feed_forward_without_gate_has_two_matrices():
    gated = shape_from_hf_config(LLAMA_8B).shape
    plain = shape_from_hf_config({**LLAMA_8B, "model_type": "starcoder2"}).shape
    assert gated.linear_params - plain.linear_params == 32 * 4096 * 14336


def test_unknown_type_is_taken_for_gated_and_says_so():
    seed = shape_from_hf_config({**LLAMA_8B, "model_type": "novel"})
    assert seed.shape == model_shape(LLAMA_8B)
    assert "'novel'" in seed.note


@pytest.mark.parametrize("field", ["mamba_d_state", "linear_num_value_heads"])
def test_other_kinds_of_attention_have_no_shape(field):
    seed = shape_from_hf_config({**LLAMA_8B, field: 16})
    assert seed.shape is None
    assert repr(field) in seed.note
    with pytest.raises(ConfigError, match=field):
        model_shape({**LLAMA_8B, field: 16})


@pytest.mark.parametrize("value", [0, -1, 4096.5, "4096", True])
def test_senseless_field_is_named_with_its_value(value):
    with pytest.raises(ConfigError, match=f"'hidden_size' is {value!r}"):
        model_shape({**LLAMA_8B, "hidden_size": value})


def test_multimodal_configuration_is_looked_into():
    assert model_shape({"text_config": LLAMA_8B}) == model_shape(LLAMA_8B)


class TestExperts:
    mixtral = {
        **LLAMA_8B,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    dense = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    sparse = {**dense, "intermediate_size": 100, "num_experts": 16, "num_experts_per_tok": 2}

    def test_only_the_experts_of_a_token_are_multiplied(self):
        shape = model_shape(self.mixtral)
        # 12.9 billion active weights, less 0.26 of embedding and output head
        assert shape.linear_params == pytest.approx(12.6e9, rel=0.01)
        assert shape.expert_params == 4 * shape.active_expert_params

    def test_narrow_experts_need_no_intermediate_size(self):
        config = {
            **{k: v for k, v in LLAMA_8B.items() if k != "intermediate_size"},
            "model_type": "qwen3_moe",
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        }
        attention = 2 * 4096 * 128 * 40
        found = model_shape(config).linear_params
        assert found == 32 * (attention + 3 * 4096 * 8 * 768 + 4096 * 128)

    def test_experts_without_number_per_token_are_refused(self):
        config = {k: v for k, v in self.mixtral.items() if k != "num_experts_per_tok"}
        with pytest.raises(ConfigError, match="'num_experts_per_tok'"):
            model_shape(config)

    @pytest.mark.parametrize(
        ("fields", "num_sparse"),
        [
            ({}, 6),
            ({"first_k_dense_replace": 2}, 4),
            ({"decoder_sparse_step": 2}, 3),
            ({"mlp_only_layers": [0, 5]}, 4),
            ({"moe_layer_freq": 3}, 2),
        ],
    )
    def test_layers_without_experts_are_dense(self, fields, num_sparse):
        found = model_shape({**self.sparse, **fields, "moe_intermediate_size": 10})
        one = 3 * 64 * 10
        assert found.expert_params == num_sparse * 16 * one
        attention, router = 4 * 64 * 64, 64 * 16
        dense = 3 * 64 * 100
        expected = 6 * attention + num_sparse * (2 * one + router) + (6 - num_sparse) * dense
        assert found.linear_params == expected

    def test_shared_experts_are_used_by_every_token(self):
        without = model_shape({**self.sparse, "moe_intermediate_size": 10})
        two = model_shape({**self.sparse, "moe_intermediate_size": 10, "n_shared_experts": 2})
        assert two.linear_params - without.linear_params == 6 * 2 * 3 * 64 * 10
        assert two.active_expert_params == without.active_expert_params

    def test_a_step_reads_the_experts_that_its_tokens_chose(self):
        shape = model_shape(self.mixtral)
        always = shape.linear_params - shape.active_expert_params
        assert shape.params_read(1) == pytest.approx(shape.linear_params)
        assert shape.params_read(2) < always + 2 * shape.active_expert_params
        assert shape.params_read(10_000) == pytest.approx(always + shape.expert_params)


class TestLatentAttention:
    config = KNOWN_MODELS["deepseek-v3"].config

    def test_a_token_keeps_one_latent_a_layer_on_every_rank(self):
        shape = model_shape(self.config)
        assert shape.kv_nbytes_per_token() == 61 * (512 + 64) * 2
        assert shape.kv_nbytes_per_token(tensor_parallel_size=8) == 61 * (512 + 64) * 2

    def test_scores_and_values_have_their_own_sizes(self):
        shape = model_shape(self.config)
        pairs = 0.5 * 1000 * 1000
        assert shape.attention_flops(1000) == pytest.approx(61 * 128 * 2 * (192 + 128) * pairs)

    def test_active_weights_are_the_published_37_billion(self):
        shape = model_shape(self.config)
        assert shape.linear_params + shape.head_params == pytest.approx(37e9, rel=0.02)

    @pytest.mark.parametrize("field", ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
    def test_missing_size_is_named(self, field):
        config = {k: v for k, v in self.config.items() if k != field}
        with pytest.raises(ConfigError, match=f"'{field}'"):
            model_shape(config)


class TestWindows:
    @pytest.mark.parametrize(
        ("fields", "num_window_layers"),
        [
            ({"model_type": "mistral"}, 32),
            ({"model_type": "gemma2"}, 16),
            ({"model_type": "gemma3_text"}, 27),
            ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, 24),
            ({"model_type": "qwen2", "use_sliding_window": False}, 0),
            ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 28}, 4),
            ({"layer_types": ["sliding_attention", "full_attention"] * 16}, 16),
            ({"sliding_window": None}, 0),
        ],
    )
    def test_layers_with_a_window_are_told_from_the_others(self, fields, num_window_layers):
        shape = model_shape({**LLAMA_8B, "sliding_window": 4096, **fields})
        assert shape.num_window_layers == num_window_layers
        assert shape.window == (4096 if num_window_layers else 0)

    def test_other_kinds_of_layers_are_named(self):
        config = {**LLAMA_8B, "sliding_window": 4096, "layer_types": ["ssm"] * 32}
        with pytest.raises(ConfigError, match="'ssm'"):
            model_shape(config)

    @given(n=st.integers(0, 60), context=st.integers(0, 60), window=st.integers(1, 40))
    def test_a_token_sees_its_window(self, n, context, window):
        """Against the sum over tokens, each of which sees half of itself."""
        shape = model_shape({**LLAMA_8B, "model_type": "mistral", "sliding_window": window})
        pairs = sum(min(p + 0.5, window) for p in range(context, context + n))
        per_pair = 4 * 32 * 32 * 128
        # The formula is exact but for the one token at which the window begins to slide.
        found = float(shape.attention_flops(n, context))
        assert found == pytest.approx(per_pair * pairs, abs=0.13 * per_pair)


def test_ranks_share_kv_heads_one_each_at_least():
    shape = model_shape(LLAMA_8B)
    found = [shape.kv_nbytes_per_token(2, ranks) for ranks in (1, 2, 8, 16)]
    assert found == [131_072, 65_536, 16_384, 16_384]
