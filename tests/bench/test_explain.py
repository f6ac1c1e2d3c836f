"""What a decision log says: in sentences of one request, in numbers of all."""

from __future__ import annotations

import json
import random

import pytest

from kvtiers.bench.explain import NUM_WORST, explain, explanation, summarize
from kvtiers.bench.explain_report import write_report
from kvtiers.bench.explain_rows import alternative_rows, fact_rows
from kvtiers.bench.explain_words import SENTENCES, milliseconds, sentence
from kvtiers.cost.planner import PlanReason
from kvtiers.model.errors import ConfigError
from kvtiers.observe.decision_file import MAX_NAMED, DecisionFile, parse_decision
from kvtiers.observe.decisions import Decision, DecisionLog, DecisionOutcome
from kvtiers.observe.page import NO_PICTURES

PREDICTED = {"reload": 0.5, "recompute": 2.0, "chosen": 0.5, "load": 0.4, "auto": 0.5}


def decision(request_id="r", chosen=4, **changes):
    fields = {
        "time": 1.0,
        "request_id": request_id,
        "epoch": 1,
        "num_tokens": 100,
        "num_local_tokens": 16,
        "num_hit_blocks": {"dram": 3, "nvme": 1},
        "predicted_seconds": PREDICTED,
        "num_chosen_blocks": chosen,
        "mode": "auto",
        "reason": "reload_all" if chosen else "recompute_faster",
        "block_size": 16,
    }
    return Decision(**{**fields, **changes})


@pytest.fixture
def log(tmp_path):
    """Write decisions with their outcomes as an engine does; return the file."""

    def write(*pairs):
        path = tmp_path / "decisions.jsonl"
        sink = DecisionLog(path=path)
        sink.open()
        for each, seconds in pairs:
            sink.record(each)
            sink.finish(each.request_id, DecisionOutcome(each.num_chosen_blocks, 0, seconds))
        sink.close()
        return DecisionFile(path)

    return write


def logged(line=1, **changes):
    plain = json.loads(decision().to_json())
    return parse_decision(line, json.dumps({**plain, **changes}))


# Sentences


@pytest.mark.parametrize("reason", PlanReason)
def test_every_reason_has_a_sentence(reason):
    assert reason in SENTENCES
    text = sentence(logged(reason=reason.value))
    assert text.endswith(".")
    assert "{" not in text
    assert "unknown time" not in text
    without = sentence(logged(reason=reason.value, predicted_seconds={}))
    assert without.endswith(".")


def test_sentences_have_the_values():
    assert "(4 blocks)" in sentence(logged())
    assert "500 ms, and 2,000 ms to compute it" in sentence(logged())
    assert "the first 3 were reloaded" in sentence(
        logged(reason="reload_part", num_chosen_blocks=3)
    )


def test_a_load_within_a_step_is_said_to_be_one():
    within = "within the step that computed the rest"
    assert within in sentence(logged(in_step=True))
    assert within not in sentence(logged(in_step=False))


def test_a_reason_of_another_version_is_named_as_it_is():
    assert "'by_moonlight' is none that this version knows" in sentence(
        logged(reason="by_moonlight")
    )


def test_times_are_short():
    shown = [milliseconds(seconds) for seconds in (1.5, 0.0234, 0.00123, 0, None)]
    assert shown == ["1,500 ms", "23.4 ms", "1.23 ms", "0 ms", "an unknown time"]


# One request


def test_a_request_is_explained_with_its_errors_and_regret(log):
    (found,) = explain(log((decision("a"), 0.4), (decision("b"), 3.0)), "b")
    assert found.decision.line == 2
    assert found.choice == "reload 4 of 4 blocks (64 tokens), compute the rest"
    assert found.errors["load"] == pytest.approx(0.4 / 3.0 - 1)
    # It took 0.5 + 2.6 s, and computing 2 s.
    assert found.regret_seconds == pytest.approx(1.1)
    rows = {row[0]: row[1:] for row in alternative_rows(found)}
    assert rows["of the chosen one, the load"] == ("400 ms", "3,000 ms", "-87%")
    assert rows["compute everything"] == ("2,000 ms", "", "")
    assert "what auto chooses" not in rows  # the mode is auto
    assert dict(fact_rows(found))["found in nvme"] == "1 blocks (16 tokens)"


