"""The KV of the reference model, in blocks."""

from __future__ import annotations

import torch

from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.model.layer_ranges import layer_ranges
from kvtiers.model.layout import Axis, GroupLayout, KVLayout, TensorView

_AXES = (Axis.BLOCK, Axis.KV, Axis.HEAD, Axis.TOKEN, Axis.CONTENT)


class PagedKV:
    """One tensor a layer: ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, K first.

    Token ``t`` of a sequence lies in block ``block_table[t // block_size]``, at place
    ``t % block_size``. A window keeps no fewer tokens: attention looks at fewer of them.

    Attributes:
        layers: the tensors.
    """

    def __init__(
        self, shape: ReferenceShape, num_blocks: int, block_size: int, device: str = "cpu"
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_size)
        dtype = getattr(torch, shape.dtype)
        self.layers = [
            torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)
        ]

    def layout(self, num_groups: int = 1) -> KVLayout:
        """Describe the tensors.

        Args:
            num_groups: into how many ranges of neighbouring layers a block is cut, each a KV
                group with frames of its own: what loads layer range by layer range needs.
        """
        groups = []
        for group, layers in enumerate(layer_ranges(len(self.layers), num_groups)):
            views = [self._view(layer) for layer in layers]
            groups.append(
                GroupLayout.from_views(
                    views,
                    group=group,
                    num_blocks=self.num_blocks,
                    block_size=self.block_size,
                    dtype=str(self.layers[0].dtype).removeprefix("torch."),
                )
            )
        return KVLayout(tuple(layer.nbytes for layer in self.layers), tuple(groups))

    def addresses(self) -> list[int]:
        """Return where each layer's tensor begins in memory."""
        return [layer.data_ptr() for layer in self.layers]

    def flat(self) -> list[torch.Tensor]:
        """Return a flat uint8 tensor over each layer's memory, for a copier of any device."""
        return [layer.view(-1).view(torch.uint8) for layer in self.layers]

    def write(
        self,
        layer: int,
        slots: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store new tokens' keys and values, each ``[tokens, heads, head_size]``.

        Args:
            slots: block and place in it of each token; see `slots`.
        """
        blocks, places = slots
        self.layers[layer][:, 0][blocks, :, places] = keys
        self.layers[layer][:, 1][blocks, :, places] = values

    def read(
        self, layer: int, block_table: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first tokens' keys and values, each ``[heads, num_tokens, head_size]``."""
        used = -(-num_tokens // self.block_size)
        blocks = self.layers[layer].index_select(0, block_table[:used])
        keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens]
        return keys, values

    def slots(
        self, block_table: torch.Tensor, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block and the place in it of the tokens ``start`` to ``end - 1``."""
        tokens = torch.arange(start, end, device=block_table.device)
        return block_table[tokens // self.block_size], tokens % self.block_size

    def _view(self, layer: int) -> TensorView:
        tensor = self.layers[layer]
        itemsize = tensor.element_size()
        strides = tuple(stride * itemsize for stride in tensor.stride())
        return TensorView(f"layer{layer}", layer, 0, _AXES, tuple(tensor.shape), strides, itemsize)
