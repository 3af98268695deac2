"""The layout of parameters that are cut along axes of a mesh: every element of every block has one owner, and all ranks
have buckets of the same lengths, however uneven the blocks are."""

from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.block import Block
from polyaccel.core.mesh import Mesh, MeshAxis
from polyaccel.core.types import DType, ParamSpec
from polyaccel.zero.plan.layout import ShardLayout, plan_layout

AXES = ("data", "sequence", "tensor")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, list[ShardLayout], list[list[ParamSpec]]]:
    """A mesh, with every rank's layout and parameters."""
    mesh = Mesh(tuple(MeshAxis(name, draw(st.integers(1, 3))) for name in AXES))
    lengths = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
    cuts = [draw(st.sampled_from([(), ("tensor",), ("sequence", "tensor")])) for _ in lengths]
    cap = draw(st.integers(1, 60))
    of_ranks = []
    for rank in range(mesh.world_size):
        params = []
        for index, (shape, cut) in enumerate(zip(lengths, cuts, strict=True)):
            count = mesh.size_of(cut)
            place = mesh.group(cut, rank).index(rank)
            low, high = shape[0] * place // count, shape[0] * (place + 1) // count
            block = Block.whole(shape).cut(0, (low, high - low)) if cut else None
            local = (high - low, shape[1]) if cut else shape
            params.append(ParamSpec(f"p{index}", local, DType.FLOAT32, block=block, cut=cut))
        of_ranks.append(params)
    rooms = {
        param.fqn: max(params[index].numel for params in of_ranks)
        for index, param in enumerate(of_ranks[0])
        if param.cut
    }
    layouts = [plan_layout(params, mesh=mesh, max_bucket_numel=cap, rooms=rooms) for params in of_ranks]
    return mesh, layouts, of_ranks


@settings(deadline=None)
@given(cases())
def test_every_element_of_every_tensor_has_one_owner(case) -> None:
    _, layouts, of_ranks = case
    owned: dict[tuple[str, int], int] = {}
    for rank, (layout, params) in enumerate(zip(layouts, of_ranks, strict=True)):
        blocks = {param.fqn: param for param in params}
        for _, piece in layout.slices(rank):
            param = blocks[piece.fqn]
            first = 0 if param.block is None else param.block.runs[0][0][0] * prod(param.global_shape[1:])
            for element in range(first + piece.start, first + piece.start + piece.length):
                owned[piece.fqn, element] = owned.get((piece.fqn, element), 0) + 1
    wanted = {(param.fqn, element) for param in of_ranks[0] for element in range(prod(param.global_shape))}
    assert owned == dict.fromkeys(wanted, 1)


@settings(deadline=None)
@given(cases())
def test_all_ranks_have_buckets_of_the_same_lengths(case) -> None:
    mesh, layouts, _ = case
    assert len({tuple((each.numel, each.world_size, each.kind.cut) for each in one.buckets) for one in layouts}) == 1
    assert len({tuple(slot.offset for each in one.buckets for slot in each.slots) for one in layouts}) == 1
    for bucket in layouts[0].buckets:
        assert bucket.world_size == mesh.size_of(mesh.others(bucket.kind.cut))
        assert bucket.numel % bucket.world_size == 0
