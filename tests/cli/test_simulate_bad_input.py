"""Bad input to ``capacity``, ``simulate`` and ``size``: named, with what would be right."""

import gzip
import json
import os

import pytest
from simulating import ENGINE, refused, run

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 4096,
    "intermediate_size": 100,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 10,
}
REQUEST = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{**REQUEST, "timestamp": 100 * i} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_key_value_heads": 0}, "'num_key_value_heads' is 0"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 1}, "a list of layers"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [1, 0]}, "is [1, 0]"),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, "names 1 of 3 layers"),
        ({"text_config": 3}, "'text_config' holds a int, not an object"),
    ],
)
@pytest.mark.parametrize("verb", [("capacity",), ("bench", "--length", "64,128,256")])
def test_a_model_with_a_wrong_field_is_refused_by_name(tmp_path, verb, change, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    refused(*verb, "--model", str(path), "--hardware", "h100", says=says)


def test_a_model_type_that_is_no_name_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": ["llama"]}), encoding="utf-8-sig")
    assert run("capacity", "--model", str(tmp_path), "--hardware", "h100").exit_code == 0


@pytest.mark.parametrize("verb", ["capacity", "bench"])
def test_a_model_file_that_cannot_be_read_is_refused(tmp_path, verb):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    refused(verb, "--model", str(path), "--hardware", "h100", says="cannot be read as JSON")
    refused(verb, "--model", "a" * 5000, "--hardware", "h100", says="File name too long")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tp", "3"), "32 heads, 8 KV heads do not divide over 3 devices"),
        (("--tp", "64"), "do not divide over 64 devices"),
        (("--prompt-tokens", "100000000000", "--step-tokens", "1"), "at most 100,000 are listed"),
    ],
)
def test_capacity_refuses_what_no_engine_runs(args, says):
    refused("capacity", *ENGINE, *args, says=says)


def test_names_in_square_brackets_are_shown_as_they_are(tmp_path, trace):
    folder = tmp_path / "[/bold]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    tiers = folder / "[red].yaml"
    tiers.write_text("tiers: [{kind: dram, capacity: 4GiB}]")
    model = ("--model", str(folder), "--hardware", "h100")
    for verb in (("capacity",), ("bench",), ("simulate", "--trace", trace, "--config", str(tiers))):
        result = run(verb[0], *model, *verb[1:])
        assert result.exit_code == 0, result.exception
        assert "[/bold]" in "".join(result.stdout.split())  # a long title is folded
    assert "[red]" in result.stdout


def test_a_table_is_whole_however_many_columns_it_has(tmp_path, trace):
    paths = []
    for number in range(8):
        paths.append(tmp_path / f"configuration-{number}.yaml")
        paths[-1].write_text("tiers: [{kind: dram, capacity: 4GiB}]")
    result = run("simulate", *ENGINE, "--trace", trace, "--compare", *map(str, paths))
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert "configuration-7" in result.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"timestamp": 10**400}, "'timestamp' is 1000000"),
        ({"timestamp": 1e300}, "at least 0 and at most 1e+15"),
        ({"think_time": 1e13}, "'think_time' is 10000000000000.0, not a number of seconds"),
    ],
)
def test_times_that_no_clock_shows_are_refused(tmp_path, change, says):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**REQUEST, **change}))
    refused("simulate", *ENGINE, "--trace", str(path), says=says)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_what_cannot_be_read_twice_or_at_all_is_refused(tmp_path):
    pipe, loop = tmp_path / "pipe.jsonl", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    refused("simulate", *ENGINE, "--trace", str(pipe), says="pipe.jsonl: is a pipe or a device")
    config = ("--generate", "chat", "--config", str(pipe))
    refused("simulate", *ENGINE, *config, says="pipe.jsonl: is a pipe or a device, not a regular")
    refused("simulate", *ENGINE, "--trace", str(loop), says="symbolic links); check path")
    refused("simulate", *ENGINE, "--trace", "a" * 5000, says="File name too long")


