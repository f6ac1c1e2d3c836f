"""Everything that changes the meaning of KV bytes changes the fingerprint; nothing else does."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import KVQuantMode

from kvtiers.engines.vllm.identity import (
    engine_fingerprint,
    engine_shape,
    weights_digest,
    weights_folder,
    why_not_lasting,
)
from kvtiers.engines.vllm.layout import layout_of, window_of
from kvtiers.engines.vllm.support import check_engine, check_groups
from kvtiers.model.errors import UnsupportedEngineError

from .fakes import full, kv_cache_config, kv_caches, sliding, vllm_config


def digest(config=None, cache=None, *, token_major=False):
    config = vllm_config() if config is None else config
    cache = kv_cache_config(full()) if cache is None else cache
    layout, _ = layout_of(cache, kv_caches(cache, token_major=token_major))
    return engine_fingerprint(config, layout).digest


def test_fingerprint_is_the_same_for_the_same_engine():
    assert digest() == digest()


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__revision": "v2"},
        {"model_config__model": "some/other"},
        {"model_config__code_revision": "v2"},
        {"model_config__model_impl": "transformers"},
        {"model_config__dtype": "torch.float16"},
        {"model_config__quantization": "awq"},
        {"model_config__hf_overrides": {"rope_theta": 1e6}},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
        {"hf__rope_theta": 5e5},
        {"hf__rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"hf__sliding_window": 4096},
        {"device_config__device_type": "cuda"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_kv_changes_the_fingerprint(change):
    """R39, R44: revision, model, dtypes, quantisation, positions, parallel layout."""
    assert digest(vllm_config(**change)) != digest()


@pytest.mark.parametrize(
    "cache",
    [kv_cache_config(full(32)), kv_cache_config(sliding(64)), kv_cache_config(full(), sliding(64))],
    ids=["block size", "window", "groups"],
)
def test_what_changes_blocks_changes_the_fingerprint(cache):
    assert digest(cache=cache) != digest()


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_length_changes_the_fingerprint_where_positions_depend_on_it(where):
    """vLLM rotates by the long or the short factors, as `max_model_len` is above the trained."""
    rope = {f"hf__{where}": {"all": {"rope_type": "longrope"}, "rope_theta": 1e4}}
    long, short = (vllm_config(**rope, model_config__max_model_len=n) for n in (8192, 4096))
    assert digest(long) != digest(short)
    assert digest(long) == digest(long)


@pytest.mark.parametrize("feature", ["_is_amx_tile_supported", "_is_avx512_supported"])
def test_instructions_of_the_cpu_change_the_fingerprint(feature, monkeypatch):
    """vLLM packs the same page in another order where it has AMX: a folder may change machines."""
    present = getattr(torch.cpu, feature)()
    before = digest()
    monkeypatch.setattr(torch.cpu, feature, lambda: not present)
    assert digest() != before


def test_release_of_vllm_changes_the_fingerprint(monkeypatch):
    before = digest()
    monkeypatch.setattr("kvtiers.engines.vllm.identity.vllm_version", lambda: "0.99")
    assert digest() != before


def test_draft_model_changes_the_fingerprint(tmp_path):
    """Of two drafts with equal shapes each would propose by the other's keys and values."""
    digests = {digest()}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
        config = vllm_config()
        draft = SimpleNamespace(model=str(tmp_path / name), revision=None)
        config.speculative_config = SimpleNamespace(draft_model_config=draft)
        digests.add(digest(config))
    assert len(digests) == 3


def test_attention_backend_changes_the_fingerprint():
    def with_backend(name):
        config = vllm_config()
        layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: name))
        layers = {"layer0": layer, "moe": SimpleNamespace()}
        config.compilation_config = SimpleNamespace(static_forward_context=layers)
        return config

    assert digest(with_backend("A")) == digest(with_backend("A"))
    assert digest(with_backend("A")) != digest(with_backend("B"))


