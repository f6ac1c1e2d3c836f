import itertools
import json
from dataclasses import replace

import pytest

from kvtiers.model.config import parse_config
from kvtiers.model.errors import CapacityError
from kvtiers.simulate import sizing_run
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.goal import Goal, Prices
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.replay import ReplayPlan, replay
from kvtiers.simulate.sizes import Size, candidates, frame_nbytes_per_token
from kvtiers.simulate.sizing import SizingPlan
from kvtiers.simulate.sizing_answer import headline, sentences
from kvtiers.simulate.sizing_report import write_sizing
from kvtiers.simulate.sizing_run import size_tiers
from kvtiers.simulate.sizing_words import (
    curve_rows,
    details,
    dtype_rows,
    size_text,
    trial_rows,
)
from kvtiers.simulate.trace import Trace

GIB = 2**30
MACHINE = MachinePlan("llama-3.1-8b", "l40s", utilization=0.7)
DOCUMENTS = generate(Workload("documents", 100, requests_per_second=0.4, seed=3))


def size(goal="ttft-p90=0.7x", **more):
    plan = {"trace": DOCUMENTS, "machine": MACHINE, "goal": Goal.parse(goal), "warmup": 0.2}
    plan |= more
    return size_tiers(SizingPlan(**plan))


@pytest.fixture(scope="module")
def halved():
    return size(kv_dtypes=("bf16", "fp8"))


def test_the_cheapest_replayed_size_that_meets_the_goal_is_chosen(halved):
    before = halved.trials[0].replay.ttft.p90
    for dtype in ("bf16", "fp8"):
        chosen = halved.chosen[dtype]
        assert chosen.replay.ttft.p90 <= 0.7 * before
        met = [t.cost for t in halved.trials if t.kv_dtype == dtype and t.met]
        assert chosen.cost == min(met)
    assert halved.complete
    assert halved.chosen["bf16"].cost < halved.trials[1].cost


def test_the_yaml_is_the_chosen_size(halved):
    config = parse_config(halved.yaml)
    chosen = halved.chosen["bf16"].size
    assert config.dram.capacity == chosen.dram_nbytes
    assert sum(tier.capacity for tier in config.stores) == chosen.nvme_nbytes


def test_the_answer_names_sizes_knee_limit_and_what_fp8_changes(halved):
    text = " ".join(sentences(halved))
    for word in (
        "Goal: p90 TTFT",
        "bf16: cheapest found: DRAM",
        "What binds:",
        "Knee of the hit curve",
    ):
        assert word in text
    assert "larger tiers are taken never to do worse" in text


def test_the_answer_for_each_data_type_is_in_the_first_lines(halved):
    about, goal, bf16, fp8, binds = headline(halved)
    assert "100 requests of documents" in about
    before = halved.trials[0].replay.ttft.p90
    assert goal.endswith(f"{0.7 * before:.2f} s of {before:.2f} s.")
    for text, dtype in ((bf16, "bf16"), (fp8, "fp8")):
        chosen = halved.chosen[dtype]
        needed = f"cheapest found: {chosen.size}"
        if not chosen.size.dram_nbytes:
            needed = "the goal is met without tiers"
        assert text.startswith(f"{dtype}: {needed}, p90 TTFT ")
        assert f"({chosen.replay.ttft.p90 / before:.2f} times" in text
    assert binds.startswith("What binds: ")


def test_data_types_stand_side_by_side(halved):
    header, *rows = dtype_rows(halved)
    assert header == ("KV cache in", "bf16", "fp8")
    by_name = {name: cells for name, *cells in rows}
    pools = [halved.pools[dtype].num_tokens for dtype in ("bf16", "fp8")]
    assert pools[1] == pytest.approx(2 * pools[0], rel=0.01)
    assert by_name["KV pool in HBM, tokens"] == [f"{num:,}" for num in pools]
    assert by_name["needed"] == [str(halved.chosen[dtype].size) for dtype in ("bf16", "fp8")]
    assert {"p90 TTFT without tiers", "p90 TTFT with that", "price"} <= set(by_name)


