"""The shape of a model, from the configuration that Hugging Face publishes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtiers.cost.prefill import ModelShape

HFConfig = Mapping[str, Any]

# Dense decoders whose feed-forward block has gate, up and down matrices.
_GATED: Final = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2")
)
# The same with up and down only.
_PLAIN: Final = frozenset(("gpt_neox", "nemotron", "phi", "starcoder2"))
# Fields of configurations whose attention costs something else than the formula says.
_OTHER_ATTENTION: Final = {
    "kv_lora_rank": "multi-head latent attention",
    "mamba_d_state": "state-space layers",
    "ssm_cfg": "state-space layers",
    "linear_num_value_heads": "linear attention",
}
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


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
    """Return the shape that a ``config.json`` describes.

    Weights a token is multiplied with, per layer: queries and output ``2 E H d``, keys and values
    ``2 E H_kv d``, feed-forward ``3 E I`` (2 without a gate), with E hidden size and I intermediate
    size. Norms and biases are left out: they are below a thousandth.

    Approximate, and said so in the note: mixtures of experts count the experts that one token
    uses in every layer; a sliding window is taken for full attention; a model type that is not
    known is taken for a gated one. Without a shape: other kinds of attention, absent fields.
    """
    text = _text_config(config)
    for name, kind in _OTHER_ATTENTION.items():
        if text.get(name):
            return ShapeSeed(None, f"{kind} ({name!r}) costs something else")
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads"]
    num_experts = next((name for name in _EXPERTS if text.get(name)), None)
    if num_experts is None:
        needed.append("intermediate_size")
    else:
        needed.append("num_experts_per_tok")
        if not text.get("moe_intermediate_size"):
            needed.append("intermediate_size")
    missing = [name for name in needed if not text.get(name)]
    if missing:
        return ShapeSeed(None, f"the configuration has no {', '.join(map(repr, missing))}")
    heads = int(text["num_attention_heads"])
    head_size = _head_size(text)
    hidden = int(text["hidden_size"])
    attention = 2 * hidden * head_size * (heads + _num_kv_heads(text))
    feed_forward, note = _feed_forward(text, hidden, num_experts)
    layers = int(text["num_hidden_layers"])
    shape = ModelShape(layers, heads, head_size, layers * (attention + feed_forward))
    return ShapeSeed(shape, "; ".join(filter(None, (note, _window_note(text)))))


def kv_nbytes_per_token(config: HFConfig, element_nbytes: float = 2) -> int | None:
    """Return the KV bytes of one token over all layers: ``2 L H_kv d`` elements.

    Args:
        element_nbytes: 2 for bf16, 1 for fp8: of the cache, which need not be the weights' type.

    Returns:
        None where `shape_from_hf_config` has no shape.
    """
    shape = shape_from_hf_config(config).shape
    if shape is None:
        return None
    num_kv_heads = _num_kv_heads(_text_config(config))
    return int(2 * shape.num_layers * num_kv_heads * shape.head_size * element_nbytes)


def _text_config(config: HFConfig) -> HFConfig:
    """Return the part about the language model; multimodal configurations nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _head_size(text: HFConfig) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def _num_kv_heads(text: HFConfig) -> int:
    """Return the KV heads; without the field every query head has its own, as in Hugging Face."""
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def _feed_forward(text: HFConfig, hidden: int, num_experts: str | None) -> tuple[int, str]:
    """Return the feed-forward weights that a token uses in one layer, and what is approximate."""
    model_type = text.get("model_type")
    matrices = 2 if model_type in _PLAIN else 3
    if num_experts is None:
        known = model_type in _PLAIN or model_type in _GATED
        note = "" if known else f"model type {model_type!r} is not known; taken for a gated one"
        return matrices * hidden * int(text["intermediate_size"]), note
    width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    active = int(text["num_experts_per_tok"]) * width
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    shared += int(text.get("n_shared_experts") or 0) * width
    router = hidden * int(text[num_experts])
    note = "every layer is taken for a mixture of experts; only the experts a token uses count"
    return matrices * hidden * (active + shared) + router, note


def _window_note(text: HFConfig) -> str:
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ""
    return "sliding windows are taken for full attention"
