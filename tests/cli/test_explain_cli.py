import json

import pytest
from typer.testing import CliRunner

from kvtiers.cli.main import app
from kvtiers.model.config import ENVIRONMENT_VARIABLE
from kvtiers.observe.decisions import Decision, DecisionLog, DecisionOutcome


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "decisions.jsonl"
    sink = DecisionLog(path=path)
    sink.open()
    for i in range(12):
        chosen = 8 if i % 2 else 0
        seconds = {"reload": 0.1, "recompute": 0.4, "chosen": 0.1, "load": 0.05}
        reason = "reload_all" if chosen else "past_deadline"
        hits = {"dram": 6, "nvme": 2}
        sink.record(
            Decision(
                float(i), f"req-[{i}]", 1, 160, 0, hits, seconds, chosen, "auto", reason,
                block_size=16,
            )
        )  # fmt: skip
        sink.finish(f"req-[{i}]", DecisionOutcome(chosen, 0, 0.06 if chosen else None))
    sink.close()
    return path


def run(*args: object):
    return CliRunner().invoke(app, ["explain", *map(str, args)])


def test_a_request_is_explained(log):
    result = run("req-[3]", "--log", log)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "req-[3] (line 4)" in text
    assert "reload 8 of 8 blocks (128 tokens), compute the rest: reload_all" in text
    assert "Reloading all that was found (8 blocks) was predicted to be fastest" in text
    assert "found in nvme 2 blocks (32 tokens)" in text
    assert "-17%" in text


def test_a_request_is_explained_to_programs(log):
    data = json.loads(run("req-[2]", "--log", log, "--json").stdout)
    (found,) = data["decisions"]
    assert found["choice"] == "recompute everything"
    assert found["decision"]["reason"] == "past_deadline"
    assert data["broken"] == {"num": 0, "lines": []}


def test_the_summary_has_reasons_tiers_errors_and_regret(log):
    result = run("--summary", "--log", log)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for words in (
        "decisions 12",
        "past deadline 6 (50%)",
        "found in dram 1,152 tokens, 72 blocks",
        "median 16.7%, p90 16.7%, bias -16.7% (6 measured)",
        "req-[11]",
        "Regret is an estimate",
    ):
        assert words in text


def test_the_summary_is_data_for_programs(log):
    data = json.loads(run("--summary", "--log", log, "--json").stdout)
    assert data["num_by_decision"] == {"recompute": 6, "reload": 6}
    assert data["load"]["num"] == 6


def test_a_report_is_written(log, tmp_path):
    result = run("--summary", "--log", log, "--output", tmp_path / "out")
    assert result.exit_code == 0
    assert (tmp_path / "out/decisions.html").is_file()
    assert "decisions.html" in result.stderr.replace("\n", "")


def test_broken_lines_are_named_with_file_and_line(log):
    log.write_text(f"nonsense\n{log.read_text()}")
    result = run("--summary", "--log", log)
    assert result.exit_code == 0
    assert f"{log}:1: passed over: no JSON" in result.stderr
    data = json.loads(run("--summary", "--log", log, "--json").stdout)
    assert data["broken"]["num"] == 1
    assert data["broken"]["lines"][0]["line"] == 1


def test_the_log_is_that_of_the_configuration_in_force(log, tmp_path, monkeypatch):
    yaml = tmp_path / "c.yaml"
    yaml.write_text(f"tiers: [{{kind: dram, capacity: 1GiB}}]\ncost: {{decision_log: {log}}}\n")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(yaml))
    assert run("req-[3]").exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "name a request, or give --summary"),
        (("x", "--summary"), "name a request, or give --summary"),
        (("x", "--output", "out"), "--output goes with --summary"),
        (("--summary",), "<defaults>: names no cost.decision_log; give --log FILE"),
        (("x", "--log", "none.jsonl"), "none.jsonl: no such file"),
        (("x", "--log", "/"), "/: no regular file"),
    ],
)
def test_wrong_input_exits_with_2(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_unknown_request_names_near_ones(log):
    result = run("req-(3)", "--log", log, "--json")
    assert result.exit_code == 2
    assert "'req-[3]'" in result.stderr
    assert json.loads(result.stdout)["ok"] is False
