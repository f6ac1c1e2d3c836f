"""What passes between a fake engine's scheduler, its connector and its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol


class V1Scheduler(Protocol):
    """The scheduler's side of a vLLM V1 connector, as far as an engine needs it."""

    def on_new_request(self, request: Any) -> None: ...  # noqa: D102 - see vLLM
    def get_num_new_matched_tokens(  # noqa: D102
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...
    def update_state_after_alloc(  # noqa: D102
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...  # noqa: D102
    def update_connector_output(self, connector_output: Any) -> None: ...  # noqa: D102
    def request_finished_all_groups(  # noqa: D102
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Any]: ...
    def reset_cache(self) -> bool | None: ...  # noqa: D102


class Execution(Enum):
    """When the outputs of a step come."""

    SYNC = "sync"  # before the next step is scheduled
    ASYNC = "async"  # after the next step was scheduled: placeholders stand for tokens


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine.

    Attributes:
        num_blocks: of the pool, the null block included. block_size: tokens per block.
        max_step_tokens: budget of a step. max_running: requests at once.
        num_draft_tokens: speculative tokens of each decode.
    """

    num_blocks: int = 24
    block_size: int = 4
    max_step_tokens: int = 16
    max_running: int = 4
    num_draft_tokens: int = 0
    execution: Execution = Execution.SYNC


@dataclass(slots=True)
class FakeStep:
    """What runs, in the words of vLLM's ``SchedulerOutput``."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str]
    finished_req_ids: set[str]
    kv_connector_block_state: Any
    has_sync_kv_loads: bool
    block_ids: dict[str, list[int]] = field(default_factory=dict)
    num_drafts: dict[str, int] = field(default_factory=dict)
    kv_connector_metadata: Any = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step, all ranks together.

    Attributes:
        tokens: request id to the tokens it sampled; none for a chunk of a prompt.
        connector: in the words of vLLM's ``KVConnectorOutput``.
    """

    tokens: dict[str, list[int]]
    connector: Any


Execute = Callable[[FakeStep], StepResult]
