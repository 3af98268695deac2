"""The state of an engine as a pytree of plain arrays, and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.collective_call import run_on_all
from polyaccel.checkpoint.convert import trees
from polyaccel.checkpoint.convert.trees import WholeCheckpoint
from polyaccel.checkpoint.format.commit import read_commit
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM
from polyaccel.core.types import DType
from polyaccel.engine.base import Engine
from polyaccel.engine.resume import TrainingRun
from polyaccel.errors import CheckpointError
from polyaccel.jax.adapter import JaxAdapter
from polyaccel.jax.carried_state import CarriedState
from polyaccel.jax.checkpoint import pieces_of, whole_shapes
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.program.calls import engine_call
from polyaccel.jax.pytree import key_name
from polyaccel.jax.views import fence
from polyaccel.observability.timing import OUTSIDE

_TAG = "state_dict"
_HINT = "pass the tree that engine.state_dict() of an equal model and optimizer returned"
_Expected = dict[tuple[str, str], tuple[tuple[int, ...], DType]]
"""Shape and type of each tensor, by name and kind."""
Array = np.ndarray[Any, Any]


class StateDictOfEngine(Engine):
    """The part of an engine that gives and takes its state as a tree."""

    adapter: JaxAdapter
    _carried: CarriedState | None

    @engine_call
    def state_dict(self) -> dict[str, Any]:
        """Return all that a checkpoint holds as a pytree of numpy arrays, whole on every process. Collective.

        `params` has the parameters in the caller's tree, in the precision in which they are updated. `optimizer` has a
        tree like it for each kind of optimizer state, and `state` the state that the function carries. `engine` has
        counters, loss scale, schedule, hyperparameters and the seed, as JSON in an array of bytes.

        Returns:
            Nested dicts of copies, which do not change. Leaves without elements are None.

        Raises:
            CheckpointError: An accumulation is unfinished.
            PolyaccelError: An update failed halfway, or this process was forked.

        Example:
            ```python
            manager.save(step, args=ocp.args.StandardSave(engine.state_dict()))
            engine.load_state_dict(manager.restore(step, args=ocp.args.StandardRestore()))
            ```
        """
        self._require_own_process()
        self._require_whole_optimizer_step()
        self._settle_replica()
        with self.timer(OUTSIDE):
            return self._tree_of(trees.gathered(self.communicator, self._contents({})))

    @engine_call
    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned, at any world size, stage and execution. Collective.

        Args:
            tree: The same tree on every process: arrays of numpy or JAX, in the structure of `state_dict` or in the
                nested dicts and lists that a checkpointer restores without a target.

        Raises:
            CheckpointError: On every rank and with nothing changed: a leaf is missing, unknown or of another shape, it
                is of another optimizer, or ranks have different trees.
        """
        self._require_own_process()
        fence()
        expected = self._expected()
        made: list[Any] = []
        step = "load_state_dict (nothing was changed)"

        def check() -> int:
            storage = trees.in_memory(self._checked(tree, expected), _TAG)
            commit = read_commit(storage, _TAG)
            assert commit is not None  # it was written just now
            made.append(storage)
            return commit.manifest_crc32

        sums = run_on_all(self.communicator, step, check)
        if len(set(sums)) > 1:
            raise CheckpointError(
                f"{step} failed: ranks have different trees, by checksum {sums}",
                hint="restore the same checkpoint on every rank",
                value=tuple(sums),
            )
        try:
            self._resume(made[0], _TAG, self._take_over, is_whole=False)
        finally:
            made[0].delete_tree("")  # now, and not when cycles are collected

    # What engines give.

    _require_own_process: Callable[[], None]

    @abstractmethod
    def _run(self) -> TrainingRun:
        """The parts whose state a checkpoint holds."""

    @abstractmethod
    def _take_over(self, saved: CheckpointReader) -> tuple[str, dict[str, Any]]:
        """Take over a checkpoint on all ranks or none; return path and client state. Collective."""

    # To a tree.

    def _tree_of(self, whole: WholeCheckpoint) -> dict[str, Any]:
        by_kind: dict[str, dict[str, Array]] = {}
        for (fqn, kind), array in whole.tensors.items():
            by_kind.setdefault(kind, {})[fqn] = array
        params, buffers = by_kind.pop(PARAM), by_kind.pop(BUFFER, {})
        names = [leaf.fqn for leaf in self.adapter.leaves()]
        has_all = params.keys() <= set(names)  # a stage of a pipeline has its own alone

        def in_tree(arrays: Mapping[str, Array]) -> Any:
            found = {fqn: array for fqn, array in arrays.items() if array.size}
            if has_all:
                return jax.tree.unflatten(self.adapter.structure, [found.get(fqn) for fqn in names])
            return trees.nested({tuple(fqn.split(".")): array for fqn, array in found.items()})

        optimizer = {kind: in_tree(by_kind[kind]) for kind in sorted(by_kind)}
        tree = {trees.PARAMS: in_tree(params), trees.OPTIMIZER: optimizer, trees.ENGINE: trees.packed(whole.scalars)}
        optax = whole.optax
        if isinstance(self.zero.optimizer, WholeStates) and not optax and has_all:
            optax = self.zero.optimizer.first_states(params)  # so that a tree is a target before the first step
        if optax:
            optimizer[trees.OPTAX] = {name: array if array.size else None for name, array in optax.items()}
        if self._carried is not None:
            state = self._carried.from_checkpoint(buffers, params)
            tree[trees.STATE] = jax.tree.map(lambda array: array if array.size else None, state)
        return tree

    # From a tree.

    def _expected(self) -> _Expected:
        """All tensors of the engine. Collective."""
        pieces = pieces_of(self._run(), self.adapter.stacking, self._carried)
        mine = sorted({(piece.fqn, piece.kind, tuple(piece.shape), piece.dtype.value) for piece in pieces})
        everywhere = self.communicator.all_gather_object(mine)
        return {(fqn, kind): (tuple(shape), DType(dtype)) for each in everywhere for fqn, kind, shape, dtype in each}

    def _checked(self, tree: Any, expected: _Expected) -> WholeCheckpoint:
        """The checkpoint in a tree. Raises CheckpointError unless it is one of this engine's."""
        tensors: dict[tuple[str, str], Array] = {}
        optax: dict[str, Array] = {}
        values, unknown = None, []
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            names = tuple(map(key_name, path))
            if names == (trees.ENGINE,):
                values = leaf
            elif names[:2] == (trees.OPTIMIZER, trees.OPTAX):
                optax[".".join(names[2:])] = _array(leaf, names)
            elif (found := trees.tensor_at(names)) is not None:
                tensors[found] = _array(leaf, names)
            else:
                unknown.append("/".join(names))
        if values is None:
            raise CheckpointError(f"the tree has no leaf {trees.ENGINE!r}", hint=_HINT, value=trees.ENGINE)
        scalars = trees.unpacked(_array(values, (trees.ENGINE,)))
        if self._carried is not None:
            shapes = whole_shapes(self._run(), self.adapter.stacking)
            state = {fqn: array for (fqn, kind), array in tensors.items() if kind == BUFFER}
            tensors = {key: array for key, array in tensors.items() if key[1] != BUFFER}
            tensors |= {(fqn, BUFFER): array for fqn, array in self._carried.to_checkpoint(state, shapes).items()}
        for key, (shape, dtype) in expected.items():
            if key not in tensors and 0 in shape:
                tensors[key] = np.empty(shape, numpy_dtype(dtype))
        _compare(tensors, expected, unknown)
        if isinstance(self.zero.optimizer, WholeStates) and not optax and any(scalars.get("param_steps", {}).values()):
            place = f"{trees.OPTIMIZER}/{trees.OPTAX}"
            raise CheckpointError(f"the tree has no states of optax: {place}", hint=_HINT, value=place)
        return WholeCheckpoint(tensors, scalars, optax)


