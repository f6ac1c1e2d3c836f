import json
import re

import pytest
from typer.testing import CliRunner

from kvtiers.cli.main import app


def run(*args: str):
    return CliRunner().invoke(app, ["capacity", *args])


def test_capacity_says_what_fits_and_what_binds():
    result = run("--model", "llama-3.1-8b", "--hardware", "h100", "--max-model-len", "131072")
    assert result.exit_code == 0
    assert result.stdout.startswith("llama-3.1-8b on H100 SXM holds 399,232 tokens of KV in bf16")
    for word in ("H100 SXM", "131,072", "fp8", "65,536", "KV pool", "KV binds", "4 steps"):
        assert word in result.stdout


def test_capacity_as_json_adds_up():
    result = run(
        *("--model", "llama-3.1-70b", "--hardware", "h100", "--tp", "4", "--json"),
        *("--average-context", "2000", "--max-num-seqs", "8", "--runtime-memory", "4GB"),
    )
    data = json.loads(result.stdout)
    used = data["weights_nbytes"] + data["other_nbytes"] + data["pool_nbytes"]
    assert (data["ok"], used) == (True, data["claimed_nbytes"])
    first, fp8 = data["pools"]
    assert (first["kv_dtype"], fp8["kv_dtype"]) == ("bf16", "fp8")
    assert first["num_blocks"] == data["pool_nbytes"] // (16 * 327_680 // 4)
    assert (first["limit"], first["num_seqs"]) == ("max_num_seqs", 8)


def test_capacity_refuses_what_would_not_start_and_says_what_would_help():
    result = run("--model", "llama-3.1-70b", "--hardware", "h100", "--json")
    assert result.exit_code == 2
    assert "does not even load" in result.stderr
    assert "tensor parallelism over 4 devices" in result.stderr
    assert json.loads(result.stdout)["ok"] is False


def test_capacity_names_what_is_known():
    result = run("--model", "llama-3.1-8c", "--hardware", "h100")
    assert result.exit_code == 2
    assert "did you mean 'llama-3.1-8b'" in result.stderr
    result = run("--model", "llama-3.1-8b", "--hardware", "h900")
    assert result.exit_code == 2
    assert "no hardware 'h900' is known" in result.stderr
    result = run("--model", "llama-3.1-8b", "--hardware", "h100", "--runtime-memory", "4")
    assert result.exit_code == 2
    assert "--runtime-memory: '4' has no unit" in result.stderr


H100 = ("--model", "llama-3.1-8b", "--hardware", "h100")


@pytest.mark.parametrize(
    "wrong",
    [
        (*H100, "--utilization", "0.01"),
        (*H100, "--step-tokens", "999999"),
        (*H100, "--runtime-memory", "100GiB"),
        (*H100, "--block-size", "1000000"),
        ("--model", "llama-3.1-405b", "--hardware", "h100"),
        ("--model", "gpt-oss-120b", "--hardware", "h100", "--tp", "2"),
        ("--model", "llama-3.1-70b", "--hardware", "h200", "--step-tokens", "8192"),
        (*H100, "--max-model-len", "410000"),
        (*H100, "--max-model-len", "1000000"),
        (*H100, "--kv-dtype", "fp8", "--max-model-len", "10000000"),
    ],
)
def test_whatever_is_said_to_help_helps_on_its_own(wrong):
    said = run(*wrong)
    assert said.exit_code == 2
    text, _, remedies = said.stderr.strip().partition(": ")
    while not text.endswith(("Any of these helps", "This helps")):
        text, _, remedies = remedies.partition(": ")
    assert text.endswith("This helps") == ("; " not in remedies)
    for remedy in remedies.split("; "):
        option, value = option_of(remedy)
        assert run(*wrong, option, value).exit_code == 0, (remedy, option, value)


def option_of(remedy: str) -> tuple[str, str]:
    """Return a remedy as an option; the last one of its name counts."""
    for pattern, option in (
        (r"tensor parallelism over (\d+) devices", "--tp"),
        (r"weights in (fp8)", "--dtype"),
        (r"a utilization of ([\d.]+)", "--utilization"),
        (r"steps of at most ([\d,]+) tokens", "--step-tokens"),
        (r"at most ([\d.]+ GB) for activations and runtime", "--runtime-memory"),
        (r"blocks of (\d+) tokens", "--block-size"),
        (r"max_model_len of at most ([\d,]+)", "--max-model-len"),
        (r"an (fp8) KV cache \([\d,]+ tokens\)", "--kv-dtype"),
    ):
        found = re.fullmatch(pattern, remedy)
        if found:
            return option, found[1].replace(",", "").replace(" ", "")
    raise AssertionError(f"no option is meant: {remedy}")


def test_where_no_knob_helps_none_is_named():
    result = run("--model", "deepseek-v3", "--hardware", "rtx4090")
    assert result.exit_code == 2
    assert "None of the knobs helps on its own: take a device with more memory" in result.stderr


def test_a_pool_that_does_not_hold_one_sequence_is_said_to_hold_none():
    def said(num_tokens: str) -> str:
        return " ".join(run(*H100, "--average-context", num_tokens).stdout.split())

    assert "KV does not hold one sequence of 500,000 tokens" in said("500000")
    assert "set max_num_seqs to about" not in said("500000")
    assert "1 sequence of 300,000 tokens" in said("300000")


def test_one_of_a_thing_is_not_called_some():
    args = ("--average-context", "1", "--prompt-tokens", "1", "--decodes", "1")
    said = " ".join(run(*H100, *args).stdout.split())
    assert "A prompt of 1 token takes 1 step beside 1 decode: 1 token in the first." in said
    assert "sequences of 1 token. What is left" in said
    assert not re.search(r"\b1 (tokens|steps|decodes|sequences)", said)
