"""vLLM and torch warn of themselves while they are imported; that is not for these tests."""

from __future__ import annotations

import importlib.util
import warnings

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvtiers.engines.vllm.connector  # noqa: F401
