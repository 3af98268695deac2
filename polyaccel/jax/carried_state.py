"""The state that an engine carries: its arrays between micro-batches, over ranks, and in checkpoints.

[Note: State over ranks]
Each rank, or device in native mode, replaces its own state after each micro-batch, from its own samples. At the
accumulation boundary leaves of the reduction "mean" become equal on all ranks. Floating and complex ones are averaged.
Others count the same on every rank, so different ones are an error. Leaves of the reduction "none" stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import getLogger
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import NumpyBuffer, numpy_dtype
from polyaccel.checkpoint import TensorPiece
from polyaccel.checkpoint.format.tensors import BUFFER
from polyaccel.checkpoint.load.name_map import ReadItem, RenamedReader
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CheckpointError, InvariantError, PolyaccelError
from polyaccel.jax.auxiliary import mean_over_ranks
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.program.carried import Carried, StateForm, StateLeaf

log = getLogger(__name__)

Array = np.ndarray[Any, Any]
Reduction = str | Callable[[str], str]
"""`state_reduction` of `polyaccel.initialize`: "mean" or "none", or a function of a leaf's dotted name."""
_REDUCTIONS = ("mean", "none")
CARRIED = "carried"
"""Before a leaf's name, in records of verifications."""
_TYPES = {dtype.value for dtype in DType}


class CarriedState(ABC):
    """A state on this process's devices, from its first value `tree`. `ranks` is how many states the job has.

    Collective. Raises PolyaccelError for a reduction that is neither "mean" nor "none".
    """

    clashes: bool | None = None
    """Whether a parameter has the name of a leaf; None: as this rank's parameters are."""
    data: list[Any]
    """The state of this rank as programs take it; in native mode with a leading axis over devices."""

    def __init__(self, form: StateForm, tree: Any, reduction: Reduction, communicator: Communicator) -> None:
        self.form = form
        self.communicator = communicator
        self.is_averaged = [reduction_of(reduction, leaf.name) == "mean" for leaf in form.leaves]
        first = form.host_data(tree)
        if communicator.world_size > 1:
            _broadcast([value for value, mean in zip(first, self.is_averaged, strict=True) if mean], communicator)
        self.data = [self._placed(at, [value] * self._states) for at, value in enumerate(first)]

    @property
    def tree(self) -> Any:
        """The state of this process's first device."""
        return self.form.tree([jnp.asarray(self._parts(value)[0]) for value in self.data])

    def assign(self, tree: Any) -> None:
        """Replace the state on all devices of this process. Raises PolyaccelError for another structure or type."""
        self.data = [self._placed(at, [value] * self._states) for at, value in enumerate(self.form.host_data(tree))]

    @abstractmethod
    def reduce(self) -> None:
        """Make averaged leaves equal. Collective. See [Note: State over ranks]."""

    def values(self) -> dict[str, Array]:
        """The state of this process's first device, for records of verifications."""
        pairs = zip(self.form.leaves, self.data, strict=True)
        return {f"{CARRIED} {leaf.name}": np.asarray(self._parts(value)[0]) for leaf, value in pairs}

    # Where it is.

    _states = 1
    """How many states this process has."""

    @property
    @abstractmethod
    def _first_rank(self) -> int:
        """The number of this process's first state among all."""

    @property
    @abstractmethod
    def _all_states(self) -> int:
        """How many states the job has."""

    @abstractmethod
    def _placed(self, at: int, parts: Sequence[Array]) -> jax.Array:
        """Put one value of leaf `at` for each of this process's states on the devices."""

    @abstractmethod
    def _parts(self, value: jax.Array) -> Sequence[Any]:
        """The values of this process's states."""

    # Checkpoints.

    def pieces(self, params: Mapping[str, Any]) -> Iterator[TensorPiece]:
        """Yield what this rank saves: averaged leaves once, others with a leading axis over ranks."""
        for _, name, value, mean in self._named(params):
            for at, part in enumerate(self._parts(value)):
                rank = self._first_rank + at
                stored = _stored(np.asarray(part))
                shape = stored.shape if mean else (self._all_states, *stored.shape)
                if mean and rank:
                    continue
                flat = NumpyBuffer(np.ascontiguousarray(stored).reshape(-1))
                yield TensorPiece(name, BUFFER, shape, flat.dtype, rank * flat.numel, flat)

    def loading(self, reader: RenamedReader, params: Mapping[str, Any], allocate: Any) -> Callable[[], None]:
        """Check and verify what a checkpoint has of the state; the returned function takes it over.

        Raises CheckpointError where a leaf has another shape.
        """
        wanted: list[tuple[int, list[ReadItem]]] = []
        for index, (leaf, name, _, mean) in enumerate(self._named(params)):
            if not reader.has(name, BUFFER):
                log.warning("the checkpoint has no state %r; it keeps its value", name)
                continue
            own, saved = _stored_form(leaf), tuple(reader.tensor(name, BUFFER).shape)
            numel, ranks = int(np.prod(own[0], dtype=np.int64)), 1
            if saved != own[0]:
                if saved[1:] != own[0] or len(saved) != len(own[0]) + 1 or not saved[0]:
                    raise CheckpointError(
                        f"the state {name!r} has the shape {saved} in checkpoint {reader.tag!r}, and {own[0]} here",
                        hint="build the model that was saved",
                        value=saved,
                    )
                ranks = 1 if mean else saved[0]
            items = [
                ReadItem(name, BUFFER, (self._first_rank + at) % ranks * numel, numel, own[1])
                for at in range(self._states)
            ]
            for item in items:
                reader.verify(item)
            wanted.append((index, items))

        def take_over() -> None:
            for index, items in wanted:
                leaf, parts = self.form.leaves[index], []
                for item in items:
                    flat = allocate(item.length, item.dtype)
                    reader.read_into(item, flat, allocate)
                    parts.append(np.frombuffer(flat.to_bytes(), leaf.dtype).reshape(leaf.shape).copy())
                self.data[index] = self._placed(index, parts)

        return take_over

    def from_checkpoint(self, stored: Mapping[str, Array], params: Mapping[str, Any]) -> Any:
        """Return what a checkpoint has of the state, by name, in the caller's tree.

        Leaves that are kept per rank have an axis over ranks, and random keys are their data.
        """
        leaves = []
        for leaf, name in zip(self.form.leaves, self.saved_names(params), strict=True):
            value = np.asarray(stored[name], order="C")
            ranks = value.shape[: value.ndim - len(_stored_form(leaf)[0])]
            leaves.append(value.reshape(-1).view(leaf.dtype).reshape((*ranks, *leaf.shape)))
        return jax.tree.unflatten(self.form.structure, leaves)

    def to_checkpoint(self, values: Mapping[str, Array], params: Mapping[str, Any]) -> dict[str, Array]:
        """Return leaves of the caller's tree, by name, as a checkpoint has them."""
        names = {leaf.name: name for leaf, name in zip(self.form.leaves, self.saved_names(params), strict=True)}
        return {names.get(name, name): _stored(value) for name, value in values.items()}

    def saved_names(self, params: Mapping[str, Any]) -> list[str]:
        """The names of the leaves in a checkpoint."""
        return [name for _, name, _, _ in self._named(params)]

    def _named(self, params: Mapping[str, Any]) -> Iterator[tuple[StateLeaf, str, jax.Array, bool]]:
        """The leaves with their names in a checkpoint: dotted paths, behind "state" where a parameter has one."""
        clashes = any(leaf.name in params for leaf in self.form.leaves) if self.clashes is None else self.clashes
        for leaf, value, mean in zip(self.form.leaves, self.data, self.is_averaged, strict=True):
            yield leaf, f"state.{leaf.name}" if clashes else leaf.name, value, mean


