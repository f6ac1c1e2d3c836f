"""How much is reloaded, from where, and that it is the reloaded bytes that answer."""

from __future__ import annotations

import pytest

from kvtiers.bench.random_model import TINY, TINY_HYBRID
from kvtiers.observe.metrics import BLOCKS_FAILED, BLOCKS_OFFLOADED, OFFLOADS_DROPPED

from .answers import differences, random_prompt
from .harness import Engine, EngineOptions, Engines
from .tiers import SLOT_NBYTES, Tiers, dram, memory, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOMY = EngineOptions(num_gpu_blocks=512)
BLOCK = ROOMY.block_size
SYNC_AND_ASYNC = pytest.mark.parametrize("sync_below", ["1s", "0ms"], ids=["sync", "async"])


def with_dram(engines: Engines, options: EngineOptions = ROOMY, **sections: object) -> Engine:
    return engines.get(tiered(options, dram(**sections)))


@SYNC_AND_ASYNC
@pytest.mark.parametrize("num_tokens", [20 * BLOCK + d for d in (-1, 0, 1)])
def test_all_full_blocks_but_the_last_token_are_reloaded(
    engines: Engines, num_tokens: int, sync_below: str
) -> None:
    engine = with_dram(engines, reload={"sync_below": sync_below})
    tiers = Tiers(engine)
    prompt = random_prompt(num_tokens, seed=7)
    [first] = engine.generate([prompt])
    assert engine.reset_prefix_cache()
    [again] = engine.generate([prompt])
    expected = (num_tokens - 1) // BLOCK * BLOCK
    assert tiers.reloaded_tokens() == expected
    assert (again.num_local_cached_tokens, again.num_external_cached_tokens) == (0, expected)
    assert not differences({"it": first}, {"it": again})


def test_only_what_lies_beyond_the_engines_own_prefix_cache_is_reloaded(engines: Engines) -> None:
    engine = with_dram(engines)
    prompt = random_prompt(20 * BLOCK + 5, seed=8)
    [first] = engine.generate([prompt])
    assert engine.reset_prefix_cache()
    engine.generate([prompt[: 8 * BLOCK + 1]])
    tiers = Tiers(engine)
    [again] = engine.generate([prompt])
    assert (again.num_local_cached_tokens, again.num_external_cached_tokens) == (
        8 * BLOCK,
        12 * BLOCK,
    )
    assert tiers.reloaded_tokens() == 12 * BLOCK
    assert not differences({"it": first}, {"it": again})


def test_a_common_prefix_of_another_prompt_is_reloaded(engines: Engines) -> None:
    engine = with_dram(engines)
    common = random_prompt(8 * BLOCK, seed=9)
    engine.generate([common + random_prompt(12 * BLOCK, seed=10)])
    other = common + random_prompt(11 * BLOCK, seed=11)
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    [reloaded] = engine.generate([other])
    assert tiers.reloaded_tokens() == 8 * BLOCK
    engine.clear()
    [computed] = engine.generate([other])
    assert not differences({"it": computed}, {"it": reloaded})


def test_blocks_of_the_output_are_offloaded_and_reloaded(engines: Engines) -> None:
    engine = with_dram(engines)
    prompt = random_prompt(3 * BLOCK, seed=12)
    [first] = engine.generate([prompt], 5 * BLOCK)
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    longer = prompt + first.token_ids[:-1]
    [again] = engine.generate([longer], 4)
    assert tiers.reloaded_tokens() == (len(longer) - 1) // BLOCK * BLOCK
    assert again.token_ids[0] == first.token_ids[-1]


def test_a_shared_prefix_is_offloaded_once(engines: Engines) -> None:
    engine = with_dram(engines)
    tiers = Tiers(engine)
    common = random_prompt(10 * BLOCK, seed=13)
    prompts = [common + random_prompt(2 * BLOCK, seed=14 + i) for i in range(4)]
    engine.generate(prompts, 1)
    tiers.assert_at_rest()
    assert tiers.count(BLOCKS_OFFLOADED, "dram") == 10 + 4 * 2


def test_salts_do_not_share(engines: Engines) -> None:
    engine = with_dram(engines)
    prompt = random_prompt(10 * BLOCK + 1, seed=18)
    engine.generate([prompt], cache_salt="red")
    for salt, expected in (("blue", 0), (None, 0), ("red", 10 * BLOCK)):
        assert engine.reset_prefix_cache()
        tiers = Tiers(engine)
        engine.generate([prompt], cache_salt=salt)
        assert tiers.reloaded_tokens() == expected, salt


