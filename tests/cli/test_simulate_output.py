"""What ``simulate`` leaves behind, says of its own input, and refuses before it begins."""

import json
import os
import subprocess
import sys

import pytest
from simulating import ENGINE, refused, run

from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.trace import load_trace

CHAT = ("--generate", "chat", "--requests", "12", "--seed", "4")
DRAM = "tiers: [{kind: dram, capacity: 4GiB}]\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "chat.jsonl"
    assert run("simulate", *ENGINE, *CHAT, "--write-trace", str(path)).exit_code == 0
    return path


def written(tmp_path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_report_says_what_was_replayed(tmp_path, trace):
    config = written(tmp_path, "dram.yaml", DRAM)
    result = run("simulate", *ENGINE, *CHAT, "--config", config, "--concurrency", "3", "--json")
    about = json.loads(result.stdout)["about"]
    assert (about["generate"], about["seed"], about["rate"]) == ("chat", 4, 2.0)
    assert (about["loop"], about["concurrency"], about["requests"]) == ("closed", 3, 12)
    assert about["trace"] is None
    out = tmp_path / "out"
    args = ("--trace", str(trace), "--config", config, "--output", str(out), "--speed", "0.5")
    assert run("simulate", *ENGINE, *args).exit_code == 0
    document = json.loads((out / "simulate-chat.json").read_text())
    assert (document["about"]["trace"], document["about"]["speed"]) == (str(trace), 0.5)
    assert document["about"]["loop"] == "open"
    assert document["replays"][0]["config"]["tiers"][0]["capacity"] == "4GiB"
    assert "capacity: 4GiB" in (out / "simulate-chat.html").read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--rate", "3"), "--rate: is for --generate; a trace has its own requests"),
        (("--seed", "3"), "--seed: is for --generate; a trace has its own requests"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "size"])
def test_an_option_that_would_change_nothing_is_refused(trace, verb, args, says):
    refused(verb, *ENGINE, "--trace", str(trace), *args, says=says)
    refused(verb, *ENGINE, *CHAT, "--trace-block", "1024", says="--trace-block: is for --trace")


def test_a_trace_is_never_written_over_by_itself(trace):
    before = trace.read_bytes()
    args = ("--trace", str(trace), "--requests", "3", "--write-trace", str(trace))
    refused("simulate", *ENGINE, *args, says="--write-trace: is for --generate")
    assert trace.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tiers:\n- {kind: dram, capacity: 9MiB}\n", ":2: tiers[0].capacity: 9MiB over 1 rank(s)"),
        (
            "tiers:\n- {kind: dram, capacity: 4GiB}\n"
            "- {kind: nvme, name: disk, paths: [/nowhere], capacity: 64KiB}\n",
            ":3: tiers[1].capacity: 64KiB over 1 rank(s) does not hold one frame of 67239936 "
            "bytes; write at least 65MiB",
        ),
    ],
)
def test_a_tier_that_holds_no_block_is_refused_by_file_and_line_before_any_replay(
    tmp_path, monkeypatch, text, says
):
    def never(*_args):
        raise AssertionError("it was replayed first")

    good, bad = written(tmp_path, "good.yaml", DRAM), written(tmp_path, "bad.yaml", text)
    monkeypatch.setattr("kvtiers.simulate.replay.replay", never)
    refused("simulate", *ENGINE, *CHAT, "--compare", good, bad, says=f"{bad}{says}")


def test_a_medium_may_be_that_of_a_store_that_only_one_configuration_has(tmp_path):
    store = "- {kind: nvme, name: disk, paths: [/nowhere], capacity: 4GiB}\n"
    named = written(tmp_path, "named.yaml", f"tiers:\n- {{kind: dram, capacity: 4GiB}}\n{store}")
    compare = ("--compare", written(tmp_path, "dram.yaml", DRAM), named)
    result = run("simulate", *ENGINE, *CHAT, *compare, "--medium", "disk=nvme-gen5", "--json")
    assert result.exit_code == 0, result.output
    refused("simulate", *ENGINE, *CHAT, *compare, "--medium", "tape=sata", says="no tier 'tape'")


def test_an_interrupt_before_anything_was_served_is_an_interrupt(monkeypatch):
    def interrupted(_self, _progress):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtiers.engines.reference.engine.Engine.step", interrupted)
    result = run("simulate", *ENGINE, *CHAT)
    assert result.exit_code == 130
    assert "no request was served before it was stopped" in result.stderr


def test_an_interrupt_between_two_replays_loses_nothing_of_the_first(tmp_path, monkeypatch):
    made = []

    def engine(self, settings, config):
        if made:
            raise KeyboardInterrupt
        made.append(build(self, settings, config))
        return made[0]

    build = MachinePlan.engine
    monkeypatch.setattr(MachinePlan, "engine", engine)
    compare = [written(tmp_path, name, DRAM) for name in ("first.yaml", "second.yaml")]
    result = run("simulate", *ENGINE, *CHAT, "--compare", *compare, "--json")
    assert result.exit_code == 130
    (replay,) = json.loads(result.stdout)["replays"]
    assert (replay["label"], replay["complete"]) == ("first", True)
    assert "interrupted before it was replayed: second" in result.stderr


def test_names_that_cannot_be_shown_are_escaped(tmp_path, trace):
    folder = os.fsencode(tmp_path)
    config, odd = folder + b"/\xff$\\x$.yaml", folder + b"/" + b"n" * 240 + b"\xfe.jsonl"
    with open(config, "w") as file:
        file.write(DRAM)
    os.link(trace, odd)
    command = [sys.executable, "-m", "kvtiers", "simulate", *ENGINE, "--trace", odd]
    command += ["--config", config, "--output", tmp_path / "out"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"hits in dram" in done.stdout
    assert b"\\xff" in done.stdout
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [name.rpartition(".")[2] for name in names][:2] == ["html", "json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full here")
@pytest.mark.parametrize(
    "verb", [("capacity", *ENGINE), ("capacity", *ENGINE, "--json"), ("--help",)]
)
def test_output_that_cannot_be_written_is_said_without_a_traceback(verb):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvtiers", *verb]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == b"standard output cannot be written: No space left on device\n"


def test_what_is_written_is_whole_or_not_there(tmp_path, monkeypatch):
    """A full disk, or Ctrl-C, between two files of a report."""
    out = tmp_path / "out"
    args = ("simulate", *ENGINE, *CHAT, "--output", str(out))
    assert run(*args).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    calls = []

    def full(path, content):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        with path.open("wb") as file:
            return file.write(content)

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    refused(*args, "--speed", "3", says="out: cannot write there: No space left on device")
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_generated_trace_goes_to_a_pipe_as_well(tmp_path):
    path = tmp_path / "link.jsonl"
    path.symlink_to(tmp_path / "real.jsonl")
    assert run("simulate", *ENGINE, *CHAT, "--write-trace", str(path)).exit_code == 0
    assert path.is_symlink()
    assert len(load_trace(path).requests) == 12
    assert run("simulate", *ENGINE, *CHAT, "--write-trace", "/dev/null").exit_code == 0
    assert not os.path.isfile("/dev/null")
