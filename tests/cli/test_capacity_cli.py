import json

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
