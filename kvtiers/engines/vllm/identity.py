"""What kvtiers must know of a vLLM engine: its fingerprint, and its `EngineShape`."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from huggingface_hub import snapshot_download

from kvtiers.connector.shape import EngineShape
from kvtiers.cost.shapes import shape_from_hf_config
from kvtiers.engines.vllm.layout import window_of
from kvtiers.engines.vllm.ranges import check_ranges
from kvtiers.engines.vllm.seeds import engine_hardware, seed_link, seed_speed
from kvtiers.engines.vllm.support import check_groups, vllm_version
from kvtiers.model.errors import UnsupportedEngineError
from kvtiers.model.fingerprint import Fingerprint, Scalar
from kvtiers.model.frame import VERSION
from kvtiers.model.layout import KVLayout

logger = logging.getLogger(__name__)

_WEIGHT_HEADER_NBYTES: Final = 1 << 20
_ROPE_BY_LENGTH: Final = {"longrope", "su"}
# Ways to load that read the folder of the model; others may read anything from anywhere.
_OF_THE_MODELS_FILES: Final = {
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
}
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".gguf")


def engine_fingerprint(vllm_config: Any, layout: KVLayout) -> Fingerprint:
    """Return everything that changes the meaning of this engine's KV bytes."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    facts: dict[str, Scalar] = {
        "frame": VERSION,
        "engine": "vllm",
        "engine_version": vllm_version(),  # whose kernels decide how a page is packed
        "model": str(model.model),
        "revision": str(model.revision),
        "code": f"{getattr(model, 'model_impl', None)}@{getattr(model, 'code_revision', None)}",
        "weights": weights_digest(weights_folder(model, vllm_config.load_config)),
        "hf_config": _digest(_plain(model.hf_config.to_dict())),
        "hf_overrides": _digest(repr(getattr(model, "hf_overrides", None))),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
        "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
        "lora": _digest(repr(vllm_config.lora_config)),
        "attention": _page_format(vllm_config),
    }
    if _ROPE_BY_LENGTH & set(_rope_types(model.hf_config.to_dict())):
        # vLLM takes one of two sets of factors by the length that it is started with.
        facts["max_model_len"] = int(model.max_model_len)
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:  # its layers lie in the same blocks
        facts["draft_model"] = f"{draft.model}@{draft.revision}"
        facts["draft_weights"] = weights_digest(weights_folder(draft, vllm_config.load_config))
    for group in layout.groups:
        facts[f"group{group.group}"] = group.describe_payload()
    return Fingerprint.of(facts)


def engine_shape(vllm_config: Any, kv_cache_config: Any, num_ranges: int = 1) -> EngineShape:
    """Return what kvtiers must know of an engine before its ranks say hello.

    Args:
        num_ranges: of layers, that a block is cut into.

    Raises:
        UnsupportedEngineError: the block hashes cannot name the blocks, or no step could wait
            for one range after the other.
    """
    check_ranges(num_ranges, vllm_config, kv_cache_config)
    block_size = check_groups(kv_cache_config)
    hash_size = int(getattr(kv_cache_config, "hash_block_size", None) or block_size)
    if block_size % hash_size:
        raise UnsupportedEngineError(
            f"block hashes cover {hash_size} tokens, blocks {block_size}; not a whole number"
        )
    seed = shape_from_hf_config(vllm_config.model_config.hf_text_config.to_dict())
    if seed.note:
        logger.info("cost model: %s", seed.note)
    device = str(vllm_config.device_config.device_type)
    hardware = engine_hardware(device)
    parallel = vllm_config.parallel_config
    num_ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    groups = kv_cache_config.kv_cache_groups
    return EngineShape(
        block_size=block_size,
        windows=tuple(window_of(group) for group in groups) * num_ranges,
        num_ranks=num_ranks,
        model=seed.shape,
        max_tokens_per_step=int(vllm_config.scheduler_config.max_num_batched_tokens),
        seed_speed=seed_speed(vllm_config, seed.shape, hardware),
        seed_link=seed_link(device, hardware, sum(len(group.layer_names) for group in groups)),
        device=device,
        hashes_per_block=block_size // hash_size,
        # With asynchronous scheduling the next step already runs on a load that failed.
        loads_in_step=len(groups) == 1
        and not getattr(vllm_config.scheduler_config, "async_scheduling", False),
        num_layer_ranges=num_ranges,
        instance=engine_instance(vllm_config),
        why_not_lasting=why_not_lasting(vllm_config),
    )


