"""Drives a real vLLM engine in the words of a test: prompts, answers, blocks, resets.

vLLM takes 5 s to import: that waits until a test starts an engine.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kvtiers.bench.random_model import TINY, RandomModel, write_random_model

from .answers import Answer, Answers, Prompt
from .heap import frozen_imports
from .inside import Inside
from .warm import warm_processes


@dataclass(frozen=True)
class EngineOptions:
    """One engine: its model, its pool of blocks, and what connector it has."""

    model: RandomModel = TINY
    block_size: int = 32
    num_gpu_blocks: int = 512
    max_model_len: int = 2048
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    #: False: scheduler and worker live in this process, and the test steps them.
    multiprocess: bool = False
    log_stats: bool = False
    #: The configuration of kvtiers, a path to one, or None for an engine without connector.
    kvtiers: Mapping[str, Any] | str | None = None
    #: Fields of the engine's KV transfer config, for other connectors and policies.
    kv_transfer: Mapping[str, Any] = field(default_factory=dict)
    #: Fields of the model's configuration to serve it with, other than its own.
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> Self:
        """The same engine without any connector."""
        return replace(self, kvtiers=None, kv_transfer={})

    def kv_transfer_config(self) -> dict[str, Any] | None:
        """Return ``--kv-transfer-config`` as a mapping, None without a connector."""
        if self.kvtiers is None and not self.kv_transfer:
            return None
        config: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        if self.kvtiers is not None:
            config |= {
                "kv_connector": "KVTiersConnector",
                "kv_connector_extra_config": {"config": self.kvtiers},
            }
        return config | dict(self.kv_transfer)

    def engine_args(self, model_directory: Path) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's ``EngineArgs``."""
        arguments: dict[str, Any] = {
            "model": str(model_directory),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": self.model.dtype,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_gpu_blocks,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_dtype": self.kv_cache_dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": True,
            "disable_log_stats": not self.log_stats,
        }
        if self.hf_overrides:
            arguments["hf_overrides"] = dict(self.hf_overrides)
        if (config := self.kv_transfer_config()) is not None:
            arguments["kv_transfer_config"] = config
        return arguments


#: Asserts that an engine does not start, and what it says: see the fixture `refuses`.
Refuses = Callable[[EngineOptions, str], None]


