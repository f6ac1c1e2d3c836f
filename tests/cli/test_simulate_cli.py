import json

import pytest
from simulating import ENGINE, run

from kvtiers.simulate.trace import load_trace
from tests.simulate.traces import call, session, write_sessions

CHAT = ("--generate", "chat", "--requests", "30", "--seed", "4")


@pytest.fixture
def configs(tmp_path):
    paths = []
    for name, capacity in (("small", "2GiB"), ("large", "64GiB")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"tiers:\n  - {{kind: dram, capacity: {capacity}}}\n")
        paths.append(str(path))
    return paths


def test_simulate_prints_latency_with_throughput_and_where_kv_came_from(configs):
    result = run("simulate", *ENGINE, *CHAT, "--config", configs[0])
    assert result.exit_code == 0
    for word in ("TTFT p90", "ITL p90", "output tokens/s", "hits in dram", "infinite cache"):
        assert word in result.stdout


def test_compare_shows_configurations_side_by_side(configs):
    result = run("simulate", *ENGINE, *CHAT, "--compare", *configs, "--json")
    assert result.exit_code == 0
    replays = json.loads(result.stdout)["replays"]
    assert [replay["label"] for replay in replays] == ["small", "large"]
    for replay in replays:
        tokens = replay["tokens"]
        assert sum(tokens["hits"].values()) + tokens["computed"] == tokens["prompt"]
    shown = run("simulate", *ENGINE, *CHAT, "--compare", *configs).stdout
    assert "change" in shown
    assert "large" in shown


def test_simulate_writes_files_and_the_generated_trace(tmp_path):
    trace, out = tmp_path / "chat.jsonl", tmp_path / "out"
    result = run("simulate", *ENGINE, *CHAT, "--write-trace", str(trace), "--output", str(out))
    assert result.exit_code == 0
    assert {"simulate-chat.json", "simulate-chat.html"} <= {path.name for path in out.iterdir()}
    assert len(load_trace(trace).requests) == 30
    again = run("simulate", *ENGINE, "--trace", str(trace), "--json")
    fresh = json.loads((out / "simulate-chat.json").read_text())["replays"][0]
    found = json.loads(again.stdout)["replays"][0]
    for name in ("ttft", "tokens", "seconds"):
        assert found[name] == fresh[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --trace PATH or --generate KIND"),
        ((*CHAT, "--trace", "x.jsonl"), "give either --trace PATH or --generate KIND"),
        (("--trace", "gone.jsonl"), "gone.jsonl: no such file or folder"),
        (("--generate", "chats"), "did you mean 'chat'"),
        ((*CHAT, "--speed", "0"), "a speed of 0.0 must be above 0"),
        ((*CHAT, "--medium", "nvme"), "'nvme' is not STORE=MEDIUM; write nvme=nvme-gen5"),
        ((*CHAT, "--preemption", "drop"), "'drop' is not known; write one of cost, swap"),
        ((*CHAT, "--config", "gone.yaml"), "gone.yaml: no such file"),
        ((*CHAT, "--warmup", "1"), "a warm-up of 1.0 must be"),
        ((*CHAT, "--kv-dtype", "int3"), "no data type 'int3'"),
    ],
)
def test_simulate_says_what_is_wrong(arguments, message):
    result = run("simulate", *ENGINE, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_an_empty_or_malformed_trace_is_named_with_its_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("")
    assert "holds no request" in run("simulate", *ENGINE, "--trace", str(path)).stderr
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}\n{')
    result = run("simulate", *ENGINE, "--trace", str(path))
    assert result.exit_code == 2
    assert f"{path}:2: is no JSON" in result.stderr


def test_size_answers_and_writes_the_configuration(tmp_path):
    out, yaml = tmp_path / "out", tmp_path / "kvtiers.yaml"
    result = run(
        *("size", "--model", "llama-3.1-8b", "--hardware", "l40s", "--utilization", "0.6"),
        *("--generate", "documents", "--requests", "80", "--rate", "1", "--goal", "hit-rate=0.3"),
        *("--replicas", "1", "--output", str(out), "--write-config", str(yaml)),
    )
    assert result.exit_code == 0
    for word in ("cheapest", "What binds", "Knee", "data type of the KV cache", "kind: dram"):
        assert word in result.stdout
    assert {"size-documents.json", "size-documents.html"} <= {path.name for path in out.iterdir()}
    assert run("config", "check", str(yaml)).exit_code == 0


def test_simulate_says_of_the_configuration_what_size_said(tmp_path):
    yaml, files = tmp_path / "kvtiers.yaml", ("--write-config", str(tmp_path / "kvtiers.yaml"))
    engine = ("--model", "llama-3.1-8b", "--hardware", "l40s", "--utilization", "0.6")
    requests = ("--generate", "documents", "--requests", "80", "--rate", "1")
    goal = ("--goal", "ttft-p90=0.95x", "--replicas", "2", "--policy", "lru")
    result = run("size", *engine, *requests, *goal, *files, "--json")
    assert result.exit_code == 0
    sized = json.loads(result.stdout)
    assert yaml.exists()
    chosen = sized["trials"][sized["chosen"]["bf16"]]["replay"]
    more = ("--replicas", str(sized["num_engines"]), "--config", str(yaml))
    result = run("simulate", *engine, *requests, *more, "--json")
    (replayed,) = json.loads(result.stdout)["replays"]
    for name in ("ttft", "tokens", "hit_rate", "seconds", "written_nbytes"):
        assert replayed[name] == chosen[name], name


def test_size_puts_small_ids_together_unless_told_not_to(tmp_path):
    calls = [call(float(at), list(range(8 * at + 1)), tokens=512 * at + 64) for at in range(1, 6)]
    folder = write_sessions(tmp_path / "sessions", session(*calls))
    for more, block_size in (((), 512), (("--trace-block", "64"), 64)):
        result = run("size", *ENGINE, "--trace", str(folder), "--json", *more)
        assert result.exit_code in {0, 1}, (result.output, result.exception)
        assert json.loads(result.stdout)["block_size"] == block_size


def test_size_exits_with_1_where_no_size_meets_the_goal(tmp_path):
    yaml = tmp_path / "kvtiers.yaml"
    args = ("--goal", "hit-rate=1", "--json", "--write-config", str(yaml))
    result = run("size", *ENGINE, *CHAT, *args)
    assert result.exit_code == 1
    assert "was not written: there is no YAML for the goal, no size meets it" in result.stderr
    assert not yaml.exists()
    found = json.loads(result.stdout)
    assert (found["goal_met"], found["chosen"]) == (False, {})


def test_size_exits_with_3_where_time_was_up_before_it_was_known(tmp_path):
    yaml = tmp_path / "kvtiers.yaml"
    args = ("--goal", "hit-rate=1", "--json", "--write-config", str(yaml), "--max-seconds", "0")
    result = run("size", *ENGINE, *CHAT, *args)
    assert result.exit_code == 3
    assert "it was stopped before it was known whether a size meets it" in result.stderr
    assert json.loads(result.stdout)["goal_met"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goal", "fast"), "--goal: 'fast' is no goal; write ttft-p90=0.5x"),
        (("--price", "tape=1"), "--price: 'tape=1' is no price; write dram=4 or nvme=0.1"),
        (("--price", "dram=x"), "--price: 'dram=x' is no price"),
        (("--policy", "best"), "best"),
    ],
)
def test_size_says_what_is_wrong(arguments, message):
    result = run("size", *ENGINE, *CHAT, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
