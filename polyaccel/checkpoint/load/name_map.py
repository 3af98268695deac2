"""A checkpoint under other names: tensors that one framework saved, read by the parameters of another.

Tensors are the same numbers under other names, perhaps with their axes in another order; optimizer states go along.
Nothing is rewritten: a range is read from where it was saved, and only a tensor whose axes differ is read whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from polyaccel.checkpoint.format.tensors import BUFFER, PARAM, TensorEntry
from polyaccel.checkpoint.load.reader import CheckpointReader
from polyaccel.core.block import Block
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

Axes = tuple[int, ...]
NameMap = Literal["flax"] | Mapping[str, str | tuple[str, Axes]] | Callable[[str], str | tuple[str, Axes]]
"""Where a parameter was saved: a function from its name to the saved name, or to (saved name, axes), where the
parameter is the saved array with its axes in this order, as `numpy.transpose(saved, axes)`. A dict has patterns:
`{r"^model\\.(.*)": r"\\1"}` finds what is called `model.` and something here under that something, as `re.sub` would
write it once; what no pattern matches keeps its name, buffers are renamed too. "flax" has how flax and torch name and
lay out the same layers, in both directions: kernel, embedding and scale are weight."""


class Part(Protocol):
    """A parameter that was saved as a part of another one, `fqn`: as one index of its first axis."""

    @property
    def fqn(self) -> str: ...

    @property
    def start(self) -> int:
        """The element of the whole where the part begins."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a parameter was saved: in the tensor `name`, with its axes in another order, from element `start` on, which
    is counted in the parameter's order of axes."""

    name: str
    axes: Axes | None = None
    start: int = 0


