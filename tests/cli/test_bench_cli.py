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


def test_demo_whose_folder_cannot_be_made_says_so_at_once():
    result = CliRunner().invoke(app, ["demo", "--folder", "/proc/model"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("/proc/model: cannot write there: ")


def test_data_type_that_is_none_is_named():
    result = run("--dtype", "int8")
    assert result.exit_code == 2
    assert result.stderr.startswith("dtype 'int8' is none of float32, bfloat16, float16")


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
        (("--hardware", "h100"), "--hardware needs --model"),
        (("--model", "llama-9"), "no model 'llama-9' is known"),
        (("--lengths", "1k"), "'1k' is no number of tokens"),
        (("--lengths", "64,128"), "at least three"),
        (("--throttle", "fast"), "--throttle: 'fast'"),
        (("--resume",), "--resume needs the folder"),
        (("--tp", "2"), "--tensor-parallel: changes nothing here; add --hardware"),
        (
            ("--model", "llama-3.1-8b", "--hardware", "h100", "--throttle", "40MB"),
            "--throttle: changes nothing here; drop --hardware",
        ),
        (("--tier", "tape"), "'tape'"),
    ],
)
def test_bench_lists_what_is_known_and_exits_with_2(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    as_json = run(*args, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["ok"] is False


TINY = ("--layers", "2", "--hidden", "64", "--lengths", "40,72", "--length", "104")


def test_bench_measures_writes_files_and_cleans_up(tmp_path):
    out, folder = tmp_path / "out", tmp_path / "stores"
    where = ("--output", str(out), "--folder", str(folder))
    result = run(*TINY, "--repeats", "1", "--tier", "nvme", "--throttle", "50MB", *where)
    assert result.exit_code == 0, result.output
    for word in ("recompute", "dram", "nvme", "break-even", "prediction error", "50 MB/s"):
        assert word in result.stdout
    assert {"bench.html", "bench.json", "points.json"} <= {path.name for path in out.iterdir()}
    assert list(folder.iterdir()) == []
    again = run(*TINY, "--repeats", "1", "--tier", "nvme", "--throttle", "50MB", *where, "--resume")
    assert again.exit_code == 0, again.output


def test_bench_that_is_out_of_time_says_how_to_go_on():
    result = run(*TINY, "--max-seconds", "0.0001", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["verdict"] is None
    assert any("--resume" in note for note in data["notes"])