def why_not_lasting(vllm_config: Any) -> str:
    """Return why this engine's KV must not be served to another process; "" where it may."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash"):
        return (
            f"block hashes by {algorithm} are seeded at random in every process; write "
            "--prefix-caching-hash-algo sha256"
        )
    if vllm_config.lora_config is not None:
        return "LoRA adapters go into vLLM's block hashes by their names, not by their contents"
    load = vllm_config.load_config
    if str(load.load_format) == "dummy":
        return "the weights are random (load_format dummy)"
    if str(load.load_format) not in _OF_THE_MODELS_FILES:
        return (
            f"by load_format {load.load_format} the weights need not be those of the model's "
            "files, so that nobody can tell whether they have changed; write --load-format auto"
        )
    if weights_folder(vllm_config.model_config, load) is None:
        return (
            f"the weights of model {vllm_config.model_config.model!r} were not found on this "
            "machine, so that nobody can tell whether they have changed; name a local folder"
        )
    return ""


def engine_instance(vllm_config: Any) -> str:
    """Return the folder of an engine in private stores: that of its restart is the same."""
    return str(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def weights_folder(model_config: Any, load_config: Any) -> Path | None:
    """Return where a model's weights lie on this machine; no network is asked.

    Where vLLM downloads to another place, those of the usual one may be older.
    """
    name = str(model_config.model)
    folder = Path(name)
    if not folder.is_dir():
        try:
            found = snapshot_download(
                name,
                revision=model_config.revision,
                cache_dir=getattr(load_config, "download_dir", None),
                local_files_only=True,
            )
        except (OSError, ValueError):  # not there, or no name of a repository
            return None
        folder = Path(found)
    # Without any, vLLM has them from elsewhere.
    return folder if any(it.suffix in _WEIGHT_SUFFIXES for it in folder.iterdir()) else None


def weights_digest(folder: Path | None) -> str:
    """Return a digest of a local model's weights and code: starts, sizes and times of its files.

    "unresolved" where they are not on this machine; then nothing outlives the engine.
    """
    if folder is None:
        return "unresolved"
    digest = blake3()
    for path in sorted(folder.iterdir()):
        if path.suffix in (*_WEIGHT_SUFFIXES, ".py") or path.name == "config.json":
            stat = path.stat()
            digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
            with path.open("rb") as file:
                digest.update(file.read(_WEIGHT_HEADER_NBYTES))
    return digest.hexdigest()


def _page_format(vllm_config: Any) -> str:
    """Return who wrote the pages: shapes and strides do not say how a kernel packs them.

    Kernels for CPUs order a page by the instructions that the CPU has.
    """
    device = str(vllm_config.device_config.device_type)
    compilation = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None) or {}
    backends = {
        layer.attn_backend.get_name() for layer in layers.values() if hasattr(layer, "attn_backend")
    }
    parts = [device, *sorted(backends)]
    if device == "cpu":
        amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
        parts += [platform.machine(), f"amx={amx}", f"avx512={avx512}"]
    return ":".join(parts)


def _rope_types(config: object) -> Iterator[str]:
    """Yield the kinds of rotary embedding that a model's configuration names, at any depth."""
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        if key in ("rope_type", "type") and isinstance(value, str):
            yield value
        else:
            yield from _rope_types(value)


def _plain(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()