class StateOfEngine:
    """The part of an engine that carries a state."""

    _carried: CarriedState | None = None

    _require_own_process: Callable[..., None]

    def _carry(self, form: StateForm, first: Any) -> CarriedState:
        """The state between micro-batches, from its first value. Collective."""
        raise InvariantError("an engine of no kind carries a state", value=form.structure)

    @property
    @engine_call
    def state(self) -> Any:
        """The state that the function carries, in the caller's tree: arrays that never change. None without one.

        It is this rank's own until the accumulation boundary, where `state_reduction` makes ranks equal. A value that
        is assigned must have the same structure, shapes and types, and every rank assigns one.
        """
        self._require_own_process()
        return None if self._carried is None else self._carried.tree

    @state.setter
    @engine_call
    def state(self, value: Any) -> None:
        self._require_own_process()
        if self._carried is None:
            raise PolyaccelError("the engine carries no state", hint="pass state= to initialize", value="state")
        self._carried.assign(value)

    def _with_state(self, batch: Any) -> Any:
        """A batch as the programs take it."""
        return batch if self._carried is None else Carried(self._carried.data, batch)

    def _without_state(self, found: Any) -> Any:
        """The function's auxiliary output, of a program's."""
        return found if self._carried is None else found.aux

    def _keep_state(self, found: Any) -> Any:
        """Replace the state by that of a program's output; return the function's auxiliary output."""
        if self._carried is not None:
            self._carried.data = list(found.state)
        return self._without_state(found)

    def _reduce_state(self) -> None:
        """Let ranks agree on the state at the accumulation boundary. Collective."""
        if self._carried is not None:
            self._carried.reduce()


