"""Values that a user's own function makes of a checkpoint: `load_checkpoint(..., custom_load_fn=...)`.

[Note: User-defined loading]
The function gets every parameter and buffer of the checkpoint, whole and under the saved names, and a copy of what is
trained, which it changes as it likes. Only then are its values compared with the model and taken over, like those of a
checkpoint: a function that raises, on any rank, leaves the engine as it was. Optimizer states are the checkpoint's, for
parameters of the same name and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.checkpoint.format.tensors import BUFFER as BUFFER
from polyaccel.checkpoint.format.tensors import PARAM, TensorEntry
from polyaccel.checkpoint.load.name_map import Part, ReadItem, RenamedReader
from polyaccel.checkpoint.load.reader import CheckpointReader
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class GivenValue:
    """The elements of a parameter or a buffer, flat, as the bytes that they are."""

    shape: tuple[int, ...]
    dtype: DType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GivenValues:
    """What a user's function made: parameters and buffers by the model's names; `untouched` are the parameters that it
    left as they are."""

    params: Mapping[str, GivenValue]
    buffers: Mapping[str, GivenValue] = field(default_factory=dict)
    untouched: Collection[str] = ()

    def in_parts(self, parts: Mapping[str, Part]) -> GivenValues:
        """With a value for each part of a parameter too: an index of its first axis."""
        found = dict(self.params)
        for name, part in parts.items():
            whole, size = self.params[part.fqn], self.params[part.fqn].dtype.itemsize
            numel = prod(whole.shape[1:])
            data = whole.data[part.start * size : (part.start + numel) * size]
            found[name] = GivenValue(whole.shape[1:], whole.dtype, data)
        return GivenValues(found, self.buffers, self.untouched)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError naming every parameter that has not its own shape, of these."""
        others = {
            fqn: (value.shape, shapes[fqn]) for fqn, value in self.params.items() if value.shape != shapes.get(fqn)
        }
        if others:
            raise CheckpointError(
                f"custom_load_fn left parameters of another shape (made, model): {others}",
                hint="write values of the model's shapes into dst",
                value=sorted(others),
            )


class CustomLoadReader:
    """`reader`, but parameters and buffers are `given`; of optimizer states only those are there whose shape is that of
    the parameter here, in `shapes`. See [Note: User-defined loading]."""

    def __init__(self, reader: RenamedReader, given: GivenValues, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._reader, self._given = reader, given
        entries = reader.tensors()
        self._entries = [
            entry for entry in entries if entry.kind in (PARAM, BUFFER) or shapes.get(entry.fqn) == tuple(entry.shape)
        ]
        self._states = {(entry.fqn, entry.kind) for entry in self._entries if entry.kind not in (PARAM, BUFFER)}
        self.tag, self.world_size, self.scalars = reader.tag, reader.world_size, reader.scalars
        self.rank_blobs = reader.rank_blobs

    def saved_name(self, fqn: str) -> str:
        return self._reader.saved_name(fqn)

    def steps_of(self, fqn: str) -> int:
        return self._reader.steps_of(fqn)

    def was_trained(self, fqn: str) -> bool:
        return self._reader.was_trained(fqn)

    def tensors(self) -> Sequence[TensorEntry]:
        return self._entries

    def has(self, fqn: str, kind: str) -> bool:
        if kind in (PARAM, BUFFER):
            return self._value(fqn, kind) is not None
        return (fqn, kind) in self._states

    def tensor(self, fqn: str, kind: str) -> TensorEntry:
        value = self._value(fqn, kind)
        if value is None:
            return self._reader.tensor(fqn, kind)
        return TensorEntry(fqn, kind, value.shape, value.dtype, ())

    def verify(self, item: ReadItem) -> None:
        value = self._value(item.fqn, item.kind)
        if value is None:
            self._reader.verify(item)
        elif item.dtype is not value.dtype and item.dtype.is_floating != value.dtype.is_floating:
            raise CheckpointError(
                f"custom_load_fn made {item.fqn!r} {value.dtype.value}, the model has {item.dtype.value}",
                hint="keep the type of what is in dst",
                value=item.fqn,
            )

    def read_into(self, item: ReadItem, buffer: Buffer, cast_through: Callable[[int, DType], Buffer]) -> None:
        value = self._value(item.fqn, item.kind)
        if value is None:
            self._reader.read_into(item, buffer, cast_through)
            return
        size = value.dtype.itemsize  # a block's own elements are all that the model has of a parameter that is cut
        part = cast_through(item.length, value.dtype)
        part.from_bytes(value.data[item.start * size : (item.start + item.length) * size].tobytes())
        buffer.copy_from(part)

    def _value(self, fqn: str, kind: str) -> GivenValue | None:
        values = self._given.params if kind == PARAM else self._given.buffers if kind == BUFFER else {}
        return values.get(fqn)


def call_load_fn(function: Callable[..., Any], src: Any, dst: Any) -> Any:
    """What a user's `custom_load_fn` gives. Raises CheckpointError where it raises."""
    try:
        return function(src=src, dst=dst)
    except Exception as error:
        raise CheckpointError(
            f"custom_load_fn raised {type(error).__name__}: {error}",
            hint="nothing was changed: fix the function, or leave it out",
            value=type(error).__name__,
        ) from error


def saved_values(saved: CheckpointReader, allocate: Callable[[int, DType], Buffer]) -> Iterator[tuple[str, GivenValue]]:
    """Yield every parameter and buffer, whole and verified, by saved name, through buffers of `allocate`."""
    for entry in saved.tensors():
        if entry.kind in (PARAM, BUFFER):
            flat = allocate(prod(entry.shape), entry.dtype)
            saved.read_into(entry.fqn, entry.kind, 0, flat.numel, flat)
            data = np.frombuffer(bytearray(flat.to_bytes()), np.uint8)
            yield entry.fqn, GivenValue(tuple(entry.shape), entry.dtype, data)
