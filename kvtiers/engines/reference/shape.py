"""What the reference model looks like, from a configuration as Hugging Face publishes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvtiers.model.errors import ConfigError

DTYPES: Final = ("float32", "bfloat16", "float16")
_OTHER_MODELS: Final = {
    "kv_lora_rank": "latent attention",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "mamba_d_state": "state-space layers",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ReferenceShape:
    """A dense decoder: RMSNorm, rotary positions, grouped-query attention, gated feed-forward.

    Attributes:
        windows: per layer, tokens that attention looks back, the present one included; None for
            all. Empty: None for every layer.
        seed: of the random weights; equal shapes have equal weights on equal devices.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    dtype: str = "float32"
    windows: tuple[int | None, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: 'num_attention_heads' {self.num_heads} is no multiple of "
                f"'num_key_value_heads' {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ConfigError(
                f"config.json: 'head_dim' is {self.head_size}; rotary positions need an even number"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.windows)} windows for {self.num_layers} layers; give one each, or none"
            )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ReferenceShape:
        """Return the shape that a ``config.json`` describes.

        Raises:
            ConfigError: a field is missing or ill-typed, or the model is of another kind.
        """
        text = config.get("text_config", config)
        for name, kind in _OTHER_MODELS.items():
            if text.get(name):
                raise ConfigError(
                    f"config.json has {name!r}: {kind}; the reference model is a dense decoder "
                    "with grouped-query attention. Give the configuration of such a model"
                )
        heads, hidden = _number(text, "num_attention_heads"), _number(text, "hidden_size")
        layers = _number(text, "num_hidden_layers")
        return cls(
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_number(text, "num_key_value_heads", heads),
            head_size=_number(text, "head_dim", hidden // heads),
            intermediate_size=_number(text, "intermediate_size"),
            vocab_size=_number(text, "vocab_size"),
            rope_theta=float(text.get("rope_theta") or 10_000.0),
            norm_epsilon=float(text.get("rms_norm_eps") or 1e-5),
            dtype=str(text.get("dtype") or text.get("torch_dtype") or "float32"),
            windows=_windows(text, layers),
        )

    def to_hf_config(self) -> dict[str, Any]:
        """Return the configuration that describes this shape; `from_hf_config` reads it."""
        config: dict[str, Any] = {
            "model_type": "llama",
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_epsilon,
            "dtype": self.dtype,
        }
        found = {window for window in self.windows if window is not None}
        if found:
            config["sliding_window"] = found.pop()
            config["layer_types"] = [_FULL if w is None else _SLIDING for w in self.windows]
        return config

    def facts(self) -> dict[str, str | int | float]:
        """Return every attribute by name, as scalars."""
        return {n: str(v) if isinstance(v, tuple) else v for n, v in asdict(self).items()}

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a layer looks back, None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_nbytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.itemsize

    @property
    def num_params(self) -> int:
        """Weights of the model, embedding and output head included."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size


def _number(text: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = text.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {name!r}; a positive whole number is needed")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name!r} is {value!r}; must be a positive whole number")
    return value


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ()
    window = _number(text, "sliding_window")
    types = text.get("layer_types")
    if not types:
        return (window,) * layers
    # A configuration cut down to fewer layers keeps the pattern of its first ones.
    if len(types) < layers or set(types) - {_FULL, _SLIDING}:
        raise ConfigError(
            f"config.json: 'layer_types' must name {_FULL!r} or {_SLIDING!r} for {layers} layers"
        )
    return tuple(window if kind == _SLIDING else None for kind in types[:layers])