class Engine:
    """One running engine. Names of requests are the test's own and are not reused."""

    def __init__(self, options: EngineOptions, model_directory: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        self.options = options
        arguments = EngineArgs(**options.engine_args(model_directory))
        arguments.use_tqdm_on_load = False
        multiprocessing = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(options.multiprocess))}
        with frozen_imports(), warm_processes(), _environment(multiprocessing):
            self.llm_engine = LLMEngine.from_engine_args(
                arguments, enable_multiprocessing=options.multiprocess
            )
        self.answers: Answers = {}
        self._internal_ids: dict[str, str] = {}
        self._num_added = itertools.count()
        self._observe_outputs()

    # -- requests ---------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        max_tokens: int = 8,
        *,
        name: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request for greedy decoding, and return its name."""
        from vllm import SamplingParams  # noqa: PLC0415

        name = name or f"request-{next(self._num_added)}"
        assert name not in self._internal_ids, f"the name {name} was used before"
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        content: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if cache_salt is not None:
            content["cache_salt"] = cache_salt
        self.answers[name] = Answer((), ())
        self._internal_ids[name] = self.llm_engine.add_request(name, content, params)
        return name

    def step(self) -> list[str]:
        """Run one engine step, and return the names of the requests that finished in it."""
        finished = []
        for output in self.llm_engine.step():
            completion = output.outputs[0]
            self.answers[output.request_id] = replace(
                self.answers[output.request_id],
                token_ids=tuple(completion.token_ids),
                logprobs=tuple(
                    position[token_id].logprob
                    for token_id, position in zip(
                        completion.token_ids, completion.logprobs, strict=True
                    )
                ),
                finish_reason=completion.finish_reason,
            )
            if output.finished:
                finished.append(output.request_id)
        return finished

    def run(self, timeout_seconds: float = 120.0) -> Answers:
        """Step until every request finished, and return all answers so far."""
        self.run_until(lambda: not self.running, timeout_seconds)
        return dict(self.answers)

    def run_until(self, done: Callable[[], bool], timeout_seconds: float = 120.0) -> None:
        """Step until ``done()``; AssertionError with the state of all requests if it never is."""
        deadline = time.monotonic() + timeout_seconds
        while not done():
            self.step()
            assert time.monotonic() < deadline, (
                f"not done after {timeout_seconds} s; running: "
                + ", ".join(f"{n} ({len(self.answers[n].token_ids)} tokens)" for n in self.running)
            )

    def generate(
        self,
        prompts: Iterable[Prompt],
        max_tokens: int | Sequence[int] = 8,
        *,
        cache_salt: str | None = None,
    ) -> list[Answer]:
        """Run ``prompts`` together to their end, and return their answers in the same order."""
        prompts = list(prompts)
        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        names = [
            self.add(prompt, length, cache_salt=cache_salt)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        self.run()
        return [self.answers[name] for name in names]

    def abort(self, name: str) -> None:
        """Abort a request; its answer keeps the tokens that it got."""
        self.llm_engine.abort_request([name])
        self.answers[name] = replace(self.answers[name], finish_reason="abort")

    @property
    def running(self) -> list[str]:
        """The names of requests that were neither aborted nor finished."""
        return [name for name, answer in self.answers.items() if answer.finish_reason is None]

    @property
    def loading(self) -> list[str]:
        """The names of requests whose asynchronous load runs (in-process engines)."""
        requests = self.inside.scheduler.requests
        return [
            name
            for name in self.running
            if (request := requests.get(self.internal_id(name))) is not None
            and request.status.name == "WAITING_FOR_REMOTE_KVS"
        ]

    def internal_id(self, name: str) -> str:
        """Return the id by which scheduler, worker and connector know the request."""
        return self._internal_ids[name]

    def ttft_seconds(self, prompt: Prompt) -> float:
        """Return the time from adding ``prompt`` to its first token, and finish it."""
        start = time.perf_counter()
        name = self.add(prompt, 1)
        self.run_until(lambda: bool(self.answers[name].token_ids))
        return time.perf_counter() - start

    # -- caches -----------------------------------------------------------------------------

    def reset_prefix_cache(
        self, *, reset_connector: bool = False, reset_running_requests: bool = False
    ) -> bool:
        """Forget the engine's own prefix cache; False while it could not."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    @property
    def inside(self) -> Inside:
        """What only an in-process engine shows."""
        assert not self.options.multiprocess, "scheduler and worker are in other processes"
        return Inside(self.llm_engine)

    def block_ids_of(self, name: str) -> tuple[list[int], ...]:
        """Return the blocks that a running request holds, by KV group (in-process engines)."""
        return self.inside.block_ids_of(self.internal_id(name))

    def settle(self, timeout_seconds: float = 30.0) -> None:
        """Step an in-process engine until its scheduler has nothing left to tell its worker."""
        deadline = time.monotonic() + timeout_seconds
        while self.inside.scheduler.has_requests():
            self.step()
            assert time.monotonic() < deadline, f"work left after {timeout_seconds} s"

    def clear(self, *, reset_connector: bool = True) -> None:
        """End all requests and empty all caches: what a test that shares an engine starts from."""
        for name in self.running:
            self.abort(name)
        deadline = time.monotonic() + 30.0
        while not self.reset_prefix_cache(reset_connector=reset_connector):
            assert time.monotonic() < deadline, "blocks are still held"
            if self.options.multiprocess:
                time.sleep(0.02)  # Its core steps by itself; ours would wait for an output.
            else:
                self.step()
        if not self.options.multiprocess:
            self.settle()
        self.answers.clear()
        self._internal_ids.clear()

    # -- life -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the engine and its processes, and free its memory."""
        with frozen_imports():
            self.llm_engine.engine_core.shutdown()
            del self.llm_engine
            gc.collect()

    def _observe_outputs(self) -> None:
        """Note what the core reports about prefills and preemptions before vLLM drops it."""
        client = self.llm_engine.engine_core
        get_output = client.get_output

        def observed() -> Any:
            outputs = get_output()
            names = {internal: name for name, internal in self._internal_ids.items()}
            for output in outputs.outputs:
                if (name := names.get(output.request_id)) and output.prefill_stats is not None:
                    self._note_prefill(name, output.prefill_stats)
            if not self.options.multiprocess:
                for internal, request in self.inside.scheduler.requests.items():
                    if name := names.get(internal):
                        self.answers[name] = replace(
                            self.answers[name], num_preemptions=request.num_preemptions
                        )
            return outputs

        client.get_output = observed

    def _note_prefill(self, name: str, stats: Any) -> None:
        answer = self.answers[name]
        if answer.token_ids:
            return  # A later admission, after a preemption.
        self.answers[name] = replace(
            answer,
            num_local_cached_tokens=stats.num_local_cached_tokens,
            num_external_cached_tokens=stats.num_external_cached_tokens,
        )


class Engines:
    """Starts engines on demand and keeps one alive: vLLM's worker state is process-wide."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engine: Engine | None = None

    def get(self, options: EngineOptions) -> Engine:
        """Return a cleared engine with these options; the one before is stopped."""
        if self._engine is not None and self._engine.options != options:
            self.shutdown()
        if self._engine is None:
            self._engine = Engine(options, self.model_directory(options.model))
        self._engine.clear()
        return self._engine

    def restart(self, options: EngineOptions) -> Engine:
        """Return a new, cleared engine with these options."""
        self.shutdown()
        return self.get(options)

    def start(self, options: EngineOptions, model_directory: Path | None = None) -> Engine:
        """Return a new engine as a start of the server makes it: it may find what stores hold.

        Args:
            model_directory: to serve instead of the one that the options name.
        """
        self.shutdown()
        directory = model_directory or self.model_directory(options.model)
        self._engine = Engine(options, directory)
        return self._engine

    def model_directory(self, model: RandomModel) -> Path:
        """Return where ``model`` lies on disk; it is written on first use."""
        name = f"model-{abs(hash(model)):x}"
        return write_random_model(model, self._directory / name)

    def shutdown_over(self, folder: Path) -> None:
        """Stop the engine that is alive if its configuration names a place in this folder."""
        if self._engine is not None and str(folder) in repr(self._engine.options.kvtiers):
            self.shutdown()

    def shutdown(self) -> None:
        """Stop the engine that is alive, if any."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
