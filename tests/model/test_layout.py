"""Promises of the description of KV tensors."""

from __future__ import annotations

import numpy as np
import pytest

from kvtiers.model.errors import LayoutError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.layout import Axis, GroupLayout, KVLayout, Page, Run, TensorView

BLOCK, LAYER, KV, HEAD, TOKEN, CONTENT = (
    Axis.BLOCK,
    Axis.LAYER,
    Axis.KV,
    Axis.HEAD,
    Axis.TOKEN,
    Axis.CONTENT,
)


def contiguous(
    axes: tuple[Axis, ...], shape: tuple[int, ...], *, itemsize: int = 2, layer: str = "l0"
) -> TensorView:
    """A tensor whose memory order is the order of its axes."""
    strides = tuple(itemsize * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return TensorView(layer, 0, 0, axes, shape, strides, itemsize)


def group(*views: TensorView, num_blocks: int, block_size: int = 16) -> GroupLayout:
    return GroupLayout.from_views(
        views, group=0, num_blocks=num_blocks, block_size=block_size, dtype="bfloat16"
    )


def test_kv_axis_order_comes_from_axes_not_from_shape() -> None:
    """R79: with two blocks, [2, 2, ...] says nothing; the axes do."""
    shape = (2, 2, 16, 4, 8)
    kv_first = group(contiguous((KV, BLOCK, TOKEN, HEAD, CONTENT), shape), num_blocks=2)
    block_first = group(contiguous((BLOCK, KV, TOKEN, HEAD, CONTENT), shape), num_blocks=2)
    page = 16 * 4 * 8 * 2
    assert kv_first.runs == (Run(0, 0, page, page), Run(0, 2 * page, page, page))
    assert block_first.runs == (Run(0, 0, 2 * page, 2 * page),)


def test_mla_payload_counts_its_one_tensor_once() -> None:
    """R68: latent attention has one tensor a layer, not K and V."""
    mla = group(contiguous((BLOCK, TOKEN, CONTENT), (8, 16, 576)), num_blocks=8)
    mha = group(contiguous((BLOCK, KV, TOKEN, CONTENT), (8, 2, 16, 576)), num_blocks=8)
    assert mla.payload_nbytes == 16 * 576 * 2
    assert mha.payload_nbytes == 2 * mla.payload_nbytes
    frame = FrameFormat.of(mla)
    assert frame.frame_nbytes == frame.header_nbytes + mla.payload_nbytes


def test_padded_pages_keep_their_padding_out_of_the_payload() -> None:
    """R77: uint8 pages of 576 bytes at a stride of 584."""
    view = TensorView("l0", 0, 0, (BLOCK, CONTENT), (10, 576), (584, 1), 1)
    padded = group(view, num_blocks=10)
    assert padded.runs == (Run(0, 0, 584, 576),)
    assert padded.payload_nbytes == 576


def test_layers_of_one_group_may_have_pages_of_different_sizes() -> None:
    """R78: 36864 and 8448 bytes."""
    views = (
        contiguous((BLOCK, CONTENT), (4, 36864), itemsize=1, layer="a"),
        contiguous((BLOCK, CONTENT), (4, 8448), itemsize=1, layer="b"),
    )
    mixed = group(*views, num_blocks=4)
    assert [page.nbytes for page in mixed.pages] == [36864, 8448]
    assert mixed.payload_nbytes == 36864 + 8448


def test_engine_block_of_several_kernel_blocks_is_copied_whole() -> None:
    """R83: block 256, kernel block 64."""
    kernel = contiguous((BLOCK, TOKEN, CONTENT), (5 * 4, 64, 32))
    layout = group(kernel, num_blocks=5, block_size=256)
    assert layout.runs == (Run(0, 0, 4 * 64 * 32 * 2, 4 * 64 * 32 * 2),)


def test_kernel_blocks_of_a_kv_first_tensor_lie_in_two_runs() -> None:
    kernel = contiguous((KV, BLOCK, TOKEN, CONTENT), (2, 5 * 4, 64, 32))
    half = 4 * 64 * 32 * 2
    assert group(kernel, num_blocks=5).runs == (Run(0, 0, half, half), Run(0, 5 * half, half, half))


def test_head_first_and_token_first_blocks_have_different_fingerprints() -> None:
    """R84: equal sizes in another order are other KV."""
    nhd = group(contiguous((BLOCK, KV, TOKEN, HEAD, CONTENT), (4, 2, 8, 8, 16)), num_blocks=4)
    hnd = group(contiguous((BLOCK, KV, HEAD, TOKEN, CONTENT), (4, 2, 8, 8, 16)), num_blocks=4)
    assert nhd.payload_nbytes == hnd.payload_nbytes
    assert nhd.describe_payload() != hnd.describe_payload()


def test_order_is_read_from_strides_not_from_the_order_of_dimensions() -> None:
    nhd = contiguous((BLOCK, TOKEN, HEAD, CONTENT), (4, 16, 8, 32))
    permuted = TensorView(
        "l0",
        0,
        0,
        (BLOCK, HEAD, TOKEN, CONTENT),
        (4, 8, 16, 32),
        tuple(nhd.strides[i] for i in (0, 2, 1, 3)),
        2,
    )
    assert group(permuted, num_blocks=4) == group(nhd, num_blocks=4)


def test_payload_description_does_not_depend_on_the_size_of_the_pool() -> None:
    axes = (KV, BLOCK, TOKEN, CONTENT)
    small, large = (
        group(contiguous(axes, (2, blocks, 16, 8)), num_blocks=blocks) for blocks in (4, 400)
    )
    assert small.describe_payload() == large.describe_payload()


@pytest.mark.parametrize("change", ["dtype", "block_size", "window", "itemsize"])
def test_payload_description_tells_what_changes_the_meaning(change: str) -> None:
    def described(**changes: object) -> str:
        facts = {"dtype": "bfloat16", "block_size": 16, "window": None} | changes
        itemsize = facts.pop("itemsize", 2)
        view = contiguous((BLOCK, TOKEN, CONTENT), (4, 16, 32 // itemsize), itemsize=itemsize)  # type: ignore[arg-type, operator]
        return GroupLayout.from_views([view], group=0, num_blocks=4, **facts).describe_payload()  # type: ignore[arg-type]

    other: dict[str, object] = {"dtype": "fp8", "block_size": 32, "window": 1024, "itemsize": 1}
    assert described(**{change: other[change]}) != described()


def test_packed_layers_get_a_page_each() -> None:
    packed = group(contiguous((BLOCK, LAYER, CONTENT), (6, 3, 100)), num_blocks=6)
    assert [page.layer for page in packed.pages] == ["l0.0", "l0.1", "l0.2"]
    assert packed.runs == (Run(0, 0, 600, 600),)  # neighbours in memory and in the payload


def test_offsets_do_not_overflow_32_bits() -> None:
    """R86: block 2143 at a stride of 1,002,240 bytes lies beyond 2 GiB."""
    view = TensorView("l0", 0, 0, (BLOCK, CONTENT), (6000, 501_120), (1_002_240, 2), 2)
    (run,) = group(view, num_blocks=6000).runs
    block = np.int64(2143)
    assert run.offset + 2143 * run.block_stride == int(block * np.int64(1_002_240)) > 2**31
    KVLayout((6000 * 1_002_240,), (group(view, num_blocks=6000),))


@pytest.mark.parametrize(
    ("view", "complaint"),
    [
        (contiguous((TOKEN, CONTENT), (16, 8)), "0 block axes"),
        (contiguous((BLOCK, BLOCK, CONTENT), (4, 4, 8)), "2 block axes"),
        (contiguous((LAYER, BLOCK, LAYER, CONTENT), (2, 4, 2, 8)), "more than one layer axis"),
        (contiguous((BLOCK, CONTENT), (6, 8)), "no multiple of 4"),
        (TensorView("l0", 0, 0, (BLOCK, CONTENT), (4,), (2,), 2), "one of each per dimension"),
        (TensorView("l0", 0, 0, (BLOCK, CONTENT), (4, 0), (2, 2), 2), "shape"),
        (TensorView("l0", 0, 0, (BLOCK, CONTENT), (4, 8), (-16, 2), 2), "strides"),
        # An expanded dimension, heads that overlap, and K of one block on V of the next.
        (TensorView("l0", 0, 0, (BLOCK, HEAD, CONTENT), (4, 8, 8), (16, 0, 2), 2), "alias"),
        (TensorView("l0", 0, 0, (BLOCK, HEAD, CONTENT), (4, 8, 8), (128, 8, 2), 2), "alias"),
        (TensorView("l0", 0, 0, (BLOCK, KV, CONTENT), (4, 2, 8), (16, 16, 2), 2), "alias"),
        (TensorView("l0", 0, 0, (BLOCK, CONTENT), (4, 8), (0, 2), 2), "alias"),
        (TensorView("l0", 0, 0, (BLOCK, HEAD), (4, 70_000), (2**20, 4), 2), "70000 pieces"),
    ],
)
def test_views_that_cannot_be_described_are_refused(view: TensorView, complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        group(view, num_blocks=4)


def test_group_without_tensors_or_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="no tensors"):
        group(num_blocks=4)
    with pytest.raises(LayoutError, match="0 blocks"):
        group(contiguous((BLOCK, CONTENT), (4, 8)), num_blocks=0)


def of_runs(*runs: Run, index: int = 0, num_blocks: int = 4) -> GroupLayout:
    pages = (Page("l0", sum(run.nbytes for run in runs)),)
    return GroupLayout(index, num_blocks, 16, None, "bfloat16", pages, runs)


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        (of_runs(Run(0, 0, 100, 100)), None),
        (of_runs(Run(0, 1, 100, 100)), "ends at 401, beyond the allocation's 400"),
        (of_runs(Run(0, -1, 100, 50)), "offset -1"),
        (of_runs(Run(0, 0, 100, 0)), "0 bytes"),
        (of_runs(Run(0, 0, 60, 80)), "overlap"),
        (of_runs(Run(1, 0, 100, 100)), "no allocation 1"),
        (of_runs(Run(-1, 0, 100, 100)), "no allocation -1"),
        (of_runs(Run(0, 0, 100, 100), num_blocks=5), "beyond"),
        (of_runs(Run(0, 0, 100, 100), num_blocks=0), "0 blocks"),
        (of_runs(Run(0, 0, 100, 100), index=1), "stands at position 0"),
        (
            GroupLayout(0, 4, 16, None, "x", (Page("l0", 99),), (Run(0, 0, 100, 100),)),
            "runs of 100 bytes, pages of 99",
        ),
    ],
)
def test_runs_must_lie_in_their_allocation(described: GroupLayout, complaint: str | None) -> None:
    if complaint is None:
        assert KVLayout((400,), (described,)).max_payload_nbytes == 100
        return
    with pytest.raises(LayoutError, match=complaint):
        KVLayout((400,), (described,))
