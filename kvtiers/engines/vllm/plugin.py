"""The `vllm.general_plugins` entry point."""

from __future__ import annotations

NAME = "KVTiersConnector"


def register() -> None:
    """Make the connector known to vLLM by its name; vLLM may call this more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - vLLM's hook
        KVConnectorFactory,
    )

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvtiers.engines.vllm.connector", NAME)