@SYNC_AND_ASYNC
@pytest.mark.parametrize("model", [TINY, TINY_HYBRID], ids=["one KV group", "two KV groups"])
def test_reloaded_blocks_lie_where_computed_ones_did(
    engines: Engines, model: object, sync_below: str
) -> None:
    """Block order is invisible to the request that loads: compare the KV block by block."""
    import torch  # noqa: PLC0415

    options = EngineOptions(model=model, num_gpu_blocks=512)
    engine = with_dram(engines, options, reload={"sync_below": sync_below})
    prompt = random_prompt(15 * BLOCK + 3, seed=19)
    engine.generate([prompt])
    computed = engine.inside.kv_of_prompt(prompt)
    assert engine.reset_prefix_cache()
    engine.inside.spoil_kv()
    tiers = Tiers(engine)
    engine.generate([prompt])
    assert tiers.reloaded_tokens() == 15 * BLOCK
    reloaded = engine.inside.kv_of_prompt(prompt)
    assert computed.keys() == reloaded.keys()
    for layer, blocks in computed.items():
        assert torch.equal(blocks, reloaded[layer]), layer


def test_spoiled_frames_change_the_tokens(engines: Engines) -> None:
    """The control: were the reloaded bytes not used, spoiling them would change nothing."""
    engine = with_dram(engines)
    prompt = random_prompt(20 * BLOCK, seed=20)
    [first] = engine.generate([prompt], 16)
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    assert tiers.spoil_slab() >= 20
    [again] = engine.generate([prompt], 16)
    assert tiers.reloaded_tokens() == 19 * BLOCK
    assert again.token_ids != first.token_ids


def test_spoiled_frames_are_found_and_computed_where_integrity_is_all(engines: Engines) -> None:
    engine = with_dram(engines, integrity="all")
    prompt = random_prompt(20 * BLOCK, seed=20)
    [first] = engine.generate([prompt], 16)
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    tiers.spoil_slab()
    [again] = engine.generate([prompt], 16)
    assert tiers.count(BLOCKS_FAILED, "corrupt") == 19
    assert not differences({"it": first}, {"it": again})
    assert engine.reset_prefix_cache()
    [third] = engine.generate([prompt], 16)
    assert tiers.reloaded_tokens() == 19 * BLOCK  # computed anew, stored anew, reloaded
    assert not differences({"it": first}, {"it": third})
    tiers.assert_at_rest()


def test_a_request_larger_than_dram_reloads_its_head(engines: Engines) -> None:
    config = dram(f"{8 * SLOT_NBYTES // 1024}KiB")
    engine = engines.get(tiered(ROOMY, config))
    tiers = Tiers(engine)
    prompt = random_prompt(30 * BLOCK + 1, seed=21)
    [first] = engine.generate([prompt])
    assert tiers.count(OFFLOADS_DROPPED, "no_room") > 0
    assert engine.reset_prefix_cache()
    [again] = engine.generate([prompt])
    assert tiers.reloaded_tokens() == 8 * BLOCK
    assert not differences({"it": first}, {"it": again})
    tiers.assert_at_rest()


def test_a_request_larger_than_dram_reloads_whole_from_the_tier_below(engines: Engines) -> None:
    """Its blocks flow through a DRAM of eight slots, down and up."""
    config = dram(f"{8 * SLOT_NBYTES // 1024}KiB", memory())
    engine = engines.get(tiered(ROOMY, config))
    prompt = random_prompt(30 * BLOCK + 1, seed=24)
    [first] = engine.generate([prompt], 24)
    engine.settle()
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    [again] = engine.generate([prompt], 24)
    assert tiers.reloaded_tokens("dram") + tiers.reloaded_tokens("memory") == 30 * BLOCK
    assert tiers.reloaded_tokens("memory") >= 22 * BLOCK
    assert not differences({"it": first}, {"it": again})
    tiers.assert_at_rest()


def test_a_reset_of_the_connector_forgets_everything(engines: Engines) -> None:
    engine = with_dram(engines)
    prompt = random_prompt(10 * BLOCK + 1, seed=22)
    engine.generate([prompt])
    assert engine.reset_prefix_cache(reset_connector=True)
    tiers = Tiers(engine)
    engine.generate([prompt])
    assert tiers.reloaded_tokens() == 0
    assert engine.reset_prefix_cache()
    engine.generate([prompt])
    assert tiers.reloaded_tokens() == 10 * BLOCK
    tiers.assert_at_rest()


def test_a_request_that_may_not_read_the_cache_is_not_counted(engines: Engines) -> None:
    engine = with_dram(engines)
    prompt = random_prompt(10 * BLOCK + 1, seed=23)
    engine.generate([prompt])
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    name = engine.add(prompt, 4)
    engine.inside.scheduler.requests[engine.internal_id(name)].skip_reading_prefix_cache = True
    engine.run()
    assert tiers.reloaded_tokens() == 0
    assert tiers.count("kvtiers_lookup_tokens_total") == 0
