"""Writes small random models whose greedy output depends on their KV cache.

Weights of ``load_format="dummy"`` are so small that a prompt's whole KV can be replaced without
changing a token. Here queries and keys are scaled so that attention logits spread by a few units
and every block writes into the residual stream at the stream's own scale: what a request
generates then depends on every part of its KV, in a checkpoint that is written in seconds.

Plain numpy: nothing here imports an engine or torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

_SHAPE_FILE = "kvtiers_random_model.json"
#: Name in safetensors and bytes of each dtype.
_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}

#: A weight matrix is (rows, columns, gain), a norm is (rows,): its weights are all 1.
_Weight = tuple[int, int, float] | tuple[int]


@dataclass(frozen=True, slots=True)
class RandomModel:
    """The shape of a random Llama model; equal shapes have equal weights.

    ``sliding_window`` is None for a model with one KV group. Otherwise only every
    ``full_attention_every``-th layer attends to the whole prefix, the others to the last
    ``sliding_window`` tokens, and the engine keeps several KV groups.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str = "float32"
    seed: int = 0
    sliding_window: int | None = None
    full_attention_every: int = 2
    #: Standard deviation of the attention logits: at 3, a head looks at a handful of tokens.
    attention_spread: float = 3.0
    #: Standard deviation of the output logits.
    logit_spread: float = 3.0

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {tuple(_DTYPES)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide into {self.num_kv_heads} KV heads"
            )

    @property
    def layer_types(self) -> list[str]:
        """What each layer attends to, in the words of ``config.json``."""
        if self.sliding_window is None:
            return ["full_attention"] * self.num_layers
        return [
            "sliding_attention" if (layer_idx + 1) % self.full_attention_every else "full_attention"
            for layer_idx in range(self.num_layers)
        ]

    @property
    def kv_nbytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers and heads."""
        _, itemsize = _DTYPES[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


#: For tests: a request takes milliseconds, one 32-token block of KV is 128 KiB.
TINY = RandomModel(
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    vocab_size=512,
    max_position_embeddings=8192,
)

#: Two KV groups, for tests: full attention, and a window of three 32-token blocks.
TINY_HYBRID = replace(TINY, sliding_window=96)

#: The shape that reloads are timed on: 24 KiB of KV a token in bf16.
DEMO = RandomModel(
    num_layers=12,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=2816,
    vocab_size=2048,
    max_position_embeddings=32768,
    dtype="bfloat16",
)


def write_random_model(model: RandomModel, directory: Path) -> Path:
    """Write ``model`` as a checkpoint that an engine can load, and return its directory.

    The checkpoint has no tokenizer: serve it with ``skip_tokenizer_init`` and prompts of token
    ids. A directory that already holds this very model is left as it is.
    """
    shape = json.dumps(asdict(model), sort_keys=True, indent=2)
    marker = directory / _SHAPE_FILE
    if marker.exists() and marker.read_text() == shape:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    _write_safetensors(model, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_config(model), indent=2))
    marker.write_text(shape)
    return directory


def _config(model: RandomModel) -> dict[str, object]:
    """Return the content of ``config.json``."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": model.dtype,
    }
    if model.sliding_window is not None:
        config["sliding_window"] = model.sliding_window
        config["layer_types"] = model.layer_types
    return config


def _weights(model: RandomModel) -> Iterator[tuple[str, _Weight]]:
    """Yield the name and the shape of every weight, always in the same order.

    A matrix (rows, columns, gain) maps inputs of unit variance to outputs of variance gain^2.
    """
    hidden = model.hidden_size
    num_q = model.num_heads * model.head_dim
    num_kv = model.num_kv_heads * model.head_dim
    # A logit is q.k / sqrt(head_dim): with q and k of standard deviation g it spreads by g^2.
    qk_gain = math.sqrt(model.attention_spread)
    yield "model.embed_tokens.weight", (model.vocab_size, hidden, math.sqrt(hidden))
    for layer_idx in range(model.num_layers):
        prefix = f"model.layers.{layer_idx}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (num_q, hidden, qk_gain)
        yield prefix + "self_attn.k_proj.weight", (num_kv, hidden, qk_gain)
        yield prefix + "self_attn.v_proj.weight", (num_kv, hidden, 1.0)
        yield prefix + "self_attn.o_proj.weight", (hidden, num_q, 1.0)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (model.intermediate_size, hidden, 1.0)
        yield prefix + "mlp.up_proj.weight", (model.intermediate_size, hidden, 1.0)
        yield prefix + "mlp.down_proj.weight", (hidden, model.intermediate_size, 1.0)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (model.vocab_size, hidden, model.logit_spread)


def _write_safetensors(model: RandomModel, path: Path) -> None:
    """Draw the weights and write them: a length, a JSON header, the tensors one after another."""
    dtype_name, itemsize = _DTYPES[model.dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in _weights(model):
        begin, end = end, end + math.prod(weight[:2]) * itemsize
        header[name] = {
            "dtype": dtype_name,
            "shape": list(weight[:2]),
            "data_offsets": [begin, end],
        }
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    random = np.random.default_rng(model.seed)
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little"))
        file.write(header_bytes)
        for _, weight in _weights(model):
            file.write(_encoded(_drawn(weight, random), model.dtype).data)


def _drawn(weight: _Weight, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return the values of one weight."""
    if len(weight) == 1:
        return np.ones(weight, np.float32)
    num_rows, num_columns, gain = weight
    values = random.standard_normal((num_rows, num_columns), np.float32)
    values *= np.float32(gain / math.sqrt(num_columns))
    return values


def _encoded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    """Return ``values`` in the checkpoint's dtype; bfloat16, which numpy lacks, as its bits."""
    if dtype == "float16":
        return values.astype(np.float16)
    if dtype == "float32":
        return values
    bits = values.view(np.uint32)
    # Round to nearest, ties to even.
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits >> np.uint32(16)).astype(np.uint16)