def test_a_doubling_adds_what_it_says(halved):
    header, *rows = curve_rows(halved)
    assert len(header) == 5
    for row, after in itertools.pairwise(rows):
        for column in (1, 3):
            now, then = (float(cell[column].rstrip("%")) for cell in (row, after))
            adds = float(row[column + 1].removesuffix(" points"))
            assert then - now == pytest.approx(adds, abs=0.11)
    assert float(rows[-1][1].rstrip("%")) == pytest.approx(100 * halved.curve.rates[-1], abs=0.11)


GRID = [
    Size(0, 0),
    *(Size(d * GIB, n * GIB) for d, n in itertools.product((2, 4, 8, 16), (0, 8, 16, 64))),
    Size(128 * GIB, 0),
]


@pytest.fixture(scope="module")
def every_size():
    """Every size of a small grid, replayed."""
    shared = {"trace": DOCUMENTS, "machine": MACHINE, "warmup": 0.2}
    return {it: replay(ReplayPlan(**shared, config=it.config("lru"))) for it in GRID}


@pytest.mark.parametrize("goal", ["ttft-p90=0.7x", "ttft-p90=0.9x", "hit-rate=0.35"])
def test_the_answer_is_that_of_brute_force(goal, every_size, monkeypatch):
    monkeypatch.setattr(sizing_run, "candidates", lambda *_nbytes: GRID)
    found = size(goal)
    bare = every_size[GRID[0]].ttft.p90
    met = [
        it
        for it, r in every_size.items()
        if found.plan.goal.met(r.ttft.p90, r.tokens.hit_rate, bare)
    ]
    cheapest = min(met, key=lambda it: Prices().of(it.dram_nbytes, it.nvme_nbytes))
    assert found.chosen["bf16"].size == cheapest
    assert len(found.trials) < len(GRID) / 2
    proof = found.proofs["bf16"]
    accounted = proof.num_replayed + proof.num_dearer + proof.num_smaller
    assert (accounted, proof.undecided) == (len(GRID), ())


def test_a_goal_that_no_size_meets_gets_the_cheapest_that_brings_most_of_it():
    found = size("ttft-p90=0.05x")
    assert found.chosen == {}
    nearest, ceiling = found.nearest["bf16"].replay.ttft.p90, found.trials[1].replay.ttft.p90
    bare = found.trials[0].replay.ttft.p90
    assert bare - nearest >= 0.9 * (bare - ceiling)
    assert found.nearest["bf16"].cost < found.trials[1].cost
    text = " ".join(sentences(found))
    assert "no size meets the goal. The cheapest that brings nine tenths" in text
    assert found.to_plain()["goal_met"] is False


def test_engines_that_fall_behind_get_company():
    found = size("ttft-p90=0.9x", arrivals=ArrivalPlan(speed=20.0), num_engines=None)
    first, *_ = found.engines
    assert (first.num_engines, first.keeps_up) == (1, False)
    assert found.num_engines > 1
    assert found.bare("bf16").replay.keeps_up
    assert found.num_requests < len(DOCUMENTS.requests)
    text = " ".join(sentences(found))
    assert "One engine without tiers falls behind" in text
    assert f"Sized for {found.num_engines} engines that share the trace" in text
    fewer = found.engines[-1]
    assert fewer.num_engines == found.num_engines - 1
    assert fewer.size.dram_nbytes > 0
    assert ("Tiers spare an engine" in text) == (
        fewer.keeps_up and fewer.meets(found.limit_seconds)
    )
    assert "Sizes are those of each engine, prices those of all." in text


def test_sizes_are_of_each_engine_and_the_price_is_of_all():
    found = size("hit-rate=0.4", num_engines=2)
    chosen = found.chosen["bf16"]
    text = " ".join(headline(found))
    assert f"{chosen.size} for each engine" in text
    assert f"price {chosen.cost:,.0f} for 2 engines" in text
    by_name = dict(dtype_rows(found))
    assert by_name["needed by each engine"] == str(chosen.size)
    twice = Size(2 * chosen.size.dram_nbytes, 2 * chosen.size.nvme_nbytes)
    assert by_name["needed by all 2 engines"] == str(twice)
    assert by_name["price of that"] == f"{chosen.cost:,.0f}"


