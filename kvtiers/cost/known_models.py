"""Configurations of well-known models, for predictions without their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from kvtiers.cost.prefill import ModelShape
from kvtiers.cost.shapes import model_shape
from kvtiers.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What a name stands for.

    Attributes:
        config: the fields of ``config.json`` that cost depends on.
        source: whose configuration it is, and where it was read.
        num_params: as published, of the language model, with embeddings.
        params_source: who published that number.
    """

    config: Mapping[str, Any]
    source: str
    num_params: float
    params_source: str

    @property
    def shape(self) -> ModelShape:
        """What a token of it costs."""
        return model_shape(self.config)


_CARD: Final = "the model card's safetensors count"


def _config(model_type: str, sizes: tuple[int, ...], **more: Any) -> Mapping[str, Any]:
    """Return a configuration; sizes: layers, hidden, intermediate, heads, KV heads, vocabulary."""
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    fields = dict(zip(names, sizes, strict=True))
    return MappingProxyType({"model_type": model_type, **fields, **more})


def _maxtext(name: str) -> str:
    return f"config.json of {name}, read in AI-Hypercomputer/maxtext, hf_model_configs.py"


def _profiler(name: str) -> str:
    return f"config.json of {name}, read in citsjtu2020/LLM-Prof, sglang/Model_Config.md"


def _defaults(name: str, config_class: str) -> str:
    return f"config.json of {name}, the defaults of transformers' {config_class}"


_LATENT: Final = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GEMMA_3: Final = {"tie_word_embeddings": True, "sliding_window": 1024, "sliding_window_pattern": 6}

KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {
        "llama-3.1-8b": KnownModel(
            _config("llama", (32, 4096, 14336, 32, 8, 128256)),
            _maxtext("meta-llama/Llama-3.1-8B"),
            8.03e9,
            _CARD,
        ),
        "llama-3.1-70b": KnownModel(
            _config("llama", (80, 8192, 28672, 64, 8, 128256)),
            _maxtext("meta-llama/Llama-3.1-70B"),
            70.6e9,
            _CARD,
        ),
        "llama-3.1-405b": KnownModel(
            _config("llama", (126, 16384, 53248, 128, 8, 128256)),
            _maxtext("meta-llama/Llama-3.1-405B"),
            406e9,
            _CARD,
        ),
        "llama-3.2-3b": KnownModel(
            _config(
                "llama", (28, 3072, 8192, 24, 8, 128256), head_dim=128, tie_word_embeddings=True
            ),
            _profiler("meta-llama/Llama-3.2-3B"),
            3.21e9,
            _CARD,
        ),
        "qwen2.5-7b": KnownModel(
            _config("qwen2", (28, 3584, 18944, 28, 4, 152064), use_sliding_window=False),
            _profiler("Qwen/Qwen2.5-7B"),
            7.62e9,
            _CARD,
        ),
        "qwen2.5-32b": KnownModel(
            _config("qwen2", (64, 5120, 27648, 40, 8, 152064), use_sliding_window=False),
            _profiler("Qwen/Qwen2.5-32B"),
            32.8e9,
            _CARD,
        ),
        "qwen2.5-72b": KnownModel(
            _config("qwen2", (80, 8192, 29568, 64, 8, 152064), use_sliding_window=False),
            "config.json of Qwen/Qwen2.5-72B",
            72.7e9,
            _CARD,
        ),
        "qwen3-8b": KnownModel(
            _config("qwen3", (36, 4096, 12288, 32, 8, 151936), head_dim=128),
            _maxtext("Qwen/Qwen3-8B"),
            8.19e9,
            _CARD,
        ),
        "qwen3-32b": KnownModel(
            _config("qwen3", (64, 5120, 25600, 64, 8, 151936), head_dim=128),
            _maxtext("Qwen/Qwen3-32B"),
            32.8e9,
            _CARD,
        ),
        "qwen3-30b-a3b": KnownModel(
            _config(
                "qwen3_moe",
                (48, 2048, 6144, 32, 4, 151936),
                head_dim=128,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=768,
            ),
            _maxtext("Qwen/Qwen3-30B-A3B"),
            30.5e9,
            _CARD,
        ),
        "qwen3-235b-a22b": KnownModel(
            _config(
                "qwen3_moe",
                (94, 4096, 12288, 64, 4, 151936),
                head_dim=128,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=1536,
            ),
            _maxtext("Qwen/Qwen3-235B-A22B"),
            235e9,
            _CARD,
        ),
        "mistral-7b": KnownModel(
            _config("mistral", (32, 4096, 14336, 32, 8, 32000), sliding_window=4096),
            _defaults("mistralai/Mistral-7B-v0.1", "MistralConfig"),
            7.24e9,
            _CARD,
        ),
        "mixtral-8x7b": KnownModel(
            _config(
                "mixtral",
                (32, 4096, 14336, 32, 8, 32000),
                num_local_experts=8,
                num_experts_per_tok=2,
                sliding_window=None,
            ),
            _defaults("mistralai/Mixtral-8x7B-v0.1", "MixtralConfig"),
            46.7e9,
            _CARD,
        ),
        "gemma-2-9b": KnownModel(
            _config(
                "gemma2",
                (42, 3584, 14336, 16, 8, 256000),
                head_dim=256,
                sliding_window=4096,
                tie_word_embeddings=True,
            ),
            _maxtext("google/gemma-2-9b"),
            9.24e9,
            "Gemma 2 technical report, table 2",
        ),
        "gemma-2-27b": KnownModel(
            _config(
                "gemma2",
                (46, 4608, 36864, 32, 16, 256000),
                head_dim=128,
                sliding_window=4096,
                tie_word_embeddings=True,
            ),
            _maxtext("google/gemma-2-27b"),
            27.2e9,
            "Gemma 2 technical report, table 2",
        ),
        "gemma-3-12b": KnownModel(
            _config("gemma3_text", (48, 3840, 15360, 16, 8, 262144), head_dim=256, **_GEMMA_3),
            _maxtext("google/gemma-3-12b-pt"),
            11.77e9,
            "Gemma 3 technical report, table 1, without the vision encoder",
        ),
        "gemma-3-27b": KnownModel(
            _config("gemma3_text", (62, 5376, 21504, 32, 16, 262144), head_dim=128, **_GEMMA_3),
            _maxtext("google/gemma-3-27b-pt"),
            27.0e9,
            "Gemma 3 technical report, table 1, without the vision encoder",
        ),
        "phi-3-mini": KnownModel(
            _config("phi3", (32, 3072, 8192, 32, 32, 32064), sliding_window=2047),
            _defaults("microsoft/Phi-3-mini-4k-instruct", "Phi3Config (but for the window)"),
            3.82e9,
            _CARD,
        ),
        "phi-3-mini-128k": KnownModel(
            _config("phi3", (32, 3072, 8192, 32, 32, 32064)),
            _defaults("microsoft/Phi-3-mini-128k-instruct", "Phi3Config (but for its length)"),
            3.82e9,
            "the preset phi3_mini_128k_instruct_en of keras-hub",
        ),
        "llama-2-7b": KnownModel(
            _config("llama", (32, 4096, 11008, 32, 32, 32000)),
            _defaults("meta-llama/Llama-2-7b-hf", "LlamaConfig (but for its length)"),
            6.74e9,
            _CARD,
        ),
        "deepseek-v2-lite": KnownModel(
            _config(
                "deepseek_v2",
                (27, 2048, 10944, 16, 16, 102400),
                n_routed_experts=64,
                n_shared_experts=2,
                num_experts_per_tok=6,
                moe_intermediate_size=1408,
                first_k_dense_replace=1,
                **_LATENT,
            ),
            _maxtext("deepseek-ai/DeepSeek-V2-Lite"),
            15.7e9,
            _CARD,
        ),
        "deepseek-v3": KnownModel(
            _config(
                "deepseek_v3",
                (61, 7168, 18432, 128, 128, 129280),
                n_routed_experts=256,
                n_shared_experts=1,
                num_experts_per_tok=8,
                moe_intermediate_size=2048,
                first_k_dense_replace=3,
                q_lora_rank=1536,
                **_LATENT,
            ),
            _maxtext("deepseek-ai/DeepSeek-V3"),
            671e9,
            "DeepSeek-V3 technical report, abstract",
        ),
        "gpt-oss-120b": KnownModel(
            _config(
                "gpt_oss",
                (36, 2880, 2880, 64, 8, 201088),
                head_dim=64,
                sliding_window=128,
                num_local_experts=128,
                num_experts_per_tok=4,
            ),
            _defaults("openai/gpt-oss-120b", "GptOssConfig"),
            116.8e9,
            "gpt-oss model card, table 1",
        ),
    }
)


def known_model(name: str) -> KnownModel:
    """Return what a name stands for; an organisation before it and "-instruct" do not matter.

    Raises:
        ConfigError: nothing has that name; the message lists what exists.
    """
    plain = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for suffix in ("-instruct", "-it", "-chat", "-base"):
        plain = plain.removesuffix(suffix)
    found = KNOWN_MODELS.get(plain)
    if found is None:
        near = get_close_matches(plain, KNOWN_MODELS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(
            f"no model {name!r} is known{hint} Known: {', '.join(sorted(KNOWN_MODELS))}"
        )
    return found
