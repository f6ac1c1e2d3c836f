"""The adapter to vLLM: `KVTiersConnector`, imported on first use."""

from __future__ import annotations

from typing import Any

__all__ = ["KVTiersConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector when it is asked for: the plugin hook must stay light."""
    if name == "KVTiersConnector":
        from kvtiers.engines.vllm.connector import KVTiersConnector  # noqa: PLC0415 - lazy

        return KVTiersConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
