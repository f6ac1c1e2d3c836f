"""A machine that moves blocks and computes layers one by one: the truth that plans are judged by.

It shares no formula with `kvtiers.cost`: events, one block, chunk and layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Server:
    """A link: one block after another, in the order in which they are asked for."""

    seconds_per_block: float
    latency: float = 0.0
    free_at: float = 0.0

    def serve(self, ready: float) -> float:
        """Return when a block that can start at `ready` is through."""
        self.free_at = max(self.free_at, ready) + self.seconds_per_block
        return self.free_at


@dataclass
class Device:
    """A transformer's speed, from first principles: multiply-adds a token, a pair and a layer."""

    num_layers: int = 32
    params: int = 6_979_321_856
    heads_times_size: int = 32 * 128
    flops_per_second: float = 5e14
    attention_flops_per_second: float = 5e14
    step_seconds: float = 0.005
    chunk: int = 8192

    def steps(self, num_tokens: int, context: int) -> list[float]:
        """Return the seconds of each step of a prefill."""
        seconds = []
        while num_tokens > 0:
            n = min(num_tokens, self.chunk)
            pairs = sum(context + i + 0.5 for i in range(n))
            linear = 2 * self.params * n / self.flops_per_second
            attention = 4 * self.num_layers * self.heads_times_size * pairs
            seconds.append(self.step_seconds + linear + attention / self.attention_flops_per_second)
            num_tokens -= n
            context += n
        return seconds


@dataclass
class Request:
    """One prompt: of its hits, `num_blocks` are loaded; all of them lie on one tier."""

    num_tokens: int
    num_blocks: int
    from_store: bool = True
    arrives: float = 0.0


@dataclass
class Machine:
    """A store, the way to HBM and a device; loads are served in order of arrival."""

    device: Device = field(default_factory=Device)
    store: Server = field(default_factory=lambda: Server(1e-3))
    to_hbm: Server = field(default_factory=lambda: Server(40e-6))
    block_size: int = 16

    def load(self, request: Request) -> list[float]:
        """Return when each block of a request reaches HBM."""
        arrivals = []
        for _ in range(request.num_blocks):
            first = not arrivals
            ready = request.arrives
            if request.from_store:
                ready = self.store.serve(ready + (self.store.latency if first else 0.0))
            arrivals.append(self.to_hbm.serve(ready + (self.to_hbm.latency if first else 0.0)))
        return arrivals

    def serial(self, requests: list[Request]) -> list[float]:
        """Return each request's time to its first token: load, then compute; the device takes
        whoever is ready first."""
        ready = []
        for request in requests:
            arrivals = self.load(request)
            ready.append(arrivals[-1] if arrivals else request.arrives)
        ends, free_at = [0.0] * len(requests), 0.0
        for idx in sorted(range(len(requests)), key=lambda i: (ready[i], i)):
            request = requests[idx]
            cached = min(request.num_blocks * self.block_size, request.num_tokens - 1)
            steps = self.device.steps(request.num_tokens - cached, cached)
            free_at = max(free_at, ready[idx]) + sum(steps)
            ends[idx] = free_at - request.arrives
        return ends

    def layer_by_layer(self, request: Request) -> float:
        """Return the time to the first token where the step waits for one layer at a time.

        The load brings one layer of all blocks after another, at the speed of the slower link.
        """
        layers = self.device.num_layers
        per_block = self.to_hbm.seconds_per_block
        if request.from_store:
            per_block = max(per_block, self.store.seconds_per_block)
        cached = min(request.num_blocks * self.block_size, request.num_tokens - 1)
        first, *later = self.device.steps(request.num_tokens - cached, cached)
        now = 0.0
        for layer in range(layers):
            arrived = request.num_blocks * per_block * (layer + 1) / layers
            now = max(now, arrived) + first / layers
        return now + sum(later)