def test_lora_configuration_changes_the_fingerprint():
    """R47: adapters are in the block hashes; how many and how large they may be is here."""
    config = vllm_config()
    config.lora_config = SimpleNamespace(max_lora_rank=16)
    assert digest(config) != digest()


def test_order_of_heads_and_tokens_changes_the_fingerprint():
    """R84: HND and NHD pages have equal sizes and other bytes."""
    assert digest(token_major=True) != digest(token_major=False)


@pytest.mark.parametrize(
    "change",
    [{"scheduler_config__max_num_batched_tokens": 512}, {"model_config__max_model_len": 8192}],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_change_kv_keeps_the_fingerprint(change):
    assert digest(vllm_config(**change)) == digest()


def test_a_local_models_weights_are_part_of_it(tmp_path):
    """R39, R44: the same path, other weights; and the same weights twice."""
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    weights = tmp_path / "model.safetensors"
    config = vllm_config(model_config__model=str(tmp_path))

    def digests(content, time_ns=1):
        weights.write_bytes(content)
        os.utime(weights, ns=(time_ns, time_ns))
        return weights_digest(tmp_path), digest(config)

    first = digests(b"one" * 100)
    assert digests(b"one" * 100) == first
    long = bytes(2**20)  # of which no more is read
    others = [digests(b"two" * 100), digests(long), digests(long + b"x"), digests(long, 2)]
    (tmp_path / "modeling.py").write_text("code of its own")
    others.append(digests(long, 2))
    for values in zip(first, *others, strict=True):
        assert len(set(values)) == 6


def test_weights_are_those_of_the_place_that_vllm_downloads_to(tmp_path, monkeypatch):
    """R39: under the same name an older revision may lie in the usual place."""
    for place in ("usual", "named"):
        folder = tmp_path / place / "models--some--model"
        (folder / "snapshots" / place).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(place)
        (folder / "snapshots" / place / "model.safetensors").write_bytes(b"old")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    usual, named = (
        vllm_config(load_config__download_dir=where) for where in (None, str(tmp_path / "named"))
    )
    found = [weights_folder(it.model_config, it.load_config) for it in (usual, named)]
    assert [folder.name for folder in found] == ["usual", "named"]
    before = digest(named)
    (found[1] / "model.safetensors").write_bytes(b"new")
    assert digest(named) != before


def test_a_model_that_is_not_here_has_no_digest():
    config = vllm_config()
    assert weights_folder(config.model_config, config.load_config) is None
    assert weights_digest(None) == "unresolved"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "seeded at random"),
        ({"load_config__load_format": "dummy"}, "random"),
        ({"load_config__load_format": "tensorizer"}, "tensorizer the weights need not be"),
        ({"model_config__model": "some/model"}, "not found on this machine"),
    ],
)
def test_keys_that_mean_nothing_elsewhere_are_not_lasting(tmp_path, change, reason):
    """R60: what another process could misread is never offered to one."""
    here = {"model_config__model": str(tmp_path)}
    assert "not found on this machine" in why_not_lasting(vllm_config(**here)), "none in it"
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert why_not_lasting(vllm_config(**here)) == ""
    assert reason in why_not_lasting(vllm_config(**{**here, **change}))


def test_adapters_by_name_are_not_lasting(tmp_path):
    config = vllm_config(model_config__model=str(tmp_path))
    config.lora_config = object()
    assert "LoRA" in why_not_lasting(config)


# -- groups and their windows -----------------------------------------------------------------


def test_only_a_group_managed_as_a_window_has_one():
    """R89: without the hybrid manager, vLLM notes a window in a full-attention specification,
    merged over layers of which some have none; its blocks serve prefixes of any length."""
    windows = [
        window_of(group)
        for group in kv_cache_config(full(), sliding(64), full(sliding_window=64)).kv_cache_groups
    ]
    assert windows == [None, 64, None]


