"""What `TorchCopier` uses of ``torch.cuda``, over CPU tensors and queues that a test moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class FakeEvent:
    """Reached when its stream has run everything that was queued before it."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool) -> None:
        self._cuda = cuda
        self._timed = enable_timing
        self._at = 0
        self.reached = True  # as an event that was never recorded
        self.error: RuntimeError | None = None

    def record(self, stream: FakeStream) -> None:
        self.reached = False
        stream.put(self._reach)

    def _reach(self) -> None:
        self.reached, self._at = True, self._cuda.milliseconds

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._timed
        assert end._timed
        return float(end._at - self._at)

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.reached

    def synchronize(self) -> None:
        self._cuda.run_until(lambda: self.reached)


class FakeStream:
    """A queue of operators; nothing runs by itself."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._queue: deque[Callable[[], Any] | FakeEvent] = deque()

    def put(self, work: Callable[[], Any]) -> None:
        """Queue work."""
        self._queue.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        self._queue.append(event)

    def step(self) -> bool:
        """Run one item; False when there is none, or when it waits for another stream."""
        if not self._queue:
            return False
        item = self._queue[0]
        if isinstance(item, FakeEvent):
            if not item.reached:
                return False
        else:
            self._cuda.milliseconds += 1
            item()
        self._queue.popleft()
        return True

    def run(self) -> None:
        """Run what can run without any other stream."""
        while self.step():
            pass

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    def synchronize(self) -> None:
        self._cuda.run_until(lambda: self.idle)


class FakeCuda:
    """Stands in for ``torch.cuda``: operators on a selected stream are queued, not run."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.milliseconds = 0  # one for each item that runs
        self.engine = self.Stream()
        self._current = self.engine
        self.fail_after: int | None = None  # operators until the device refuses one
        self.capturing = False

    def Stream(self, device: object = None) -> FakeStream:  # noqa: N802
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        self.events.append(FakeEvent(self, enable_timing))
        return self.events[-1]

    def set_device(self, device: object) -> None:
        pass

    def current_stream(self, device: object) -> FakeStream:
        return self._current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            with _Queueing(self, stream):
                yield
        finally:
            self._current = before

    @property
    def copying(self) -> list[FakeStream]:
        """The streams that are not the engine's."""
        return self.streams[1:]

    def run_copies(self) -> None:
        """Run the copying streams as far as they come without the engine."""
        while self.step_copies():
            pass

    def step_copies(self) -> bool:
        """Run one item of each copying stream; False when none could."""
        return any([stream.step() for stream in self.copying])  # noqa: C419  no stream is skipped

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let all streams run until something holds, as a blocking wait does."""
        while not done():
            assert any([stream.step() for stream in self.streams]), "deadlock"  # noqa: C419


class _Queueing(TorchDispatchMode):
    """Queues operators that write; those that only view run at once."""

    def __init__(self, cuda: FakeCuda, stream: FakeStream) -> None:
        super().__init__()
        self._cuda = cuda
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        if self._cuda.fail_after is not None:
            if not self._cuda.fail_after:
                raise RuntimeError("CUDA error: out of memory")
            self._cuda.fail_after -= 1
        self._stream.put(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])
