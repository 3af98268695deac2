"""What any number of ranks saved, any other number reads back, element for element."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy, numpy_dtype
from polyaccel.checkpoint import TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.format import pieces
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.plan.layout import ShardLayout, plan_layout

NUMPY = CpuAccelerator("numpy")
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
dtypes = st.sampled_from([DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.INT64])


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    """Odd, empty and zero-dimensional parameters of several types, some frozen. A tied one is laid out once."""
    return [
        ParamSpec(f"layer.{index}", shape, draw(dtypes), draw(st.integers(0, 1)), draw(st.booleans()))
        for index, shape in enumerate(draw(shapes))
    ]


def states(params: list[ParamSpec]) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """Whole tensors to save: every parameter, and a master copy and a moment of each trained one."""
    rng = np.random.default_rng(0)
    whole = {}
    for param in params:
        numel, dtype = param.numel, numpy_dtype(param.dtype)
        whole[param.fqn, "param"] = rng.integers(-99, 99, numel).astype(dtype)
        if param.trainable:
            whole[param.fqn, "master"] = rng.standard_normal(numel).astype(np.float32)
            whole[param.fqn, "exp_avg"] = rng.standard_normal(numel).astype(np.float32)
    return whole


def owned(
    layout: ShardLayout, rank: int, whole: dict[tuple[str, str], np.ndarray[Any, Any]]
) -> Iterator[tuple[ParamSpec, str, int, int]]:
    """What a rank saves and loads: its slices of every state; rank 0 also makes the empty tensors known."""
    for bucket, piece in layout.slices(rank):
        param = next(slot.param for slot in bucket.slots if slot.param.fqn == piece.fqn)
        for fqn, kind in whole:
            if fqn == piece.fqn:
                yield param, kind, piece.start, piece.length
    if rank == 0:
        yield from ((param, "param", 0, 0) for param in layout.params if not param.numel)


def save(communicator: Communicator, place: Path, layout: ShardLayout, whole: dict[Any, Any]) -> None:
    mine = []
    for param, kind, start, length in owned(layout, communicator.rank, whole):
        data = NumpyBuffer(whole[param.fqn, kind][start : start + length].copy())
        mine.append(TensorPiece(param.fqn, kind, param.shape, data.dtype, start, data))
    save_checkpoint(
        place,
        "step",
        communicator=communicator,
        pieces=iter(mine),
        scalars={"of_rank": communicator.rank, "step": 7},
        rank_blobs={"rng": bytes([communicator.rank]) * communicator.rank},
    )


def load(communicator: Communicator, place: Path, layout: ShardLayout, whole: dict[Any, Any]) -> int:
    reader = open_checkpoint(place, communicator=communicator)
    assert reader.scalars == {"of_rank": 0, "step": 7}
    loaded = 0
    for param, kind, start, length in owned(layout, communicator.rank, whole):
        expected = whole[param.fqn, kind][start : start + length]
        buffer = allocate_numpy(length, reader.tensor(param.fqn, kind).dtype)
        reader.read_into(param.fqn, kind, start, length, buffer)
        assert buffer.raw.tobytes() == expected.tobytes()
        loaded += length
    return loaded


@settings(max_examples=40, deadline=None)
@given(
    params=models(),
    saved_by=st.integers(1, 4),
    loaded_by=st.integers(1, 4),
    bucket_numels=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    piece_nbytes=st.sampled_from([8, 64, 2**24]),
)
def test_any_world_size_reads_what_any_other_saved(
    params: list[ParamSpec], saved_by: int, loaded_by: int, bucket_numels: tuple[int, int], piece_nbytes: int
) -> None:
    whole = states(params)
    before = plan_layout(params, mesh=Mesh.flat(saved_by), max_bucket_numel=bucket_numels[0])
    after = plan_layout(params[::-1], mesh=Mesh.flat(loaded_by), max_bucket_numel=bucket_numels[1])
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_PIECE_NBYTES", piece_nbytes)
        run_threads(saved_by, save, Path(directory), before, whole, accelerator=NUMPY)
        loaded = run_threads(loaded_by, load, Path(directory), after, whole, accelerator=NUMPY)
        assert sum(loaded) == sum(data.size for data in whole.values())

        reader = open_checkpoint(directory)
        assert reader.world_size == saved_by
        for rank in range(saved_by):
            assert reader.rank_blobs(rank) == {"rng": bytes([rank]) * rank}
        shapes_saved = {tensor.fqn: tensor.shape for tensor in reader.tensors()}
        assert shapes_saved == {param.fqn: param.shape for param in params}


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Block]:
    """Blocks that make up a tensor: cut along dims into parts of any runs, as any mesh would."""
    blocks = [Block.whole(shape)]
    for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=2, unique=True)):
        owners = draw(st.lists(st.integers(0, 2), min_size=shape[dim], max_size=shape[dim]))
        cuts = [[(at, 1) for at, owner in enumerate(owners) if owner == part] for part in range(3)]
        blocks = [block.cut(dim, *runs) for block in blocks for runs in cuts if runs]
    return blocks


def runs_of(block: Block, world_size: int) -> list[tuple[int, int]]:
    """How ZeRO shards a block over that many ranks: even parts but for the last."""
    step = -(-block.numel // world_size)
    return [(low, min(step, block.numel - low)) for low in range(0, block.numel, step)]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    piece_nbytes=st.sampled_from([8, 64, 2**24]),
)
def test_any_cut_reads_what_any_other_cut_saved(
    data: st.DataObject, shape: tuple[int, ...], worlds: tuple[int, int], piece_nbytes: int
) -> None:
    """Tensor, expert and pipeline parallelism cut tensors into blocks, of which ZeRO shards each."""
    whole = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    before, after = data.draw(partitions(shape)), data.draw(partitions(shape))

    def values(block: Block) -> np.ndarray[Any, Any]:
        part = whole
        for dim, runs in enumerate(block.runs):
            part = part.take([at for start, count in runs for at in range(start, start + count)], axis=dim)
        return part.reshape(-1)

    def save_blocks(communicator: Communicator, place: Path) -> None:
        mine = []
        shards = [(part, run) for part in before for run in runs_of(part, worlds[0])]
        for block, (start, length) in shards[communicator.rank :: worlds[0]]:
            shard = NumpyBuffer(values(block)[start : start + length].copy())
            mine.append(TensorPiece("w", "param", shape, DType.FLOAT32, start, shard, block))
        save_checkpoint(place, "step", communicator=communicator, pieces=mine, scalars={}, rank_blobs={})

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_PIECE_NBYTES", piece_nbytes)
        run_threads(worlds[0], save_blocks, Path(directory), accelerator=NUMPY)
        reader = open_checkpoint(directory)
        for block in [*after, None]:
            expected = whole.reshape(-1) if block is None else values(block)
            for start, length in runs_of(block or Block.whole(shape), worlds[1]):
                buffer = allocate_numpy(length, DType.FLOAT32)
                reader.verify("w", "param", start, length, DType.FLOAT32, block=block)
                reader.read_into("w", "param", start, length, buffer, block=block)
                assert buffer.raw.tobytes() == expected[start : start + length].tobytes()


@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        ([Block.whole((4, 4)).cut(1, (0, 2))], "'w'"),
        ([Block.whole((4, 4)).cut(1, (0, 3)), Block.whole((4, 4)).cut(1, (2, 2))], "'step'"),
    ],
    ids=["missing", "twice"],
)
def test_blocks_that_do_not_make_up_the_tensor_are_refused(blocks: list[Block], named: str, tmp_path: Path) -> None:
    def save_blocks(communicator: Communicator) -> None:
        mine = [
            TensorPiece("w", "param", (4, 4), DType.FLOAT32, 0, allocate_numpy(block.numel, DType.FLOAT32), block)
            for block in blocks
        ]
        save_checkpoint(tmp_path, "step", communicator=communicator, pieces=mine, scalars={}, rank_blobs={})

    with pytest.raises(CheckpointError) as caught:
        run_threads(1, save_blocks, accelerator=NUMPY)
    assert named in str(caught.value)
    assert caught.value.value == (0,)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), numel=st.integers(1, 60), saved_by=st.integers(1, 3))
def test_any_range_of_a_tensor_can_be_read(data: st.DataObject, numel: int, saved_by: int) -> None:
    params = [ParamSpec("w", (numel,), DType.FLOAT32, trainable=False)]
    whole = states(params)
    layout = plan_layout(params, mesh=Mesh.flat(saved_by), max_bucket_numel=64)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_PIECE_NBYTES", 28)
        run_threads(saved_by, save, Path(directory), layout, whole, accelerator=NUMPY)
        reader = open_checkpoint(directory)
        for _ in range(10):
            start = data.draw(st.integers(0, numel))
            length = data.draw(st.integers(0, numel - start))
            buffer = allocate_numpy(length, DType.FLOAT32)
            reader.read_into("w", "param", start, length, buffer)
            assert buffer.raw.tobytes() == whole["w", "param"][start : start + length].tobytes()