def test_an_engine_that_keeps_up_stays_alone():
    found = size("hit-rate=0.4", num_engines=None)
    assert [it.keeps_up for it in found.engines] == [True]
    assert found.num_engines == 1


def test_rules_that_hit_more_are_replayed():
    found = size("hit-rate=0.3", policies=("lru", "cost"))
    assert [curve.policy for curve in found.policy_curves] == ["lru", "cost"]
    lru = found.policy_curves[0]
    assert list(lru.rates) == sorted(lru.rates)
    assert lru.rates[-1] == pytest.approx(found.curve.rates[-1], abs=0.02)


def test_an_interrupt_answers_with_what_was_found():
    def told(what):
        def progress(ended, _num):
            if "NVMe" in what and ended > 5:
                raise KeyboardInterrupt

        return progress

    plan = SizingPlan(trace=DOCUMENTS, machine=MACHINE, goal=Goal.parse("ttft-p90=0.7x"))
    found = size_tiers(plan, told)
    assert (found.interrupted, found.complete, len(found.trials)) == (True, False, 2)
    assert found.chosen["bf16"] is found.trials[1]
    assert found.proofs["bf16"].undecided
    assert "It was interrupted" in " ".join(sentences(found))


def facts(sizing):
    """What was found, but for how long it took."""
    plain = sizing.to_plain()
    for answer in (plain, plain["more"] or {"trials": []}):
        for trial in answer["trials"]:
            del trial["replay"]["cpu_seconds"]
    return plain


@pytest.mark.parametrize("speed", [1.0, 20.0])
def test_one_process_and_some_give_the_same_answer(speed):
    more = {
        "arrivals": ArrivalPlan(speed=speed),
        "num_engines": None,
        "kv_dtypes": ("bf16", "fp8"),
        "policies": ("lru", "s3-fifo"),
    }
    alone, other = (size("ttft-p90=0.7x", num_jobs=num, **more) for num in (1, 2))
    assert (alone.num_engines > 1) == (speed > 1)
    assert facts(other) == facts(alone)


def test_report_files_are_written(halved, tmp_path):
    written, _ = write_sizing(halved, tmp_path, "size", {"goal": "ttft-p90=0.5x"})
    assert {path.name for path in written} >= {"size.json", "size.html"}
    page = (tmp_path / "size.html").read_text()
    assert "kind: dram" in page
    assert "What was replayed" in page
    assert "ttft-p90=0.5x" in page
    assert json.loads((tmp_path / "size.json").read_text())["about"] == {"goal": "ttft-p90=0.5x"}


def test_a_goal_that_no_cache_meets_names_the_limit():
    found = size("hit-rate=0.99", trace=generate(Workload("mixed", 60)))
    assert found.chosen == {}
    assert found.limit.startswith("the trace: ")


def test_hit_rate_is_a_goal():
    found = size("hit-rate=0.4")
    assert found.chosen["bf16"].replay.tokens.hit_rate >= 0.4


def test_money_buys_the_best_size_within_it():
    found = size("cost=80")
    chosen = found.chosen["bf16"]
    assert 0 <= chosen.cost <= 80
    others = [t.replay.ttft.p90 for t in found.trials if t.cost <= 80]
    assert chosen.replay.ttft.p90 == min(others)


def test_time_that_is_up_is_said():
    found = size(max_seconds=0.0)
    assert not found.complete
    assert len(found.trials) == 1
    assert "The time was up (--max-seconds) before all sizes were compared" in " ".join(
        sentences(found)
    )
    assert found.limit.startswith("not known")


def test_what_would_not_start_is_refused_before_anything_is_replayed():
    with pytest.raises(CapacityError, match="does not even load"):
        size(machine=MachinePlan("llama-3.1-70b", "h100"))


