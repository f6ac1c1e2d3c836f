import json

import pytest
from typer.testing import CliRunner

from kvtiers.cli.main import app


def run(*args: str):
    return CliRunner().invoke(app, ["bench", *args])


def test_bench_prints_a_table_with_break_even_lengths():
    result = run("--model", "llama-3.1-8b", "--hardware", "h100")
    assert result.exit_code == 0
    for word in ("H100 SXM", "break-even", "never", "131,072", "nothing was run"):
        assert word in result.stdout


def test_bench_prints_json_for_programs():
    result = run(
        *("--model", "deepseek-v3", "--hardware", "h200", "--tensor-parallel", "8"),
        *(
            "--dtype",
            "fp8",
            "--tier",
            "nvme-gen5",
            "--length",
            "8192",
            "--length",
            "1024",
            "--json",
        ),
    )
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["plan"]["lengths"] == [1024, 8192]
    assert [tier["name"] for tier in data["tiers"]] == ["dram", "nvme-gen5"]
    assert data["kv_nbytes_per_token"] == 61 * 576 * 2


def test_bench_writes_files_and_says_which(tmp_path):
    output = tmp_path / "out"
    result = run("--model", "Qwen/Qwen3-8B", "--hardware", "a100", "--output", str(output))
    assert result.exit_code == 0
    names = sorted(path.name for path in output.iterdir())
    assert {"qwen3-8b-on-a100.html", "qwen3-8b-on-a100.json"} <= set(names)
    assert all(f"{name}" in result.stderr.replace("\n", "") for name in names)


def test_bench_takes_a_config_json(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    path, output = str(folder / "config.json"), str(tmp_path / "out")
    result = run("--model", path, "--hardware", "epyc-9654", "--dtype", "fp32", "--output", output)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "my-model-on-epyc-9654.json").is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "llama-9", "--hardware", "h100"), "no model 'llama-9' is known"),
        (("--model", "llama-3.1-8b", "--hardware", "h1000"), "did you mean 'h100'?"),
        (("--model", "none.json", "--hardware", "h100"), "none.json: no such file"),
    ],
)
def test_bench_lists_what_is_known_and_exits_with_2(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    as_json = run(*args, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["ok"] is False
