"""What would meet a goal that no size meets: more engines, or none; and how long a search takes."""

from dataclasses import replace

import numpy as np
import pytest

from kvtiers.model.config import parse_config
from kvtiers.simulate import sizing_run
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.dtype_search import DtypeSearch
from kvtiers.simulate.estimate import Guess
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.goal import Goal
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.replay import ReplayPlan, replay
from kvtiers.simulate.replay_job import TooSmall
from kvtiers.simulate.share import busiest_share
from kvtiers.simulate.sizes import Size, candidates
from kvtiers.simulate.sizing import SizingPlan
from kvtiers.simulate.sizing_answer import headline, sentences
from kvtiers.simulate.sizing_report import write_sizing
from kvtiers.simulate.sizing_run import size_tiers
from kvtiers.simulate.sizing_words import HEADER, trial_rows
from kvtiers.simulate.trace import Trace

GIB = 2**30
MACHINE = MachinePlan("llama-3.1-8b", "l40s", utilization=0.6)
DOCUMENTS = generate(Workload("documents", 100, requests_per_second=0.4, seed=3))


def plan(goal="ttft-p90=0.3x", **more):
    values = {"trace": DOCUMENTS, "machine": MACHINE, "goal": Goal.parse(goal), "warmup": 0.2}
    return SizingPlan(**(values | more))


@pytest.fixture(scope="module")
def missed():
    """No size meets the goal on the fewest engines that keep up."""
    return size_tiers(plan(kv_dtypes=("bf16", "fp8"), num_engines=None))


def test_where_no_size_meets_a_time_more_engines_are_sized_for(missed):
    assert "bf16" not in missed.chosen
    before = missed.bare("bf16").replay.ttft.p90
    assert missed.limit_seconds == pytest.approx(0.3 * before)
    more = missed.more
    assert more.num_engines > missed.num_engines
    assert more.plan.goal == Goal(more.plan.goal.kind, missed.limit_seconds)
    for dtype, trial in more.chosen.items():
        assert trial.replay.ttft.p90 <= missed.limit_seconds, dtype
    assert "bf16" in more.chosen
    assert (missed.met, missed.final) == (True, more)
    fewer = [it for it in missed.larger if it.num_engines == more.num_engines - 1]
    assert more.num_engines == missed.num_engines + 1 or not fewer[0].meets(missed.limit_seconds)


def test_the_answer_says_what_would_meet_the_goal(missed):
    said = headline(missed)
    assert any(text.startswith("bf16: no size meets the goal. ") for text in said)
    assert any(text.startswith("What binds: the queue: ") for text in said)
    num, chosen = missed.more.num_engines, missed.more.chosen["bf16"]
    (text,) = (it for it in said if it.startswith(f"{num} engines, bf16: "))
    assert "goal is met without tiers" in text or str(chosen.size) in text
    times = chosen.replay.ttft.p90 / missed.bare("bf16").replay.ttft.p90
    of = "one engine" if missed.num_engines == 1 else f"{missed.num_engines} engines"
    assert f"({times:.2f} times that of {of} without tiers)" in text


def test_all_replays_stand_in_one_table_and_in_the_files(missed, tmp_path):
    rows = trial_rows(missed)
    assert HEADER[0] == "engines"
    assert {row[0] for row in rows} == {str(it.num_engines) for it in (missed, missed.more)}
    plain = missed.to_plain()
    assert plain["goal_met"] is True
    assert plain["more"]["num_engines"] == missed.more.num_engines
    written, _ = write_sizing(missed, tmp_path, "size", {})
    assert all(path.stat().st_size for path in written)


def test_with_a_given_number_of_engines_it_only_says_how_many_would_do():
    found = size_tiers(plan(num_engines=2))
    assert (found.more, found.met, found.decided) == (None, False, True)
    enough = [it for it in found.larger if it.meets(found.limit_seconds)]
    (text,) = (it for it in headline(found) if "To size for them" in it)
    assert f"--replicas {min(it.num_engines for it in enough)} --goal ttft-p90=" in text


def test_computing_what_is_new_takes_too_long_on_any_number_of_engines():
    requests = generate(Workload("mixed", 30)).requests
    lonely = tuple(
        replace(request, block_ids=request.block_ids + 10**6 * number)
        for number, request in enumerate(requests)
    )
    found = size_tiers(plan("ttft-p90=0.5x", trace=Trace("lonely", 512, lonely), num_engines=None))
    assert (found.larger, found.more, found.decided) == ([], None, True)
    assert found.limit.startswith("computing what is new: ")
    assert found.guesses["bf16"][-1][1].alone_p90 > found.limit_seconds


