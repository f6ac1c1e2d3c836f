"""The shape of a model, from the configuration that Hugging Face publishes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtiers.cost.prefill import ModelShape
from kvtiers.model.errors import ConfigError

HFConfig = Mapping[str, Any]

# Decoders whose feed-forward block has gate, up and down matrices.
_GATED: Final = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "granite")
) | {"olmo2", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"}
# The same with up and down only.
_PLAIN: Final = frozenset(("gpt_neox", "nemotron", "phi", "starcoder2"))
# Fields of configurations whose attention costs something else than the formula says.
_OTHER_ATTENTION: Final = {
    "mamba_d_state": "state-space layers",
    "ssm_cfg": "state-space layers",
    "linear_num_value_heads": "linear attention",
    "attention_chunk_size": "chunked attention",
}
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
# One layer in so many attends to everything, where the configuration does not say which.
_FULL_LAYER_EVERY: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ShapeSeed:
    """What a configuration says about a model's cost.

    Attributes:
        shape: None if it cannot be told.
        note: why not, or what is approximate about it; "" for an exact one.
    """

    shape: ModelShape | None
    note: str = ""


def shape_from_hf_config(config: HFConfig) -> ShapeSeed:
    """Return what a ``config.json`` says; for an engine, which runs without a shape as well."""
    try:
        shape = model_shape(config)
    except ConfigError as error:
        return ShapeSeed(None, str(error))
    model_type = _model_type(_text_config(config))
    known = model_type in _GATED or model_type in _PLAIN
    return ShapeSeed(
        shape, "" if known else f"model type {model_type!r} is not known; taken for a gated one"
    )


def model_shape(config: HFConfig) -> ModelShape:
    """Return the shape that a ``config.json`` describes.

    Weights a token is multiplied with, per layer: queries and output ``2 E H d``, keys and values
    ``2 E H_kv d``, feed-forward ``3 E I`` (2 without a gate), with E hidden size and I intermediate
    size; of experts, those that a token uses and the router. Latent attention has its low-rank
    matrices instead, and keeps ``kv_lora_rank + qk_rope_head_dim`` elements a layer. Norms and
    biases are left out: they are below a thousandth.

    Raises:
        ConfigError: a field is absent or no positive number, or attention is of a kind that
            costs something else.
    """
    text = _text_config(config)
    for name, kind in _OTHER_ATTENTION.items():
        if text.get(name):
            raise ConfigError(f"config.json: {kind} ({name!r}) cost something else than attention")
    layers, hidden = _number(text, "num_hidden_layers"), _number(text, "hidden_size")
    heads = _number(text, "num_attention_heads")
    attention = _latent(text, heads) if text.get("kv_lora_rank") else _grouped(text, heads)
    experts = _experts(text)
    num_sparse = _num_sparse_layers(text) if experts else 0
    matrices = 2 if _model_type(text) in _PLAIN else 3
    dense = matrices * hidden * _number(text, "intermediate_size") if num_sparse < layers else 0
    always = matrices * hidden * experts.shared_width + hidden * experts.num if experts else 0
    active = num_sparse * matrices * hidden * experts.active_width if experts else 0
    head = hidden * _optional(text, "vocab_size")
    num_window_layers, window = _windows(text, layers)
    return ModelShape(
        num_layers=layers,
        num_query_heads=heads,
        head_size=attention.key_size,
        linear_params=layers * attention.params
        + (layers - num_sparse) * dense
        + num_sparse * always
        + active,
        value_head_size=attention.value_size,
        num_window_layers=num_window_layers,
        window=window,
        expert_params=num_sparse * matrices * hidden * experts.width * experts.num
        if experts
        else 0,
        active_expert_params=active,
        head_params=head,
        embedding_params=0 if text.get("tie_word_embeddings") else head,
        hidden_size=hidden,
        kv_elements_per_token=layers * attention.kv_elements,
        num_kv_heads=attention.num_kv_heads,
    )


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's attention; `num_kv_heads` is 0 where every rank keeps all KV."""

    params: int
    key_size: int
    value_size: int
    kv_elements: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class _Experts:
    """One sparse layer's experts: their number, one's width, and what a token uses of them."""

    num: int
    width: int
    active_width: int
    shared_width: int