def test_a_request_that_was_planned_twice_has_both(log):
    found = explain(log((decision("a"), 0.4), (decision("a", chosen=0), None)), "a")
    assert [each.choice for each in found][1] == "recompute everything"


def test_an_unknown_request_names_near_ones(log):
    file = log(*((decision(f"chatcmpl-{i:03}"), 0.4) for i in range(30)))
    with pytest.raises(ConfigError, match="there are 'chatcmpl-012'") as caught:
        explain(file, "chatcmpl-O12")
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match="'chatcmpl-007'"):
        explain(file, "007")
    file.path.write_text("")
    with pytest.raises(ConfigError, match="holds no decision"):
        explain(file, "x")


def test_a_request_in_shadow_shows_what_auto_chooses():
    rows = {row[0] for row in alternative_rows(explanation(logged(mode="shadow")))}
    assert "what auto chooses" in rows


def test_what_other_versions_write_is_shown_and_not_needed():
    new = logged(
        predicted_seconds={**PREDICTED, "layerwise": 0.3},
        queued_nbytes=12,
        outcome={"num_loaded_blocks": 4, "num_failed_blocks": 0, "ttft_seconds": 0.6},
    )
    found = explanation(new)
    assert found.errors["ttft"] == pytest.approx(0.5 / 0.6 - 1)
    assert ("queued_nbytes", "12") in fact_rows(found)
    assert "layerwise" in {row[0] for row in alternative_rows(found)}
    old = explanation(parse_decision(1, '{"request_id": "r", "reason": "no_hit"}'))
    assert (old.errors, old.regret_seconds) == ({}, None)
    assert ("prompt", "not said") in fact_rows(old)
    assert alternative_rows(old) == []


# Broken and growing files


def test_broken_lines_are_counted_and_named(log):
    file = log((decision("a"), 0.4))
    text = file.path.read_text()
    wrong = ["{", "[]", '{"request_id": "x"}', '{"request_id":"x","reason":"y","outcome":3}']
    file.path.write_text("\n".join([*wrong, "", text]) + "\xff\n", encoding="latin-1")
    assert [each.request_id for each in file] == ["a"]
    assert file.num_broken == 5
    assert [broken.line for broken in file.broken] == [1, 2, 3, 4, 7]
    whys = [broken.why for broken in file.broken]
    assert whys[0].startswith("no JSON")
    assert whys[1] == "a list, not an object"
    assert "'outcome' is a int" in whys[3]


def test_lines_that_no_engine_wrote_are_passed_over(log):
    file = log((decision("a"), 0.4))
    text = file.path.read_text()
    vast = '{"request_id": "b", "reason": "no_hit", "predicted_seconds": {"dram": 1%s}}' % (
        "0" * 400
    )
    file.path.write_text("\n".join(["[" * 100_000, vast, text]))
    first, second = file
    assert (first.request_id, second.request_id) == ("b", "a")
    assert [broken.line for broken in file.broken] == [1]
    assert summarize(file).num_broken == 1


def test_many_broken_lines_are_counted_and_few_named(log):
    file = log()
    file.path.write_text("x\n" * 1000)
    assert summarize(file).num_broken == 1000
    assert len(file.broken) == MAX_NAMED


