"""Looks inside an engine whose scheduler and worker live in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .answers import Prompt

#: What stands in a block table where a sliding window no longer needs a block.
NULL_BLOCK_ID = 0


class Inside:
    """The scheduler, the worker, their connectors and the KV tensors of an in-process engine."""

    def __init__(self, llm_engine: Any) -> None:
        self._llm_engine = llm_engine

    @property
    def core(self) -> Any:
        """The engine core of an in-process engine."""
        return self._llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def scheduler_connector(self) -> Any:
        """The connector object on the scheduler side."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The connector object on the worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        return get_kv_transfer_group()

    @property
    def kv_caches(self) -> dict[str, Any]:
        """The KV tensor of each layer, ``[num_blocks, kv_heads, block_size, 2 * head_dim]``.

        With several KV groups, layers of different groups share one tensor: a block id belongs
        to one group at a time.
        """
        runner = self.core.model_executor.driver_worker.worker.model_runner
        context = runner.compilation_config.static_forward_context
        return {
            layer: context[layer].kv_cache
            for group in self.kv_groups
            for layer in group.layer_names
        }

    @property
    def kv_groups(self) -> Sequence[Any]:
        """vLLM's description of the KV groups."""
        return self.scheduler.kv_cache_config.kv_cache_groups

    def block_ids_of(self, internal_id: str) -> tuple[list[int], ...]:
        """Return the blocks that a running request holds, by KV group."""
        return self.scheduler.kv_cache_manager.get_block_ids(internal_id)

    def cached_block_ids(
        self, prompt: Prompt, cache_salt: str | None = None
    ) -> tuple[list[int], ...]:
        """Return the blocks that the engine's own prefix cache holds of ``prompt``, by group."""
        from vllm import SamplingParams  # noqa: PLC0415

        content: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if cache_salt is not None:
            content["cache_salt"] = cache_salt
        message = self._llm_engine.input_processor.process_inputs(
            "probe", content, SamplingParams(max_tokens=1), supported_tasks=("generate",)
        )
        request, _ = self.core.preprocess_add_request(message)
        blocks, _, _ = self.scheduler.kv_cache_manager.get_computed_blocks(request)
        return blocks.get_block_ids()

    def kv_of_blocks(self, block_ids: Sequence[int], group_idx: int = 0) -> dict[str, Any]:
        """Return copies of the KV of blocks, for each layer of their group."""
        return {
            layer: self.kv_caches[layer][list(block_ids)].clone()
            for layer in self.kv_groups[group_idx].layer_names
        }

    def kv_of_prompt(self, prompt: Prompt, cache_salt: str | None = None) -> dict[str, Any]:
        """Return, by layer, copies of the KV blocks that the engine itself cached of ``prompt``.

        In the order of the prompt. Blocks before a sliding window are left out.
        """
        kv: dict[str, Any] = {}
        for group_idx, block_ids in enumerate(self.cached_block_ids(prompt, cache_salt)):
            kv |= self.kv_of_blocks([b for b in block_ids if b != NULL_BLOCK_ID], group_idx)
        return kv

    def replace_kv(self, block_ids: Sequence[int], kv: Mapping[str, Any]) -> None:
        """Overwrite blocks with what ``kv_of_blocks`` returned, for the layers in it."""
        for layer, blocks in kv.items():
            self.kv_caches[layer][list(block_ids)] = blocks

    def spoil_kv(self, block_ids: Iterable[int] | None = None, seed: int = 0) -> None:
        """Overwrite blocks (all, unless given) with noise of a plausible size: a control.

        A test that cannot tell spoiled KV from the right one proves nothing.
        """
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(seed)
        for tensor in self.kv_caches.values():
            chosen = list(range(tensor.shape[0])) if block_ids is None else list(block_ids)
            noise = torch.randn((len(chosen), *tensor.shape[1:]), generator=generator)
            if tensor.dtype == torch.uint8:
                tensor[chosen] = noise.abs().mul(16).clamp(0, 100).to(torch.uint8)
            else:
                tensor[chosen] = noise.to(tensor.dtype)
