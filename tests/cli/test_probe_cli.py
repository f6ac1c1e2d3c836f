import json

import pytest
from typer.testing import CliRunner

from kvtiers.cli.main import app
from kvtiers.cost.calibration import load_calibration
from kvtiers.model.config import ENVIRONMENT_VARIABLE

QUICK = ("--device", "cpu", "--seconds", "0.3", "--scratch", "20MiB")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def yaml(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "tiers:\n  - {kind: dram, capacity: 1MiB}\n"
        f"  - {{kind: nvme, paths: [{tmp_path / 'disk/kv'}], capacity: 1MiB}}\n"
    )
    return path


def run(*args: object):
    return CliRunner().invoke(app, ["probe", *map(str, args)])


def test_probe_writes_a_file_that_the_configuration_uses(yaml, tmp_path):
    out, report = tmp_path / "calibration.json", tmp_path / "links.md"
    result = run(yaml, "--out", out, "--report", report, "--hardware", "h100", *QUICK)
    assert result.exit_code == 0, result.output
    for word in ("hbm>dram", "nvme>dram", "llama-3.1-8b", "H100 SXM", "small"):
        assert word in result.stdout
    assert f"wrote {out}" in result.stderr
    found = load_calibration(out)
    assert set(found.fits) == {"hbm>dram", "dram>hbm", "dram>nvme", "nvme>dram"}
    assert "| nvme>dram |" in report.read_text()
    yaml.write_text(f"{yaml.read_text()}cost: {{calibration: {out}}}\n")
    check = CliRunner().invoke(app, ["config", "check", str(yaml), "--here"])
    assert check.exit_code == 0, check.output
    out.write_text("{}")
    check = CliRunner().invoke(app, ["config", "check", str(yaml), "--here"])
    assert check.exit_code == 2
    assert "is no calibration" in check.stderr
    assert not (tmp_path / "disk").exists()


def test_probe_prints_json_for_programs(yaml):
    result = run(yaml, "--json", "--flops", "1e12", "--model", "qwen2.5-7b", *QUICK)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["version"] == 1
    assert data["break_even"]["model"] == "qwen2.5-7b"
    assert set(data["break_even"]["tokens"]) == {"dram", "nvme"}
    assert all(cell["seconds"] for cell in data["cells"])


def test_probe_without_a_speed_says_what_is_missing(yaml):
    result = run(yaml, *QUICK)
    assert result.exit_code == 0
    assert "Give --hardware NAME" in " ".join(result.stdout.split())


def test_probe_of_a_tier_without_a_place_ends_with_1(yaml):
    yaml.write_text(
        "tiers: [{kind: dram, capacity: 1MiB}, {kind: lmdb, path: /proc/kv/a, capacity: 1MiB}]"
    )
    result = run(yaml, *QUICK)
    assert result.exit_code == 1
    assert "not measured: lmdb: " in result.stderr
    assert "hbm>dram" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "llama-9"), "no model 'llama-9' is known"),
        (("--hardware", "h1000"), "did you mean 'h100'?"),
        (("--device", "tpu"), "--device 'tpu' is not known; known: auto, cpu, cuda"),
        (("--scratch", "640"), "--scratch: '640' has no unit"),
        (("--seconds", "0"), "seconds measure nothing"),
    ],
)
def test_wrong_input_exits_with_2_before_anything_is_measured(yaml, args, message):
    result = run(yaml, *args, "--json")
    assert result.exit_code == 2
    assert message in result.stderr
    assert json.loads(result.stdout)["ok"] is False


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(yaml, tmp_path):
    result = run(yaml, "--out", tmp_path / "none/c.json", "--seconds", "600")
    assert result.exit_code == 2
    assert f"{tmp_path / 'none/c.json'}: there is no folder to write it to" in result.stderr