def _array(leaf: Any, names: tuple[str, ...]) -> Array:
    place = "/".join(names)
    if not isinstance(leaf, (np.ndarray, np.generic, jax.Array, bool, int, float, complex)):
        kind = type(leaf).__name__
        raise CheckpointError(f"{place} is a {kind}, not an array", hint=_HINT, value=kind)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        hint = "restore whole arrays on each process: ocp.args.StandardRestore(engine.state_dict())"
        raise CheckpointError(f"{place} has parts on devices of other processes", hint=hint, value=place)
    return np.asarray(leaf)


def _compare(tensors: Mapping[tuple[str, str], Array], expected: _Expected, unknown: list[str]) -> None:
    """Raise CheckpointError for other names or shapes. Those of the state, of any number of ranks, a load compares."""
    missing = ["/".join(trees.path_of(*key)) for key in expected if key not in tensors]
    unknown = unknown + ["/".join(trees.path_of(*key)) for key in tensors if key not in expected]
    others = [
        f"{'/'.join(trees.path_of(*key))} {tensors[key].shape} for {shape}"
        for key, (shape, _) in expected.items()
        if key in tensors and tensors[key].shape != shape and key[1] != BUFFER
    ]
    differences = {"missing": missing, "not in this engine": unknown, "of another shape": others}
    if shown := "; ".join(f"{how}: {', '.join(names[:8])}" for how, names in differences.items() if names):
        value = (missing + unknown + others)[0]
        raise CheckpointError(f"the tree is of another model or optimizer: {shown}", hint=_HINT, value=value)
