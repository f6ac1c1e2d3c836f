import ctypes
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvtiers import __version__
from kvtiers.cli.info import cuda_rows, installation_rows, machine_rows
from kvtiers.cli.main import app
from kvtiers.cli.probe_install import (
    Installation,
    installed_version,
    is_supported_vllm,
    probe_installation,
)
from kvtiers.cli.probe_machine import CudaDriver, Gpu, Machine, probe_cuda, probe_machine

INSTALLED = Installation(
    kvtiers="0.1.0",
    python="3.12.1",
    compiled_module_problem=None,
    torch=None,
    cupy=None,
    vllm="0.32.0",
    vllm_supported=True,
    cuda_kernels_nbytes=77824,
)


class FakeDriver:
    """The driver API's calls that `probe_cuda` makes, for a machine with two GPUs."""

    def __init__(self, init_status: int = 0, count_status: int = 0) -> None:
        self._init_status = init_status
        self._count_status = count_status

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = 12080
        return 0

    def cuInit(self, _flags):  # noqa: N802
        return self._init_status

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = 2
        return self._count_status

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, _length, device):  # noqa: N802
        name.value = f"GPU {device.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, nbytes, _device):  # noqa: N802
        nbytes._obj.value = 80 * 2**30
        return 0


@pytest.fixture
def machine_root(tmp_path):
    """Lay out the kernel's files of a machine of two sockets that share nothing."""
    files = {
        "proc/meminfo": "MemTotal: 2048 kB\nMemAvailable:  1024 kB\nHugePages_Free:    3\n",
        "proc/cpuinfo": "flags\t: sse avx2 avx512f\n\nflags\t: sse avx2\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/fs/cgroup/memory.max": "1048576\n",
    }
    for cpu, socket in enumerate((0, 0, 1, 1)):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        files[f"{folder}/size"] = "32768K\n"
        files[f"{folder}/shared_cpu_list"] = f"{2 * socket}-{2 * socket + 1}\n"
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_info_says_what_is_built_and_what_the_machine_offers():
    result = CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    names = ["compiled module", "cupy", "vllm", "cores", "L3 cache", "memory", "huge pages"]
    for name in [*names, "vector units", "CUDA driver", __version__]:
        assert name in result.stdout


def test_info_prints_json():
    answer = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert set(answer) == {"built", "machine", "cuda"}
    assert answer["built"]["kvtiers"] == __version__
    assert answer["machine"]["num_cores"] >= 1


def test_machine_is_read_from_the_kernels_files(machine_root):
    machine = probe_machine(machine_root)
    assert machine.l3_nbytes == 2 * 32 * 2**20
    assert machine.memory_total_nbytes == 2 * 2**20
    assert machine.memory_available_nbytes == 2**20
    assert machine.memory_limit_nbytes == 2**20
    assert machine.transparent_huge_pages == "madvise"
    assert machine.num_free_huge_pages == 3
    assert machine.cpu_features == ("avx2",)


def test_machine_that_says_nothing_is_unknown_and_no_error(tmp_path):
    machine = probe_machine(tmp_path)
    assert machine.l3_nbytes is None
    assert machine.memory_total_nbytes is None
    assert machine.memory_limit_nbytes is None
    assert machine.transparent_huge_pages is None
    assert machine.cpu_features == ()
    rows = dict(machine_rows(machine))
    assert rows["L3 cache"] == "unknown"
    assert rows["vector units"] == "no AVX2"
    assert rows["huge pages"] == "transparent: unknown, reserved and free: unknown"


def test_limit_of_the_container_is_shown(machine_root):
    rows = dict(machine_rows(probe_machine(machine_root)))
    assert rows["memory"] == "1.0 MiB available of 2.0 MiB, the container's limit is 1.0 MiB"


def test_unlimited_container_has_no_limit(machine_root):
    (machine_root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert probe_machine(machine_root).memory_limit_nbytes is None


def test_memory_lock_limit_is_shown_as_none_where_there_is_none():
    machine = Machine(8, None, None, None, None, None, None, None, ())
    assert dict(machine_rows(machine))["memory lock limit"] == "none"
    limited = replace(machine, memlock_nbytes=65536)
    assert dict(machine_rows(limited))["memory lock limit"] == "64.0 KiB"


def test_gpus_are_named_by_the_driver():
    driver = probe_cuda(lambda _name: FakeDriver())
    assert driver == CudaDriver("12.8", (Gpu("GPU 0", 80 * 2**30), Gpu("GPU 1", 80 * 2**30)))
    assert dict(cuda_rows(driver)) == {
        "CUDA driver": "serves CUDA 12.8",
        "GPU": "GPU 0, 80.0 GiB; GPU 1, 80.0 GiB",
    }


def test_machine_without_a_driver_is_no_error():
    def no_library(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    assert probe_cuda(no_library) is None
    assert cuda_rows(None) == [("CUDA driver", "not found")]


@pytest.mark.parametrize(
    ("driver", "fault"),
    [
        (FakeDriver(init_status=100), "cuInit answered error 100"),
        (FakeDriver(count_status=3), "cuDeviceGetCount answered error 3"),
    ],
)
def test_driver_without_a_usable_gpu_says_why(driver, fault):
    found = probe_cuda(lambda _name: driver)
    assert found == CudaDriver("12.8", (), fault)
    assert dict(cuda_rows(found))["GPU"] == f"none ({fault})"


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.7+cpu", True),
        ("0.32.1rc1", True),
        ("0.31.9", False),
        ("0.320.0", False),
        ("1.32.0", False),
    ],
)
def test_supported_vllm_is_one_release_series(version, supported):
    assert is_supported_vllm(version) is supported


@pytest.mark.parametrize(
    ("vllm", "supported", "text"),
    [
        (None, False, "not installed; 0.32.x is supported"),
        ("0.32.0", True, "0.32.0, supported"),
        ("0.40.0", False, "0.40.0, not supported; install 0.32.x"),
    ],
)
def test_info_says_whether_vllm_is_supported(vllm, supported, text):
    found = replace(INSTALLED, vllm=vllm, vllm_supported=supported)
    assert dict(installation_rows(found))["vllm"] == text


def test_info_says_why_the_compiled_module_does_not_load():
    found = replace(INSTALLED, compiled_module_problem="undefined symbol")
    assert dict(installation_rows(found))["compiled module"] == "none: undefined symbol"
    assert dict(installation_rows(INSTALLED))["compiled module"] == "loads"


def test_first_installed_distribution_gives_the_version():
    assert installed_version(("no-such-distribution", "pytest")) == pytest.__version__
    assert installed_version(("no-such-distribution",)) is None


def test_installation_is_probed_without_importing_the_engine():
    assert probe_installation().kvtiers == __version__