class RenamedReader:
    """`reader` as seen by parameters of these `shapes` (by name); reads like a `CheckpointReader`.

    `parts`, by name, are listed in place of the parameters that they are parts of. `buffers` are the model's persistent
    buffers: a file of weights does not distinguish them from parameters, so the model does. `states` has the name under
    which a parameter's optimizer states were saved, where that is not the parameter's own.

    Raises CheckpointError, which lists them, for parameters that are mapped to one, or that several patterns rename in
    different ways, and for a pattern that cannot be read.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        names: NameMap | None,
        shapes: Mapping[str, tuple[int, ...]],
        parts: Mapping[str, Part] = MappingProxyType({}),
        buffers: Collection[str] = (),
        states: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._reader = reader
        self._states = states
        self._patterns = _Patterns(names) if isinstance(names, Mapping) else None
        if self._patterns is not None:
            self._patterns.check(shapes)
        how = names if self._patterns is None else self._patterns.source
        self._sources = {fqn: _source(fqn, shape, how, reader) for fqn, shape in shapes.items()}
        taken: dict[str, list[str]] = {}
        for fqn, source in self._sources.items():
            taken.setdefault(source.name, []).append(fqn)
        if clashes := {name: fqns for name, fqns in taken.items() if len(fqns) > 1}:
            text = "; ".join(f"{' and '.join(map(repr, fqns))} to {name!r}" for name, fqns in clashes.items())
            raise CheckpointError(
                f"several parameters are mapped to one: {text}",
                hint="let name_map give each parameter its own name",
                value=sorted(clashes),
            )
        self._names = {name: fqn for name, (fqn,) in taken.items()}
        self._owners = {**self._names, **{saved: fqn for fqn, saved in states.items()}}
        self._buffers = {self._source_of(fqn).name: fqn for fqn in buffers}
        self._parts: dict[str, list[str]] = {}
        for name, part in parts.items():
            self._parts.setdefault(part.fqn, []).append(name)
            self._sources[name] = replace(self._sources[part.fqn], start=part.start)
        self.tag, self.world_size, self.scalars = reader.tag, reader.world_size, reader.scalars
        self.rank_blobs = reader.rank_blobs

    def saved_name(self, fqn: str) -> str:
        """The name under which a parameter was saved, or would have been."""
        return self._source_of(fqn).name

    def steps_of(self, fqn: str) -> int:
        """How many updates a parameter has had."""
        count: int = self.scalars["param_steps"].get(self.state_name(fqn), 0)
        return count

    def was_trained(self, fqn: str) -> bool:
        """Whether a parameter was trained in the run that was saved."""
        return self.state_name(fqn) in self.scalars["param_steps"]

    def state_name(self, fqn: str) -> str:
        """The name under which a parameter's optimizer states were saved, or would have been."""
        return self._states.get(fqn) or self._source_of(fqn).name

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Every tensor under its parameter's name; without its pieces where the axes differ or it is a part."""
        return tuple(part for entry in self._reader.tensors() for part in self._in_parts(self._renamed(entry)))

    def has(self, fqn: str, kind: str) -> bool:
        return self._reader.has(*self._saved(fqn, kind))

    def tensor(self, fqn: str, kind: str) -> TensorEntry:
        """One saved tensor, as it was saved. Raises CheckpointError if it was not."""
        return self._reader.tensor(*self._saved(fqn, kind))

    def verify(self, item: ReadItem) -> None:
        """Like `CheckpointReader.verify`, for what `read_into` would read."""
        source, (name, kind) = self._source_of(item.fqn), self._saved(item.fqn, item.kind)
        if source.axes is None:
            self._reader.verify(name, kind, source.start + item.start, item.length, item.dtype, block=item.block)
        else:
            self._reader.verify(name, kind, 0, self._reader.tensor(name, kind).numel, item.dtype)

    def read_into(self, item: ReadItem, buffer: Buffer, cast_through: Callable[[int, DType], Buffer]) -> None:
        """Like `CheckpointReader.read_into`; `item` counts elements in the parameter's order of axes."""
        source, (name, kind) = self._source_of(item.fqn), self._saved(item.fqn, item.kind)
        start, length, block = source.start + item.start, item.length, item.block
        if source.axes is None:
            self._reader.read_into(name, kind, start, length, buffer, block=block, cast_through=cast_through)
            return
        saved = self._reader.tensor(name, kind)
        whole = cast_through(prod(saved.shape), saved.dtype)
        self._reader.read_into(name, kind, 0, whole.numel, whole, cast_through=cast_through)
        elements = np.frombuffer(whole.to_bytes(), dtype=f"V{saved.dtype.itemsize}").reshape(saved.shape)
        elements = elements.transpose(source.axes)
        for dim, runs in enumerate(() if block is None else block.runs):
            elements = elements.take([at for first, count in runs for at in range(first, first + count)], axis=dim)
        part = cast_through(length, saved.dtype)
        part.from_bytes(elements.reshape(-1)[start : start + length].tobytes())
        buffer.copy_from(part)

    def _saved(self, fqn: str, kind: str) -> tuple[str, str]:
        """The name and the kind under which a tensor was saved."""
        if kind not in (PARAM, BUFFER):
            return self.state_name(fqn), kind
        name, other = self._source_of(fqn).name, BUFFER if kind == PARAM else PARAM
        has_other = not self._reader.has(name, kind) and self._reader.has(name, other)
        return name, other if has_other else kind

    def _source_of(self, fqn: str) -> _Source:
        found = self._sources.get(fqn)
        if found is None:  # a buffer, or a parameter that is not asked for
            found = _Source(fqn if self._patterns is None else self._patterns.source(fqn)[0])
        return found

    def _in_parts(self, entry: TensorEntry) -> Sequence[TensorEntry]:
        parts = self._parts.get(entry.fqn)
        if parts is None or tuple(entry.shape[:1]) != (len(parts),):
            return (entry,)
        return [replace(entry, fqn=name, shape=entry.shape[1:], pieces=()) for name in parts]

    def _renamed(self, entry: TensorEntry) -> TensorEntry:
        if entry.kind == PARAM and entry.fqn not in self._names and entry.fqn in self._buffers:
            return replace(entry, fqn=self._buffers[entry.fqn], kind=BUFFER)
        if entry.kind == BUFFER and entry.fqn in self._names and entry.fqn not in self._buffers:
            entry = replace(entry, kind=PARAM)
        names = self._names if entry.kind in (PARAM, BUFFER) else self._owners
        fqn = names.get(entry.fqn, entry.fqn)
        axes = self._source_of(fqn).axes
        if axes is None:
            return replace(entry, fqn=fqn)
        return replace(entry, fqn=fqn, shape=tuple(entry.shape[axis] for axis in axes), pieces=())


