"""Which KV tensors the worker side serves, and which it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtiers.model.errors import UnsupportedEngineError

pytestmark = pytest.mark.e2e


def tensors_on(*devices: str) -> dict[str, object]:
    import torch  # noqa: PLC0415

    return {str(i): SimpleNamespace(device=torch.device(name)) for i, name in enumerate(devices)}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(["cpu", "cpu"], "cpu"), (["cuda:1", "cuda:1"], "cuda")],
)
def test_tensors_on_the_cpu_or_on_one_gpu_are_served(devices: list[str], expected: str) -> None:
    from kvtiers.engines.vllm.worker_side import device_type  # noqa: PLC0415

    assert device_type(tensors_on(*devices)) == expected


@pytest.mark.parametrize(
    "devices", [["cpu", "cuda:0"], ["cuda:0", "cuda:1"], ["xpu:0"], ["meta", "cpu"], []]
)
def test_tensors_elsewhere_are_refused_by_name(devices: list[str]) -> None:
    from kvtiers.engines.vllm.worker_side import device_type  # noqa: PLC0415

    with pytest.raises(UnsupportedEngineError, match=f"KV tensors on {', '.join(sorted(devices))}"):
        device_type(tensors_on(*devices))