def _text_config(config: HFConfig) -> HFConfig:
    """Return the part about the language model; multimodal configurations nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _number(text: HFConfig, name: str) -> int:
    value = text.get(name)
    if value is None:
        raise ConfigError(f"config.json has no {name!r}; a positive whole number is needed")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name!r} is {value!r}; must be a positive whole number")
    return value


def _optional(text: HFConfig, name: str) -> int:
    """Return a number that need not be given; 0 where it is absent, null or 0."""
    return _number(text, name) if text.get(name) not in (None, False, 0) else 0


def _model_type(text: HFConfig) -> str:
    return str(text.get("model_type"))


def _grouped(text: HFConfig, heads: int) -> _Attention:
    """Return multi-head, grouped-query or multi-query attention.

    Without the field every query head has its own KV head, as in Hugging Face.
    """
    hidden = _number(text, "hidden_size")
    size = _number(text, "head_dim") if text.get("head_dim") else hidden // heads
    kv_heads = heads
    if text.get("num_key_value_heads") is not None:
        kv_heads = _number(text, "num_key_value_heads")
    params = 2 * hidden * size * (heads + kv_heads)
    return _Attention(params, size, size, 2 * kv_heads * size, kv_heads)


def _latent(text: HFConfig, heads: int) -> _Attention:
    """Return multi-head latent attention (DeepSeek-V2, section 2.1), as prefill computes it.

    Of a context that is not computed anew, its up-projection is left out.
    """
    hidden, rank = _number(text, "hidden_size"), _number(text, "kv_lora_rank")
    rope, plain = _number(text, "qk_rope_head_dim"), _number(text, "qk_nope_head_dim")
    value, key = _number(text, "v_head_dim"), plain + rope
    if text.get("q_lora_rank"):
        query_rank = _number(text, "q_lora_rank")
        queries = hidden * query_rank + query_rank * heads * key
    else:
        queries = hidden * heads * key
    latent = hidden * (rank + rope) + rank * heads * (plain + value)
    output = heads * value * hidden
    return _Attention(queries + latent + output, key, value, rank + rope, 0)


def _experts(text: HFConfig) -> _Experts | None:
    name = next((name for name in _EXPERTS if text.get(name)), None)
    if name is None or text[name] == 1:
        return None
    own = "moe_intermediate_size" if text.get("moe_intermediate_size") else "intermediate_size"
    width = _number(text, own)
    shared = _optional(text, "shared_expert_intermediate_size")
    shared += _optional(text, "n_shared_experts") * width
    active = _number(text, "num_experts_per_tok") * width
    return _Experts(_number(text, name), width, active, shared)


def _num_sparse_layers(text: HFConfig) -> int:
    """Return how many layers are mixtures of experts."""
    layers = _number(text, "num_hidden_layers")
    first = _optional(text, "first_k_dense_replace")
    every = _optional(text, "decoder_sparse_step") or _optional(text, "moe_layer_freq") or 1
    from_zero = 0 if text.get("moe_layer_freq") else 1  # which of every so many is sparse
    dense = text.get("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or isinstance(dense, str):
        raise ConfigError(f"config.json: 'mlp_only_layers' is {dense!r}; must be a list of layers")
    return sum(
        layer >= first and (layer + from_zero) % every == 0 and layer not in dense
        for layer in range(layers)
    )


def _windows(text: HFConfig, layers: int) -> tuple[int, int]:
    """Return how many layers look back a window, and its tokens."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return 0, 0
    window, types = _number(text, "sliding_window"), text.get("layer_types")
    if isinstance(types, Sequence) and not isinstance(types, str):
        other = sorted({str(kind) for kind in types} - {_FULL, _SLIDING})
        if other:
            raise ConfigError(f"config.json: 'layer_types' has {other}; known: {_FULL}, {_SLIDING}")
        if len(types) < layers:
            raise ConfigError(f"config.json: 'layer_types' names {len(types)} of {layers} layers")
        return sum(kind == _SLIDING for kind in types[:layers]), window
    every = text.get("sliding_window_pattern") or _FULL_LAYER_EVERY.get(_model_type(text))
    if isinstance(every, int) and every > 1:
        return layers - layers // every, window
    if text.get("use_sliding_window"):
        return max(layers - _optional(text, "max_window_layers"), 0), window
    return layers, window
