"""How much memory is left: what the machine and its control groups say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtiers.data.host_memory import available_memory


def write(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


MEMINFO = "MemTotal:  999 kB\nMemAvailable:   1000 kB\n"


def test_available_is_the_machines_without_a_control_group(tmp_path: Path) -> None:
    places = write(tmp_path, {"proc/meminfo": MEMINFO})
    found = available_memory(*places)
    assert found is not None
    assert found.nbytes == 1000 * 1024
    assert "machine" in found.bound


def test_available_is_unknown_where_nothing_says(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) is None


@pytest.mark.parametrize("mount", ["cgroup", "cgroup/unified"])
def test_tightest_control_group_up_to_the_root_counts(tmp_path: Path, mount: str) -> None:
    places = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            f"{mount}/a/memory.max": "500000\n",
            f"{mount}/a/memory.current": "300000\n",
            f"{mount}/a/memory.stat": "anon 1\ninactive_file 100000\nactive_file 50000\n",
            f"{mount}/a/b/memory.max": "max\n",
            f"{mount}/a/b/memory.current": "300000\n",
        },
    )
    found = available_memory(*places)
    assert found is not None
    assert found.nbytes == 500000 - (300000 - 150000)
    assert "memory.max" in found.bound


def test_version_1_control_group_counts(tmp_path: Path) -> None:
    places = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:cpu,memory:/host/path\n1:name=systemd:/\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": "9000",
            "cgroup/memory/memory.usage_in_bytes": "10000",
            "cgroup/memory/memory.stat": "total_inactive_file 500\ninactive_file 7\n",
        },
    )
    found = available_memory(*places)
    assert found is not None
    assert found.nbytes == 0
    assert "limit_in_bytes" in found.bound


def test_version_1_without_a_limit_does_not_count(tmp_path: Path) -> None:
    places = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n",
            "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "cgroup/memory/memory.usage_in_bytes": "10000",
        },
    )
    found = available_memory(*places)
    assert found is not None
    assert "machine" in found.bound
