"""A small decoder-only transformer whose keys and values lie in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from kvtiers.engines.reference.paged_kv import PagedKV
from kvtiers.engines.reference.shape import ReferenceShape

# Queries that attend at once: the keys behind the last of them are left out, so that causal
# attention costs little more than the half of the square that it needs.
TILE: Final = 256
# With weights as random as this, the output depends on every part of the KV: attention logits of
# standard deviation 3 let a head look at a handful of tokens, and every layer writes into the
# residual stream at the stream's own scale.
_ATTENTION_SPREAD: Final = 3.0
_LOGIT_SPREAD: Final = 3.0

BeforeLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring tokens of one sequence that a step computes.

    Attributes:
        token_ids: the new tokens. start: tokens before them, whose KV is there.
        block_ids: of the sequence, from token 0, as far as the last new token.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]

    @property
    def end(self) -> int:
        """Tokens of the sequence whose KV is there afterwards."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's matrices, each ``[outputs, inputs]``; the norms' are all 1 and left out."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk's tokens are: of the step's rows, and in the KV."""

    chunk: Chunk
    first_row: int
    block_table: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.chunk.token_ids))


class ReferenceModel:
    """Random weights of a given shape; no training, no tokenizer.

    Attributes:
        embedding, head: ``[vocab_size, hidden_size]``. layers: what each multiplies with.
    """

    def __init__(self, shape: ReferenceShape, device: str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._generator = torch.Generator(self.device).manual_seed(shape.seed)
        hidden, head = shape.hidden_size, shape.head_size
        self._num_q, self._num_kv = shape.num_heads * head, shape.num_kv_heads * head
        self.embedding = self._drawn(shape.vocab_size, hidden, math.sqrt(hidden))
        self.layers = [self._draw_layer() for _ in range(shape.num_layers)]
        self.head = self._drawn(shape.vocab_size, hidden, _LOGIT_SPREAD)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(
        self, chunks: Sequence[Chunk], kv: PagedKV, before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        """Compute one step: write the new tokens' KV, and return logits.

        Args:
            chunks: of different sequences; each continues what the KV holds of its own.
            before_layer: called with each layer's index before its KV is read or written.

        Returns:
            float32 ``[len(chunks), vocab_size]``: of each chunk's last token.
        """
        places = self._places(chunks)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        hidden = self.embedding[torch.tensor(ids, device=self.device)]
        slots = [kv.slots(p.block_table, p.chunk.start, p.chunk.end) for p in places]
        blocks, offsets = (torch.cat(parts) for parts in zip(*slots, strict=True))
        rotation = self._rotation(chunks)
        for idx, layer in enumerate(self.layers):
            if before_layer is not None:
                before_layer(idx)
            queries, keys, values = self._qkv(layer, hidden, rotation)
            kv.write(idx, (blocks, offsets), keys, values)
            attended = torch.empty_like(queries)
            for place in places:
                seen = kv.read(idx, place.block_table, place.chunk.end)
                attended[place.rows] = attend(
                    queries[place.rows], *seen, place.chunk.start, self.shape.window_of(idx)
                )
            hidden = hidden + functional.linear(attended.flatten(1), layer.output)
            hidden = hidden + self._feed_forward(layer, hidden)
        last = torch.tensor([place.rows.stop - 1 for place in places], device=self.device)
        return functional.linear(self._norm(hidden[last]), self.head).float()

    def _places(self, chunks: Sequence[Chunk]) -> list[_Place]:
        places, row = [], 0
        for chunk in chunks:
            if not chunk.token_ids:
                raise ValueError(f"a chunk at token {chunk.start} has no tokens")
            table = torch.tensor(list(chunk.block_ids), device=self.device)
            places.append(_Place(chunk, row, table))
            row += len(chunk.token_ids)
        return places

    def _qkv(
        self, layer: LayerWeights, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, each ``[tokens, heads, head_size]``."""
        qkv = functional.linear(self._norm(hidden), layer.qkv)
        parts = qkv.split([self._num_q, self._num_kv, self._num_kv], dim=-1)
        queries, keys, values = (p.unflatten(-1, (-1, self.shape.head_size)) for p in parts)
        return _rotated(queries, rotation), _rotated(keys, rotation), values

    def _feed_forward(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(self._norm(hidden), layer.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down)

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, (hidden.shape[-1],), eps=self.shape.norm_epsilon)

    def _rotation(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of every token, ``[tokens, 1, head_size / 2]``."""
        size = self.shape.head_size
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = positions.double()[:, None] * self.shape.rope_theta**-exponents
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return cos.to(self.device, torch.float32), sin.to(self.device, torch.float32)

    def _draw_layer(self) -> LayerWeights:
        shape, qk_gain = self.shape, math.sqrt(_ATTENTION_SPREAD)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        return LayerWeights(
            qkv=torch.cat(
                [
                    self._drawn(self._num_q, hidden, qk_gain),
                    self._drawn(self._num_kv, hidden, qk_gain),
                    self._drawn(self._num_kv, hidden, 1.0),
                ]
            ),
            output=self._drawn(hidden, self._num_q, 1.0),
            gate_up=self._drawn(2 * inner, hidden, 1.0),
            down=self._drawn(hidden, inner, 1.0),
        )

    def _drawn(self, num_rows: int, num_columns: int, gain: float) -> torch.Tensor:
        """Draw a matrix that maps inputs of unit variance to outputs of variance ``gain**2``."""
        values = torch.randn((num_rows, num_columns), generator=self._generator, device=self.device)
        return (values * (gain / math.sqrt(num_columns))).to(self._dtype)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """Return causal attention of new tokens to all before them and to themselves.

    The query heads that share a KV head become more queries of that one head.

    Args:
        queries: ``[tokens, heads, head_size]``. keys, values: ``[KV heads, start + tokens,
            head_size]``. start: tokens before the first query.
        window: tokens that a query looks back, itself included; None for all.
    """
    num_kv_heads = keys.shape[0]
    parts = []
    for first in range(0, len(queries), TILE):
        tile = queries[first : first + TILE]
        end = start + first + len(tile)
        begin = 0 if window is None else max(0, start + first + 1 - window)
        grouped = tile.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        mask = _mask(start + first, end, begin, window, queries.device)
        out = functional.scaled_dot_product_attention(
            grouped.flatten(1, 2)[None],
            keys[None, :, begin:end],
            values[None, :, begin:end],
            attn_mask=mask.repeat(grouped.shape[1], 1),
        )
        parts.append(out[0].unflatten(1, (-1, len(tile))).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts)


def _mask(
    first: int, end: int, begin: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which of the keys ``begin`` to ``end - 1`` the queries ``first`` on may see."""
    query = torch.arange(first, end, device=device)[:, None]
    key = torch.arange(begin, end, device=device)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _rotated(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the halves of every head by its token's position."""
    cos, sin = rotation
    one, two = heads.float().chunk(2, dim=-1)
    turned = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    return turned.to(heads.dtype)
