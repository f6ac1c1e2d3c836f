"""The connector fits the installed vLLM's base class, as its source says without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .vllm_source import check, methods_of, misfits

BASE = """
class Base:
    @property
    def role(self): ...
    @abstractmethod
    def start(self, context, **kwargs): ...
    def finish(self, request, block_ids=None): ...
    @classmethod
    def build(cls, data): ...
"""
FITS = "def start(self, context, **rest): ...\n"


def read_installed(path: str) -> str | None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    file = Path(spec.origin).parents[1] / path
    return file.read_text() if file.is_file() else None


def test_connector_fits_the_installed_vllm():
    assert check(read_installed) == []


def test_source_without_connector_interface_is_reported():
    assert check(lambda path: None) == ["no vllm/distributed/kv_transfer/kv_connector/v1/base.py"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (FITS, None),
        (FITS + "def finish(self, request, block_ids=()): ...\n", None),
        (FITS + "def finish(self, request, *, block_ids=()): ...\n", "takes ('request',)"),
        ("def finish(self, request, block_ids=None): ...\n", "start: abstract"),
        ("def start(self, context): ...\n", "no **kwargs"),
        (FITS + "def finish(self, request, block_ids=None, *, why=1): ...\n", None),
        (FITS + "def finish(self, block_ids, request): ...\n", "takes ('block_ids', 'request')"),
        (FITS + "def finish(self, request, block_ids): ...\n", "may leave out"),
        (FITS + "def finish(self, request, block_ids=None, *, why): ...\n", "does not give"),
        (FITS + "def finish(self, request, block_ids, why): ...\n", "does not give"),
        (FITS + "def role(self): ...\n", "a method, in vLLM a property"),
        (FITS + "def build(self, data): ...\n", "a method, in vLLM a classmethod"),
        (FITS + "def gone(self): ...\n", "gone: not in vLLM's base class"),
    ],
)
def test_drift_of_a_signature_is_found(body, problem):
    ours = "class Ours:\n" + "".join(f"    {line}\n" for line in body.splitlines())
    found = misfits(methods_of(ours, "Ours"), methods_of(BASE, "Base"), own=set())
    assert not found if problem is None else problem in "; ".join(found)