@pytest.mark.parametrize("rate", ["nan", "0", "-1", "inf", "1e-300", "1e300"])
def test_a_rate_without_sense_is_refused(rate):
    args = ("--generate", "chat", "--rate", rate)
    refused("simulate", *ENGINE, *args, says="from 1e-06 to 1e+06 a second")


@pytest.mark.parametrize("num", ["0", "99"])
def test_engines_without_requests_are_refused(trace, num):
    says = "99 engines share 3 requests" if num == "99" else "--replicas"
    for verb in ("simulate", "size"):
        refused(verb, *ENGINE, "--trace", trace, "--replicas", num, says=says)


def test_a_price_that_is_given_twice_is_refused(trace):
    twice = ("--price", "dram=4", "--price", "dram=5")
    refused("size", *ENGINE, "--trace", trace, *twice, says="--price: dram is given twice")


@pytest.mark.parametrize("price", ["dram=-1", "nvme=nan", "dram=inf", "dram=1e308"])
def test_a_price_without_sense_is_refused(trace, price):
    refused("size", *ENGINE, "--trace", trace, "--price", price, says=f"'{price}' is no price")


def test_what_costs_nothing_is_sized_too(trace):
    args = ("--price", "dram=0", "--price", "nvme=0", "--goal", "hit-rate=0.1")
    assert run("size", *ENGINE, "--trace", trace, *args).exit_code == 0


def test_a_packed_trace_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(json.dumps(REQUEST).encode()))
    refused("simulate", *ENGINE, "--trace", str(path), says=":1: is packed with gzip; unpack it")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--speed", "1e-320"), "from 1e-06 to 1e+06"),
        (("--max-seconds", "nan"), "nan seconds"),
        (("--max-seconds", "-1"), "must be at least 0"),
        (("--medium", "tape=nvme-gen5"), "no tier 'tape' has a medium to choose"),
        (("--medium", "nvme=tape"), "no storage 'tape' is known"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "size"])
def test_an_option_without_sense_is_refused_even_if_nothing_would_use_it(verb, trace, args, says):
    refused(verb, *ENGINE, "--trace", trace, *args, says=says)


def test_an_unknown_replacement_rule_is_refused_by_name(trace):
    says = "replacement rule 'newest' is not one of"
    refused("size", *ENGINE, "--trace", trace, "--policy", "newest", says=says)


@pytest.mark.parametrize("verb", ["simulate", "size"])
def test_reports_that_cannot_be_written_are_refused_before_the_work(monkeypatch, verb, trace):
    def never(*_args):
        raise AssertionError("it was replayed first")

    monkeypatch.setattr("kvtiers.simulate.replay.replay", never)
    monkeypatch.setattr("kvtiers.simulate.sizing_run.ReplayPool", never)
    args = (verb, *ENGINE, "--trace", trace)
    refused(*args, "--output", trace, says=f"{trace}: cannot write there: File exists")
    option = "--write-config" if verb == "size" else "--write-trace"
    refused(*args, option, "/", says="/: is a folder; name a file in it")
    refused(*args, option, f"{trace}/x", says="there is no folder to write it to")


def test_a_trace_in_which_nothing_comes_again_is_what_binds(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(REQUEST))
    result = run("size", *ENGINE, "--trace", str(path))
    assert result.exit_code == 1
    assert "What binds: computing what is new" in result.stdout


def test_what_a_replay_does_not_model_is_said(tmp_path, trace):
    path = tmp_path / "ranges.yaml"
    path.write_text("tiers: [{kind: dram, capacity: 4GiB}]\nreload: {layer_ranges: 4}\n")
    result = run("simulate", *ENGINE, "--trace", trace, "--config", str(path))
    assert "Not modelled, as if it were not set: reload.layer_ranges" in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tensor-parallel", "7"), "32 heads, 8 KV heads do not divide over 7 devices"),
        (("--length", "99999999999999999999"), "at most 10,000,000 tokens are compared"),
    ],
)
def test_a_comparison_on_paper_refuses_what_no_engine_runs(args, says):
    refused("bench", *ENGINE, *args, says=says)
