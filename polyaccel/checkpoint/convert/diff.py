"""Two checkpoints next to each other: tensors and plain values that one of them lacks, or that are not equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.checkpoint import CheckpointReader, TensorEntry
from polyaccel.checkpoint.convert.elements import as_numbers, read, runs
from polyaccel.core.types import DType

Key = tuple[str, str]
"""A tensor's name and kind."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both checkpoints hold. `shapes` and `dtypes` are (of one, of the other).

    `largest` and `relative` are the largest of |a - b| and of |a - b| / max(|a|, |b|) over all elements: infinite where
    one of two numbers is not finite and the other is another, None where the shapes differ. `is_equal`: bit by bit, in
    one type.
    """

    fqn: str
    kind: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[DType, DType]
    is_equal: bool
    largest: float | None
    relative: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """What sets two checkpoints apart. `missing` are in the first alone, `extra` in the second; `scalars` are the
    dotted keys of plain values, with both values (None where one is not there)."""

    missing: tuple[Key, ...]
    extra: tuple[Key, ...]
    tensors: tuple[TensorDifference, ...]
    scalars: Mapping[str, tuple[Any, Any]]

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same tensors bit by bit, and the same plain values."""
        return not (self.missing or self.extra or self.scalars) and all(tensor.is_equal for tensor in self.tensors)


def difference(one: CheckpointReader, other: CheckpointReader, progress: Callable[[int], None]) -> Difference:
    """Compare tensors run by run, in the memory of two runs; `progress` receives the bytes read of `one`."""
    ours = {(tensor.fqn, tensor.kind): tensor for tensor in one.tensors()}
    theirs = {(tensor.fqn, tensor.kind): tensor for tensor in other.tensors()}
    both = [_compared(one, ours[key], other, theirs[key], progress) for key in sorted(ours) if key in theirs]
    values, others = dict(_flat(one.scalars)), dict(_flat(other.scalars))
    scalars = {
        key: (values.get(key), others.get(key))
        for key in sorted(values.keys() | others.keys())
        if key not in values or key not in others or repr(values[key]) != repr(others[key])
    }
    return Difference(
        tuple(sorted(ours.keys() - theirs.keys())), tuple(sorted(theirs.keys() - ours.keys())), tuple(both), scalars
    )


def _compared(
    one: CheckpointReader,
    ours: TensorEntry,
    other: CheckpointReader,
    theirs: TensorEntry,
    progress: Callable[[int], None],
) -> TensorDifference:
    shapes, dtypes = (ours.shape, theirs.shape), (ours.dtype, theirs.dtype)
    if ours.shape != theirs.shape:
        return TensorDifference(ours.fqn, ours.kind, shapes, dtypes, False, None, None)
    largest = relative = 0.0
    is_equal = ours.dtype is theirs.dtype
    for start, length in runs(ours):
        a, b = read(one, ours, start, length), read(other, theirs, start, length)
        progress(a.nbytes)
        if ours.dtype is theirs.dtype and np.array_equal(a, b):
            continue
        is_equal = False
        apart, ratio = _largest(a, ours.dtype, b, theirs.dtype)
        largest, relative = max(largest, apart), max(relative, ratio)
    return TensorDifference(ours.fqn, ours.kind, shapes, dtypes, is_equal, largest, relative)


def _largest(a: npt.NDArray[np.uint8], a_dtype: DType, b: npt.NDArray[np.uint8], b_dtype: DType) -> tuple[float, float]:
    one, other = as_numbers(a, a_dtype).astype(np.float64), as_numbers(b, b_dtype).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(one - other)
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        apart[same] = 0.0
        apart[np.isnan(apart)] = np.inf
        ratio = apart / np.maximum(np.abs(one), np.abs(other))
        ratio[same] = 0.0
        ratio[np.isnan(ratio)] = np.inf
    return float(apart.max(initial=0.0)), float(ratio.max(initial=0.0))


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of plain values, by dotted key."""
    children: Any = ()
    if isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    if not children:
        yield prefix.removesuffix("."), tree
    for key, value in children:
        yield from _flat(value, f"{prefix}{key}.")