def test_a_closed_loop_asks_for_no_more_engines():
    found = size_tiers(plan(arrivals=ArrivalPlan(concurrency=4), num_engines=None))
    assert (found.larger, found.more) == ([], None)


@pytest.mark.parametrize("goal", ["ttft-p90=0.3x", "ttft-p90=0.6x", "hit-rate=0.35", "cost=60"])
def test_the_yaml_replays_to_what_the_answer_says(goal):
    found = size_tiers(plan(goal, num_engines=None, policies=("lru", "s3-fifo")))
    final = found.final
    chosen, config = final.answer("bf16"), None
    if final.yaml is not None:
        config = parse_config(final.yaml)
    share = busiest_share(DOCUMENTS, final.num_engines)
    again = replay(ReplayPlan(share, MACHINE, config, warmup=0.2))
    assert again.ttft == chosen.replay.ttft
    assert again.tokens == chosen.replay.tokens
    assert again.output_tokens_per_second == chosen.replay.output_tokens_per_second


def test_what_is_left_to_do_is_told():
    told = []
    size_tiers(plan(num_engines=None), None, lambda *at: told.append(at))
    done, num, _ = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert all(here <= there for here, there in zip(done, num, strict=True))
    assert (done[-1], told[-1][2]) == (num[-1], 0.0)
    assert all(seconds >= 0 for *_, seconds in told)


def test_time_may_be_up_before_more_engines_are_sized_for(monkeypatch):
    def stopped(more, _first):
        more.complete = False

    monkeypatch.setattr(sizing_run.MoreEngines, "with_tiers", stopped)
    found = size_tiers(plan(num_engines=None))
    assert (found.complete, found.more, found.met, found.decided) == (False, None, False, False)
    assert "The time was up (--max-seconds)" in " ".join(sentences(found))


# Tiers that do not hold one block


def searched(answers):
    """Returns a search that was told of every size it wanted."""
    sizes = [Size(0, 0), Size(GIB, 0), Size(4 * GIB, 0), Size(8 * GIB, 0)]
    guesses = [(size, Guess(0.1, 10.0 - idx, 0.1)) for idx, size in enumerate(sizes)]
    costs = {size: float(idx) for idx, size in enumerate(sizes)}
    search = DtypeSearch(plan("ttft-p90=0.5x"), "bf16", guesses, costs, None)
    while search.wanted is not None:
        search.told(answers[search.wanted])
    return search


def test_the_largest_tiers_may_not_hold_one_block():
    bare = replay(ReplayPlan(DOCUMENTS, MACHINE))
    search = searched({Size(0, 0): bare, Size(8 * GIB, 0): TooSmall("too small")})
    assert (search.chosen(), search.nearly) == ((None, False), None)
    proof = search.proof()
    assert (proof.num_replayed, proof.num_smaller, proof.num_too_small) == (2, 2, 1)
    assert (proof.undecided, search.num_expected) == ((), 0)


def test_tiers_that_hold_no_block_are_not_said_to_be_undecided(monkeypatch):
    monkeypatch.setattr(sizing_run, "candidates", lambda *_sizes: [Size(0, 0), Size(2**20, 0)])
    found = size_tiers(plan("ttft-p90=0.5x", policies=("lru", "arc")))
    assert len(found.trials) == 1
    assert found.limit == "no tiers of the sizes that were considered hold one block of the trace"
    assert headline(found)[2] == f"bf16: {found.limit}."


def test_the_smallest_tier_holds_a_block_however_large():
    requests = generate(Workload("mixed", 6)).requests
    large = tuple(
        replace(it, block_ids=np.arange(-(-it.num_prompt_tokens // 16_384)) + 1000 * number)
        for number, it in enumerate(requests)
    )
    found = size_tiers(plan(trace=Trace("large blocks", 16_384, large)))
    assert len(found.trials) == 2
    assert found.trials[1].size.dram_nbytes >= 16_384 * found.nbytes_per_token["bf16"]
    assert candidates(0.0, 3.5 * GIB) == [Size(0, 0), Size(4 * GIB, 0)]


# What is compared


def test_data_types_serve_the_same_requests():
    """An fp8 cache holds prompts that are too long for a bf16 one."""
    room = size_tiers(plan("hit-rate=0.9", max_seconds=0.0)).pools["bf16"].num_tokens
    long = replace(DOCUMENTS.requests[50], num_prompt_tokens=int(1.2 * room))
    requests = (*DOCUMENTS.requests[:50], long, *DOCUMENTS.requests[51:])
    both = plan("hit-rate=0.3", trace=replace(DOCUMENTS, requests=requests))
    found = size_tiers(replace(both, kv_dtypes=("bf16", "fp8")))
    assert {trial.replay.num_skipped for trial in found.trials} == {1}
    assert any(text.startswith("1 request is of more than ") for text in sentences(found))
