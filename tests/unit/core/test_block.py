"""Blocks of tensors: what two runs of two blocks share, against numpy's own indexing."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from polyaccel.core.block import Block, are_disjoint, overlaps
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError

Array = npt.NDArray[np.int64]
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def blocks(draw: st.DrawFn, shape: tuple[int, ...]) -> Block:
    """Along every dimension up to three runs, in any order: fused weights have them so."""
    block = Block.whole(shape)
    for dim, length in enumerate(shape):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        runs = [(low, high - low) for low, high in zip(cuts[::2], cuts[1::2], strict=False)]
        block = block.cut(dim, *draw(st.permutations(runs)))
    return block


def elements(block: Block) -> Array:
    """The flattened block of a tensor whose elements are numbered."""
    whole = np.arange(prod(block.shape)).reshape(block.shape)
    for dim, runs in enumerate(block.runs):
        whole = whole.take([at for start, count in runs for at in range(start, start + count)], axis=dim)
    return whole.reshape(-1)


@st.composite
def runs_of(draw: st.DrawFn, block: Block) -> tuple[int, int]:
    start = draw(st.integers(0, block.numel))
    return start, draw(st.integers(0, block.numel - start))


@given(data=st.data(), shape=shapes)
def test_two_runs_share_what_numpy_says(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source, target = data.draw(blocks(shape)), data.draw(blocks(shape))
    source_run, target_run = data.draw(runs_of(source)), data.draw(runs_of(target))
    stored = elements(source)[source_run[0] : sum(source_run)]
    wanted = elements(target)[target_run[0] : sum(target_run)]
    filled = np.full(wanted.size, -1)
    for copy in overlaps(source, source_run, target, target_run):
        part = as_strided(stored[copy.source_offset :], copy.lengths, [8 * step for step in copy.source_strides])
        place = as_strided(filled[copy.target_offset :], copy.lengths, [8 * step for step in copy.target_strides])
        assert (place == -1).all()  # each element once
        place[...] = part
    assert np.array_equal(filled, np.where(np.isin(wanted, stored), wanted, -1))


@given(data=st.data(), shape=shapes)
def test_blocks_are_disjoint_when_they_share_no_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = [data.draw(blocks(shape)) for _ in range(data.draw(st.integers(0, 3)))]
    numbers = [number for part in parts for number in elements(part).tolist()]
    assert are_disjoint(parts) == (len(set(numbers)) == len(numbers))


@pytest.mark.parametrize(
    ("runs", "value"),
    [
        ((((0, 4),),), (((0, 4),),)),
        ((((0, 5),), ((0, 3),)), ((0, 5),)),
        ((((0, 4),), ((0, 2), (1, 1))), ((0, 2), (1, 1))),
        ((((0, 4),), ((1, -1),)), ((1, -1),)),
    ],
)
def test_runs_that_are_no_part_of_the_tensor_are_refused(
    runs: tuple[tuple[tuple[int, int], ...], ...], value: object
) -> None:
    with pytest.raises(ShardingError) as caught:
        Block((4, 3), runs)
    assert caught.value.value == value


def test_a_parameter_knows_the_tensor_that_it_is_a_block_of() -> None:
    fused = Block.whole((12, 4)).cut(0, (0, 2), (6, 1), (9, 1))
    assert ParamSpec("qkv", (4, 4), DType.FLOAT32, block=fused).global_shape == (12, 4)
    assert ParamSpec("qkv", (4, 4), DType.FLOAT32).global_shape == (4, 4)
    with pytest.raises(ShardingError) as caught:
        ParamSpec("qkv", (6, 4), DType.FLOAT32, block=fused)
    assert caught.value.value == "qkv"