class ViewsState(CarriedState):
    """The state of a rank in views mode, on its `device`."""

    def __init__(
        self, form: StateForm, tree: Any, reduction: Reduction, communicator: Communicator, device: Any
    ) -> None:
        self._device = device
        super().__init__(form, tree, reduction, communicator)

    @property
    def _first_rank(self) -> int:
        return self.communicator.rank

    @property
    def _all_states(self) -> int:
        return self.communicator.world_size

    def _placed(self, at: int, parts: Sequence[Array]) -> jax.Array:
        return jax.device_put(jnp.array(parts[0]), self._device)

    def _parts(self, value: jax.Array) -> Sequence[Any]:
        return (value,)

    def reduce(self) -> None:
        """As `CarriedState.reduce`."""
        if self.communicator.world_size == 1:
            return
        averaged = [at for at, mean in enumerate(self.is_averaged) if mean]
        floats = [at for at in averaged if self.form.leaves[at].is_inexact]
        self._require_equal([at for at in averaged if at not in floats])
        values = [_real(wide) for wide in (np.asarray(self.data[at]) for at in floats)]
        wide = [v.astype(numpy_dtype(_wide(self.form.leaves[at].dtype))) for at, v in zip(floats, values, strict=True)]
        means = mean_over_ranks(wide, self.communicator, label="state")
        for at, mean in zip(floats, means, strict=True):
            leaf = self.form.leaves[at]
            part = mean.view(leaf.dtype) if leaf.dtype.kind == "c" else mean.astype(leaf.dtype)
            self.data[at] = self._placed(at, [part.reshape(leaf.shape)])

    def _require_equal(self, chosen: Sequence[int]) -> None:
        if not chosen:
            return
        sums = np.array([crc32(np.asarray(self.data[at]).tobytes()) for at in chosen], np.int64)
        travels = self.communicator.allocate(2 * sums.size, DType.INT64)
        travels.copy_from(NumpyBuffer(np.concatenate([sums, -sums])))
        self.communicator.all_reduce(travels, ReduceOp.MAX, label="state").wait()
        most, least = np.frombuffer(travels.to_bytes(), np.int64).reshape(2, -1)
        for at, differs in zip(chosen, most != -least, strict=True):
            if differs:
                raise different_error(self.form.leaves[at].name)


def reduction_of(reduction: Reduction, name: str) -> str:
    """Return "mean" or "none" for a leaf. Raises PolyaccelError for anything else."""
    chosen = reduction(name) if callable(reduction) else reduction
    if chosen not in _REDUCTIONS:
        raise PolyaccelError(
            f"state_reduction: {chosen!r}",
            hint='use "mean" or "none", or a function of a name in the state that returns one of them',
            value=chosen,
        )
    return chosen


def different_error(name: str) -> PolyaccelError:
    return PolyaccelError(
        f"ranks have different values of the state {name!r}, which has no mean",
        hint='keep it per rank: state_reduction="none", or a function of names that returns "none" for it',
        value=name,
    )


def _broadcast(values: Sequence[Array], communicator: Communicator) -> None:
    """Overwrite arrays with rank 0's."""
    flat = np.concatenate([np.zeros(0, np.uint8), *(_bytes(value) for value in values)])
    if not flat.size:
        return
    travels = communicator.allocate(flat.size, DType.UINT8)
    travels.copy_from(NumpyBuffer(flat))
    communicator.broadcast(travels, 0, label="state").wait()
    found, start = np.frombuffer(travels.to_bytes(), np.uint8), 0
    for value in values:
        value[...] = found[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        start += value.nbytes


def _bytes(value: Array) -> Array:
    return np.frombuffer(value.tobytes(), np.uint8)


def _real(value: Array) -> Array:
    """Complex numbers as pairs of real ones."""
    return np.ascontiguousarray(value).reshape(-1).view(value.real.dtype) if value.dtype.kind == "c" else value


def _wide(dtype: np.dtype[Any]) -> DType:
    return DType.FLOAT64 if dtype.name in ("float64", "complex128") else DType.FLOAT32


def _stored(value: Array) -> Array:
    """The array as a checkpoint holds it, see `_stored_form`."""
    if value.dtype.name in _TYPES:
        return value
    if value.dtype.kind == "c":
        return _real(value).reshape(*value.shape, 2)
    return value.view(f"int{8 * value.dtype.itemsize}")


def _stored_form(leaf: StateLeaf) -> tuple[tuple[int, ...], DType]:
    """Shape and type in a checkpoint: complex numbers are pairs, and types that it lacks are integers of their bits."""
    like = _stored(np.zeros(leaf.shape, leaf.dtype))
    return like.shape, DType.parse(like.dtype.name)