def test_merged_specification_of_full_and_sliding_layers_has_no_window():
    merged = type(full()).merge([full(), full(sliding_window=64)])
    (group,) = kv_cache_config(merged).kv_cache_groups
    assert window_of(group) is None


def test_engine_shape_tells_what_the_engine_can():
    shape = engine_shape(vllm_config(), kv_cache_config(full()))
    assert (shape.block_size, shape.windows, shape.loads_in_step) == (16, (None,), True)


@pytest.mark.parametrize(
    ("change", "specs"),
    [({"scheduler_config__async_scheduling": True}, [full()]), ({}, [full(), sliding(64)])],
    ids=["asynchronous scheduling", "several groups"],
)
def test_no_load_within_a_step_where_its_failure_could_not_be_taken_back(change, specs):
    """R32: the step after it is scheduled already, or failed blocks cannot be named."""
    shape = engine_shape(vllm_config(**change), kv_cache_config(*specs))
    assert not shape.loads_in_step


def test_groups_of_different_blocks_are_refused_by_size():
    """R80: 256 and 64 tokens."""
    with pytest.raises(UnsupportedEngineError, match=r"\[64, 256\]"):
        check_groups(kv_cache_config(full(256), sliding(1024, 64)))


def test_block_hashes_that_do_not_end_where_blocks_do_are_refused():
    """R80: 16 tokens in hashes of 12."""
    cache = kv_cache_config(full(), hash_block_size=12)
    with pytest.raises(UnsupportedEngineError, match=r"hashes cover 12 tokens, blocks 16"):
        engine_shape(vllm_config(), cache)


@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "NVFP4"])
def test_pages_that_do_not_hold_all_of_their_kv_are_refused(mode):
    """R79: their scales lie elsewhere, or they are packed in a way that was not tried."""
    with pytest.raises(UnsupportedEngineError, match=f"{mode} is not served.*kv_cache_dtype"):
        check_groups(kv_cache_config(full(kv_quant_mode=KVQuantMode[mode])))


def test_tensors_of_another_form_are_refused_with_their_shape():
    """R84: with K and V in an axis of their own nobody could tell which of two is which."""
    cache = kv_cache_config(full())
    tensors = {name: tensor.unsqueeze(1) for name, tensor in kv_caches(cache).items()}
    with pytest.raises(UnsupportedEngineError, match=r"layer0: .*\(8, 1, 2, 16, 8\).*tokens"):
        layout_of(cache, tensors)


def test_recurrent_state_is_refused_by_name():
    """R81: what cannot be cut at a block must not be restored there."""
    mamba = pytest.importorskip("vllm.v1.kv_cache_interface").MambaSpec
    spec = mamba(16, shapes=((4, 4),), dtypes=("bfloat16",))
    with pytest.raises(UnsupportedEngineError, match=r"group 0, layer layer0: MambaSpec"):
        check_groups(kv_cache_config(spec))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_producer"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context"),
        ({"cache_config__enable_prefix_caching": False}, "prefix caching is off"),
    ],
    ids=["role", "pipeline", "decode context", "prefill context", "no prefix caching"],
)
def test_an_engine_that_cannot_be_served_is_refused_at_start(change, name):
    with pytest.raises(UnsupportedEngineError, match=name):
        check_engine(vllm_config(**change))


def test_attention_that_looks_ahead_is_refused():
    """A prefix does not determine its KV: another end changes what lies before it."""
    with pytest.raises(UnsupportedEngineError, match="not causal"):
        check_groups(kv_cache_config(full(non_causal=True)))


def test_states_that_only_derive_from_attention_are_refused():
    """By exact type: a subclass may hold what a prefix does not determine."""

    class Derived(type(full())):
        pass

    spec = full()
    derived = Derived(
        16, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size, dtype=spec.dtype
    )
    with pytest.raises(UnsupportedEngineError, match="Derived"):
        check_groups(kv_cache_config(derived))
