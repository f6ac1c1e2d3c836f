"""The random layouts of the copiers' tests are of every kind that an engine has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from copy_layouts import Described, layouts
from hypothesis import HealthCheck, given, settings

from kvtiers.model.layout import Axis, Run, TensorView

LAYOUTS = 400
RARE = 16  # so that the hundred of each copier have a few of a kind


def of_view(view: TensorView, num_blocks: int) -> Iterator[str]:
    sizes = {a: n for a, n in zip(view.axes, view.shape, strict=True) if n > 1}
    steps = dict(zip(view.axes, view.strides, strict=True))
    if Axis.KV in sizes:
        yield "K and V together"
    if Axis.HEAD in sizes and Axis.TOKEN in sizes:
        yield "HND" if steps[Axis.HEAD] > steps[Axis.TOKEN] else "NHD"
    if Axis.HEAD not in view.axes and Axis.KV not in view.axes:
        yield "MLA"
    if Axis.LAYER in sizes:
        yield "packed layers"
        if Axis.BLOCK in sizes and steps[Axis.BLOCK] > steps[Axis.LAYER]:
            yield "packed layers within a block"
    if view.shape[view.axes.index(Axis.BLOCK)] > num_blocks:
        yield "several kernel blocks a block"
    if Axis.BLOCK in sizes and steps[Axis.BLOCK] != max(steps[axis] for axis in sizes):
        yield "blocks not outermost"
    extent = view.itemsize
    for step, axis in sorted((steps[axis], axis) for axis in sizes):
        if step != extent:
            yield "padded blocks" if axis is Axis.BLOCK else "padded within a block"
        extent = step * sizes[axis]


def of_run(run: Run) -> Iterator[str]:
    places = run.offset | run.block_stride
    grain = min(16, places & -places) if places else 16
    if run.nbytes >= grain:
        yield f"aligned to {grain}"
    if run.nbytes > 256:
        yield f"several tiles, aligned to {grain}"
    if run.nbytes >= 1600 and grain == 16:
        yield "several turns of 16-byte words"


def kinds(described: Described) -> Iterator[str]:
    layout = described.layout
    tensors = sum(map(len, described.views))
    if len(layout.groups) > 1:
        yield "several groups"
        if len({group.payload_nbytes for group in layout.groups}) > 1:
            yield "groups of other payloads"
    if tensors > 1:
        yield "one allocation" if len(layout.allocations) == 1 else "allocations of their own"
    for group, views in zip(layout.groups, described.views, strict=True):
        if max(Counter(view.layer for view in views).values()) > 1:
            yield "K and V apart"
        for view in views:
            yield from of_view(view, group.num_blocks)
        for run in group.runs:
            yield from of_run(run)


def test_random_layouts_are_of_every_kind() -> None:
    found: Counter[str] = Counter()

    @settings(
        max_examples=LAYOUTS, database=None, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(described=layouts())
    def count(described: Described) -> None:
        found.update(set(kinds(described)))

    count()
    wanted = {
        "K and V apart", "K and V together", "HND", "NHD", "MLA", "packed layers",
        "packed layers within a block", "several kernel blocks a block", "blocks not outermost",
        "padded blocks", "padded within a block", "several groups", "groups of other payloads",
        "one allocation", "allocations of their own", "several turns of 16-byte words",
        *(f"aligned to {grain}" for grain in (1, 2, 4, 8, 16)),
        *(f"several tiles, aligned to {grain}" for grain in (1, 4, 16)),
    }  # fmt: skip
    scarce = {kind: found[kind] for kind in wanted if found[kind] < RARE}
    assert not scarce, found
