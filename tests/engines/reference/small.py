"""A model of a few thousand weights, and the plain computation that it must equal."""

import math

import torch
from torch.nn import functional

from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.shape import ReferenceShape

# float32: paging and chunking change the order of sums only. The largest difference seen over the
# cases here is 4e-6, of logits with a standard deviation of 3.
TOLERANCE = 1e-4
NUM_TOKEN_IDS = 61


def small_shape(window=None, **more):
    """Three layers, two query heads a KV head; with a window, layers 0 and 2 have it."""
    sizes = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "vocab_size": NUM_TOKEN_IDS,
    }
    windows = () if window is None else (window, None, window)
    return ReferenceShape(**{**sizes, "windows": windows, **more})


def prompt_of(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_TOKEN_IDS, (num_tokens,), generator=generator).tolist()


def plain_logits(model: ReferenceModel, tokens):
    """All logits at once: no blocks, no chunks, no tiles; scores as a whole matrix."""
    shape = model.shape
    size = len(tokens)
    hidden = model.embedding[torch.tensor(tokens)]
    order = torch.arange(size)
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    angles = order[:, None] * shape.rope_theta**-exponents
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]

    def rotated(heads):
        half = shape.head_size // 2
        turned = torch.complex(heads[..., :half], heads[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def normed(values):
        return values * (values.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon).rsqrt()

    for idx, layer in enumerate(model.layers):
        num_q, num_kv = (n * shape.head_size for n in (shape.num_heads, shape.num_kv_heads))
        q, k, v = (normed(hidden) @ layer.qkv.T).split([num_q, num_kv, num_kv], dim=-1)
        q, k, v = (part.view(size, -1, shape.head_size) for part in (q, k, v))
        q, k = rotated(q), rotated(k)
        groups = shape.num_heads // shape.num_kv_heads
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(shape.head_size)
        distance = order[:, None] - order[None]
        hidden_keys = distance < 0
        window = shape.window_of(idx)
        if window is not None:
            hidden_keys |= distance >= window
        weights = scores.masked_fill(hidden_keys, -math.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(size, -1)
        hidden = hidden + attended @ layer.output.T
        gate, up = (normed(hidden) @ layer.gate_up.T).chunk(2, dim=-1)
        hidden = hidden + (functional.silu(gate) * up) @ layer.down.T
    return normed(hidden) @ model.head.T
