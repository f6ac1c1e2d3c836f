"""vLLM on the CPU in this process, whose steps, links and hand-over are watched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from decide_engine import BLOCK_SIZE, MODEL, throttle_memory_stores
from fidelity_judge import Run
from fidelity_taught import Taught, num_reloads, tokens_reloaded
from fidelity_torch import Below, TimedRequests

from kvtiers.bench.random_model import write_random_model

NUM_BLOCKS, LONGEST = 73, 2048  # vLLM's block 0 is nobody's
BUDGET, MOST_SEQUENCES = 512, 8


def plain_config(below: Below) -> dict[str, Any]:
    """Return kvtiers' configuration."""
    return {"tiers": list(below.tiers), "cost": {"mode": below.mode}}


class VLLM:
    """One engine, whose steps and links are watched."""

    def __init__(self, folder: Path, below: Below) -> None:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - takes seconds
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        throttle = throttle_memory_stores()
        more: dict[str, Any] = {}
        if below.tiers:
            more["kv_transfer_config"] = {
                "kv_connector": "KVTiersConnector",
                "kv_connector_module_path": "kvtiers.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"config": plain_config(below)},
            }
        args = EngineArgs(
            model=str(write_random_model(MODEL, folder)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=MODEL.dtype,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            max_num_batched_tokens=BUDGET,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_num_seqs=MOST_SEQUENCES,
            disable_log_stats=True,
            seed=0,
            **more,
        )
        args.use_tqdm_on_load = False
        self._engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        scheduler = self._engine.engine_core.engine_core.scheduler
        self.watermark = float(scheduler.scheduler_config.watermark)
        self.connector = scheduler.connector.scheduler_side.connector if below.tiers else None
        self.taught = Taught()
        self._num_loads = 0
        self._num_local: dict[str, int] = {}
        self._scheduled: Any = None
        self._num_preempted = 0
        self._watch(scheduler)
        if below.bytes_per_second:
            throttle(below.bytes_per_second)

    def _watch(self, scheduler: Any) -> None:
        schedule, get_output = scheduler.schedule, self._engine.engine_core.get_output

        def scheduling(*args: Any) -> Any:
            began = time.perf_counter()
            output = self._scheduled = schedule(*args)
            self._num_preempted += len(output.preempted_req_ids or ())
            meta = output.kv_connector_metadata
            self._num_loads = 0 if meta is None else num_reloads(meta.orders)
            took, num_tokens = time.perf_counter() - began, output.total_num_scheduled_tokens
            self.taught.schedules.append((self._num_loads, num_tokens, took))
            return output

        def outputting() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    local = output.prefill_stats.num_local_cached_tokens
                    self._num_local.setdefault(output.request_id, local)
            return outputs

        scheduler.schedule = scheduling
        self._engine.engine_core.get_output = outputting
        if self.connector is not None:
            self.taught.watch(self.connector)

    def serve(self, arrivals: TimedRequests, concurrency: int | None) -> Run:
        """Serve requests as `fidelity_torch.serve` does."""
        from vllm import SamplingParams  # noqa: PLC0415

        self._num_local.clear()
        before, preempted = self._reloaded(), self._num_preempted
        ended = began = time.perf_counter()
        left = [(began + at, request) for at, request in arrivals][::-1]
        arrived: dict[str, float] = {}
        first: dict[str, float] = {}
        num_tokens = 0
        while left or self._engine.has_unfinished_requests():
            now, num = time.perf_counter(), self._engine.get_num_unfinished_requests()
            while left and (left[-1][0] <= now if concurrency is None else num < concurrency):
                at, request = left.pop()
                arrived[request.request_id] = at if concurrency is None else now
                fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
                params = SamplingParams(max_tokens=request.max_tokens, **fixed)
                prompt = {"prompt_token_ids": list(request.prompt_token_ids or ())}
                self._engine.add_request(request.request_id, prompt, params)
                num += 1
            if not num:
                self._idle(left[-1][0])
                ended = time.perf_counter()
                continue
            outputs = self._engine.step()
            now = time.perf_counter()
            self._note_step(now - ended)
            ended = now
            for output in outputs:
                first.setdefault(output.request_id, now)
                if output.finished:
                    num_tokens += len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        while self.connector is not None and self.connector.busy:
            self._engine.step()
        hits = {tier: num - before.get(tier, 0) for tier, num in self._reloaded().items()}
        hits["hbm"] = sum(self._num_local.values())
        return Run.of(
            [first[name] - at for name, at in arrived.items()],
            num_tokens / (ended - began),
            hits={tier: num for tier, num in hits.items() if num},
            num_preemptions=self._num_preempted - preempted,
        )

    def _note_step(self, seconds: float) -> None:
        """Keep a step that loaded nothing and computed something."""
        scheduled = self._scheduled
        if scheduled is None or not scheduled.num_scheduled_tokens or self._num_loads:
            return
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduled.num_scheduled_tokens)
        new = [scheduled.num_scheduled_tokens[name] for name in names]
        self.taught.steps.append((new, [before[name] for name in names], seconds))
        self._scheduled = None

    def _idle(self, until: float) -> None:
        while (now := time.perf_counter()) < until:
            if self.connector is not None and self.connector.busy:
                self._engine.step()
            else:
                time.sleep(min(0.001, until - now))

    def _reloaded(self) -> dict[str, int]:
        return {} if self.connector is None else tokens_reloaded(self.connector)
