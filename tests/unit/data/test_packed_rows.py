"""Packed rows: every token once, no loss and no view across borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.data import PackedDataset, block_diagonal_mask, cu_seqlens, pack, unpack
from polyaccel.errors import PolyaccelError

KINDS: list[Any] = [True, "additive"]
lengths = st.lists(st.integers(0, 40), max_size=30)


@given(lengths, st.integers(1, 24), st.sampled_from(["best_fit", "sequential"]))
def test_each_token_is_in_one_row(sizes: list[int], capacity: int, order: Any) -> None:
    rows = pack(sizes, capacity, order)
    assert all(0 < sum(map(len, row)) <= capacity for row in rows)
    found = sorted((one.document, token) for row in rows for one in row for token in range(one.start, one.stop))
    assert found == [(document, token) for document, size in enumerate(sizes) for token in range(size)]
    whole = [size for size in sizes if 0 < size <= capacity]
    pieces = [one for row in rows for one in row]
    assert sum(sizes[one.document] <= capacity for one in pieces) == len(whole)  # what fits is not cut
    if order == "sequential":
        assert [(one.document, one.start) for one in pieces] == sorted((one.document, one.start) for one in pieces)
    else:
        assert sum(sum(map(len, row)) * 2 <= capacity for row in rows) <= 1  # no two rows that are half empty


@given(lengths.filter(lambda sizes: max(sizes, default=0) > 1), st.integers(2, 24))
def test_labels_stay_within_documents(sizes: list[int], capacity: int) -> None:
    documents = [1000 * number + np.arange(size) for number, size in enumerate(sizes)]
    data = PackedDataset(documents, capacity, pad_id=7)
    assert data.density == pytest.approx(data.tokens / (len(data) * capacity))
    losses = 0
    for row in (data[index] for index in range(len(data))):
        ids, labels, positions = (row[name] for name in ("input_ids", "labels", "position_ids"))
        for at in range(1, capacity):
            if labels[at] != -100:
                losses += 1
                assert labels[at] == ids[at] == ids[at - 1] + 1
                assert positions[at] == positions[at - 1] + 1
        assert labels[0] == -100
    assert losses == sum(size - -(-size // capacity) for size in sizes)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_masks_and_borders_are_those_of_the_documents(sizes: list[int]) -> None:
    positions = np.concatenate([np.arange(size) for size in sizes])
    document = np.concatenate([np.full(size, number) for number, size in enumerate(sizes)])
    assert cu_seqlens(positions).tolist() == [0, *np.cumsum(sizes)]
    wanted = [[one == two and at >= to for to, two in enumerate(document)] for at, one in enumerate(document)]
    assert block_diagonal_mask(positions).tolist() == wanted
    both = [[one == two for two in document] for one in document]
    assert block_diagonal_mask(positions, causal=False).tolist() == both
    assert [one.tolist() for one in unpack(document, positions)] == [
        [number] * size for number, size in enumerate(sizes)
    ]


def test_each_row_has_a_label() -> None:
    """A last piece of one token would have a row alone, whose mean loss is not a number."""
    data = PackedDataset([np.arange(9), [3]], 8)
    assert [row["labels"].max() for row in (data[at] for at in range(len(data)))] == [7]
    assert (data.tokens, data.density) == (8, 1.0)


def test_masks_that_are_added_are_those_that_choose() -> None:
    chosen, added = (PackedDataset([[1, 2], [3, 4, 5]], 8, masks=kind)[0] for kind in KINDS)
    assert added["attention_mask"].dtype == np.float32
    assert np.array_equal(np.exp(added["attention_mask"]), chosen["attention_mask"])


def test_nonsense_is_refused() -> None:
    for sizes, capacity in (([3], 0), ([-1], 4), ([1.5], 4), ([[1]], 4)):
        with pytest.raises(PolyaccelError):
            pack(sizes, capacity)
    with pytest.raises(PolyaccelError):
        pack([1], 4, "first")  # type: ignore[arg-type]
    with pytest.raises(PolyaccelError):
        PackedDataset([[1, 2]], 4, lengths=[2, 2])
    with pytest.raises(PolyaccelError):
        PackedDataset([[]], 4)
    with pytest.raises(PolyaccelError):
        PackedDataset([[1]], 4)
    for document, length in (([1, 2], 3), ([1, 2, 3], 2), ([1.5, 2.5], 2), ([[1, 2]], 2)):
        with pytest.raises(PolyaccelError):
            PackedDataset([document], 4, lengths=[length])[0]
    for positions in ([1, 2], [0, 2], [0, 1, 1], [[0, 1]], []):
        with pytest.raises(PolyaccelError):
            cu_seqlens(positions)
