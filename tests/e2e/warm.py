"""Starts an engine's processes from one that has loaded vLLM, which takes each six seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock

_PRELOAD = [
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]


class _Process(ForkServerProcess):
    """Begins as a spawned one does, with its parent's environment, but for the imports."""

    def start(self) -> None:
        """Fork it from the server."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Do its work. The processes that it starts are forked from it."""
        os.environ.clear()
        os.environ.update(self._environment)
        gc.freeze()  # vLLM collects all garbage again and again while it starts
        with _instead_of_spawn(multiprocessing.get_context("fork")):
            super().run()


class _Context(ForkServerContext):
    Process = _Process


#: Processes that find vLLM loaded.
WARM = _Context()
WARM.set_forkserver_preload(_PRELOAD)


@contextmanager
def warm_processes() -> Iterator[None]:
    """Let vLLM start its processes warm, where it would spawn them. Its server does not."""
    with _instead_of_spawn(WARM):
        yield


@contextmanager
def _instead_of_spawn(context: BaseContext) -> Iterator[None]:
    get_context = multiprocessing.get_context

    def chosen(method: str | None = None) -> Any:
        return context if method == "spawn" else get_context(method)

    with mock.patch.object(multiprocessing, "get_context", chosen):
        yield