def test_a_trace_without_any_reuse_is_sized_too():
    requests = generate(Workload("mixed", 30)).requests
    lonely = tuple(
        replace(request, block_ids=request.block_ids + 10**6 * number)
        for number, request in enumerate(requests)
    )
    found = size(trace=Trace("lonely", 512, lonely))
    assert found.chosen == {}
    assert found.infinite_hit_rate == 0.0
    assert headline(found)[2].startswith("bf16: tiers bring nothing here: HBM alone hits 0.0%")
    text = " ".join(details(found))
    assert "No whole block of 512 tokens is ever used again: caches of no size hit anything" in text
    assert "0.00 million" not in text
    proof = found.proofs["bf16"]
    assert (proof.num_dearer, proof.undecided) == (0, ())
    replayed = "all" if proof.num_sizes == 2 else "2"
    assert f"bf16, of {proof.num_sizes} sizes (powers of two): {replayed} replayed" in text
    assert "as much as the answer" not in text
    by_name = dict(dtype_rows(found))
    assert by_name["the goal"] == "not met"
    assert "needed" not in by_name


def test_what_hbm_holds_alone_is_said_and_the_knee_is_not_beyond_it():
    chat = generate(Workload("chat", 40, seed=1))
    found = size(trace=chat, machine=MachinePlan("llama-3.1-8b", "h100"))
    assert found.curve.knee_tokens <= found.curve.working_set_tokens
    text = " ".join(details(found))
    assert "The KV pool in HBM holds that: " in text
    assert "Knee" not in text


def test_a_goal_of_money_is_not_called_met_without_tiers():
    found = size("cost=1")
    assert not found.chosen["bf16"].size.dram_nbytes
    text = " ".join(sentences(found))
    assert "Goal: lowest p90 TTFT for a price of at most 1." in text
    assert "bf16: nothing for that money is faster than no tiers, p90 TTFT" in text
    assert "What binds: the money: with all that is ever used again in DRAM p90 TTFT is" in text
    assert "the goal is met" not in text
    assert {row[-1] for row in trial_rows(found)} == {"within", "beyond"}
    assert "the goal" not in dict(dtype_rows(found))


def test_what_was_not_tried_is_not_claimed():
    found = size("hit-rate=0.4", max_seconds=0.0, arrivals=ArrivalPlan(20.0), num_engines=None)
    assert found.num_engines > 1
    text = " ".join(details(found))
    assert "which may keep up: it was stopped before that was tried" in text
    assert dict(dtype_rows(found))["the goal"] == "not known"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 GiB"), (64e6, "61 MiB"), (1.5 * GIB, "1.5 GiB"), (183.2 * GIB, "183 GiB")],
)
def test_sizes_are_read_with_what_they_have(nbytes, text):
    assert size_text(nbytes) == text


def test_candidates_begin_with_none_and_end_with_all_in_dram():
    found = candidates(100e9)
    assert found[0] == Size(0, 0)
    assert found[-1].nvme_nbytes == 0
    assert found[-1].dram_nbytes >= 100e9
    assert all(it.dram_nbytes % GIB == 0 for it in found)
    assert str(found[0]) == "no tiers"
    assert str(Size(4 * GIB, 64 * GIB)) == "DRAM 4GiB + NVMe 64GiB"


def test_a_token_needs_its_kv_and_a_share_of_a_frames_header():
    assert frame_nbytes_per_token(MACHINE) == 131_072 + 4096 / 16
    fp8 = frame_nbytes_per_token(replace(MACHINE, kv_dtype="fp8"))
    assert fp8 == 65_536 + 4096 / 16


def test_a_small_dram_is_not_guessed_to_feed_a_large_store():
    searched = size("hit-rate=0.99", max_seconds=0.0).guesses["bf16"]
    guesses = {found: guess.hit_rate for found, guess in searched}
    stores = [it for it in guesses if it.nvme_nbytes == 64 * GIB]
    rates = [guesses[it] for it in sorted(stores, key=lambda it: it.dram_nbytes)]
    assert rates == sorted(rates)
    assert rates[0] < 0.9 * max(guesses.values())