class _Patterns:
    """Regular expressions and what they write in the place of what they match."""

    def __init__(self, patterns: Mapping[str, str | tuple[str, Axes]]) -> None:
        self._rules: list[tuple[re.Pattern[str], str, Axes | None]] = []
        for pattern, written in patterns.items():
            name, axes = (written, None) if isinstance(written, str) else written
            try:
                self._rules.append((compiled := re.compile(pattern), name, axes))
                re.sub(compiled.pattern + "|", name, "")  # groups that it has not
            except (re.error, IndexError) as error:
                raise CheckpointError(
                    f"name_map: the pattern {pattern!r} -> {name!r} cannot be used: {error}",
                    hint="write it as for re.sub",
                    value=pattern,
                ) from error

    def check(self, fqns: Mapping[str, object]) -> None:
        """Raise CheckpointError for names that patterns rename in different ways, listing all of them."""
        found = {fqn: {name: pattern for pattern, name, _ in self._matches(fqn)} for fqn in fqns}
        if apart := {fqn: names for fqn, names in found.items() if len(names) > 1}:
            text = "; ".join(
                f"{fqn!r} to {' or '.join(f'{name!r} (by {pattern!r})' for name, pattern in names.items())}"
                for fqn, names in apart.items()
            )
            raise CheckpointError(
                f"name_map: patterns rename {len(apart)} parameters in different ways: {text}",
                hint="let one pattern match each name: '^' and '$' bind it to the ends",
                value=sorted(apart),
            )

    def source(self, fqn: str) -> tuple[str, Axes | None]:
        """The saved name, and the order of axes."""
        return next(((name, axes) for _, name, axes in self._matches(fqn)), (fqn, None))

    def _matches(self, fqn: str) -> list[tuple[str, str, Axes | None]]:
        return [
            (pattern.pattern, pattern.sub(written, fqn, count=1), axes)
            for pattern, written, axes in self._rules
            if pattern.search(fqn)
        ]


def _source(fqn: str, shape: tuple[int, ...], names: Any, reader: CheckpointReader) -> _Source:
    if names is None:
        return _Source(fqn)
    if names == "flax":
        return next((source for source in _flax(fqn, len(shape)) if reader.has(source.name, "param")), _Source(fqn))
    found: Any = names(fqn)
    name, axes = (found, None) if isinstance(found, str) else found
    source = _Source(name, None if axes is None else tuple(axes))
    if source.axes is not None and sorted(source.axes) != list(range(len(shape))):
        raise CheckpointError(
            f"axes {source.axes} of {fqn!r} are no order of {len(shape)} axes",
            hint="give each axis of the parameter once",
            value=source.axes,
        )
    return source


def _flax(fqn: str, ndim: int) -> list[_Source]:
    """Where a parameter of flax may stand in a checkpoint of torch, and the other way round, its own name first.

    A kernel of flax is (*spatial, in, out), a weight of torch (out, in, *spatial).
    """
    prefix, dot, leaf = fqn.rpartition(".")
    spatial = range(ndim - 2)
    from_torch = (*(axis + 2 for axis in spatial), 1, 0)
    from_flax = (ndim - 1, ndim - 2, *spatial)
    others: dict[str, list[tuple[str, Axes | None]]] = {
        "kernel": [("weight", from_torch)],
        "embedding": [("weight", None)],
        "scale": [("weight", None)],
        "weight": [("kernel", from_flax), ("embedding", None), ("scale", None)],
    }
    return [_Source(fqn), *(_Source(f"{prefix}{dot}{name}", axes) for name, axes in others.get(leaf, []))]


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Elements [start, start + length) of the flattened `block` of a saved tensor (None: of the whole tensor).

    `dtype` is that of the buffer that takes them.
    """

    fqn: str
    kind: str
    start: int
    length: int
    dtype: DType
    block: Block | None = None