def test_a_line_that_is_being_written_is_not_broken(log):
    file = log((decision("a"), 0.4), (decision("b"), 0.4))
    text = file.path.read_text()
    for cut in random.Random(0).sample(range(len(text) // 2 + 1, len(text)), 20):
        file.path.write_text(text[:cut])
        names = [each.request_id for each in file]
        assert names == (["a", "b"] if cut == len(text) - 1 else ["a"])
        assert file.num_broken == 0


# Numbers


def test_a_log_in_numbers(log):
    pairs = [(decision(f"r{i}"), 0.4 * (1 + i / 10)) for i in range(20)]
    pairs += [(decision(f"c{i}", chosen=0), None) for i in range(5)]
    found = summarize(log(*pairs))
    assert found.num_decisions == 25
    assert found.num_by_decision == {"reload": 20, "recompute": 5}
    assert found.num_by_reason == {"reload_all": 20, "recompute_faster": 5}
    assert found.num_blocks_by_tier == {"dram": 75, "nvme": 25}
    assert found.num_tokens_by_tier == {"dram": 75 * 16, "nvme": 25 * 16}
    assert (found.num_chosen_blocks, found.num_loaded_blocks) == (80, 80)
    assert found.load is not None
    assert found.load.num == 20
    errors = sorted(1 - 1 / (1 + i / 10) for i in range(20))
    assert found.load.median == pytest.approx((errors[9] + errors[10]) / 2)
    assert found.load.p90 == pytest.approx(errors[17] + 0.1 * (errors[18] - errors[17]))
    assert found.load.bias == pytest.approx(-found.load.median)
    assert found.ttft is None
    assert [pair.request_id for pair in found.worst] == [f"r{i}" for i in range(19, 9, -1)]
    assert len(found.worst) == NUM_WORST


def test_regret_is_against_the_best_alternative(log):
    better = {**PREDICTED, "chosen": 2.0, "load": 0.0}  # computed; a reload had taken 0.5 s
    pairs = [
        (decision("good"), 0.4),
        (decision("stalled"), 2.4),  # 0.5 + 2.0 s; computing had taken 2 s
        (decision("computed", chosen=0, predicted_seconds=better), None),
    ]
    found = summarize(log(*pairs))
    assert found.regret_seconds == pytest.approx(0.5 + 1.5)
    assert found.num_regretted == 2
    assert found.regret_share == pytest.approx(2.0 / (0.5 + 2.0 + 0.5))


def test_regret_is_bounded_by_the_first_token(log):
    """A load within the step is measured with the step: 0.5 + 2.6 s, but it took 2.2 s."""
    outcome = {"num_loaded_blocks": 4, "measured_seconds": 3.0, "ttft_seconds": 2.2}
    assert explanation(logged(outcome=outcome)).regret_seconds == pytest.approx(0.2)


def test_a_load_that_failed_teaches_nothing_of_predictions(log):
    file = log()
    failed = {"num_loaded_blocks": 1, "num_failed_blocks": 3, "measured_seconds": 9.0}
    plain = json.loads(decision().to_json())
    file.path.write_text(json.dumps({**plain, "outcome": failed}) + "\n")
    found = summarize(file)
    assert found.load is None
    assert found.num_failed_blocks == 3


def test_shadow_says_what_auto_had_saved(log):
    predicted = {**PREDICTED, "chosen": 2.5, "reload": 2.5, "auto": 2.0}
    pairs = [(decision(mode="shadow", reason="shadow", predicted_seconds=predicted), 2.4)]
    assert summarize(log(*pairs)).auto_saves_seconds == pytest.approx(0.5)


def test_an_empty_log_has_numbers_too(log, tmp_path):
    found = summarize(log())
    assert found.num_decisions == 0
    assert found.load is None
    written, _ = write_report(found, tmp_path / "out")
    assert {path.suffix for path in written} >= {".json", ".html"}


def test_a_report_has_everything_in_one_page(log, tmp_path):
    pairs = [(decision(f"<r{i}>"), 0.4 * (1 + i / 10)) for i in range(20)]
    _, missing = write_report(summarize(log(*pairs)), tmp_path / "out")
    assert missing in (None, NO_PICTURES)
    text = (tmp_path / "out/decisions.html").read_text()
    assert "&lt;r19&gt;" in text
    assert "<r19>" not in text
    assert ("data:image/png" in text) is (missing is None)
    assert json.loads((tmp_path / "out/decisions.json").read_text())["num_decisions"] == 20
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write there"):
        write_report(summarize(log()), tmp_path / "file")
