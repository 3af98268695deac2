"""A JAX engine's state to and from a checkpoint, in the form that torch engines write: either continues from the
other's.

The function's random keys follow from the seed and the count of micro-batches, so no generator is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.checkpoint import CheckpointReader, TensorPiece
from polyaccel.checkpoint.format.imported import IMPORTED
from polyaccel.checkpoint.load.custom_load import CustomLoadReader, GivenValue, GivenValues, call_load_fn, saved_values
from polyaccel.checkpoint.load.name_map import NameMap, RenamedReader
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.engine.imported_states import own_scalars, own_schedule_state, state_names
from polyaccel.engine.resume import LoadPlan, SavedValues, TrainingRun, check_names, validate_state_dict, wanted_state
from polyaccel.errors import CheckpointError
from polyaccel.jax.carried_state import CarriedState
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.optax_whole import WholeStates
from polyaccel.jax.program.stacking import Stacking
from polyaccel.jax.pytree import dtype_of, named_leaves
from polyaccel.zero.trained_state import over_stages

log = getLogger(__name__)

_OPTAX, _SEED = "optax", "seed"
CustomLoad = Callable[..., Any]
"""Called as `fn(src=arrays, dst=params)`, of numpy arrays: `src` has the checkpoint's parameters and buffers by their
saved names, `dst` is the tree of parameters, the floating ones at least float32. Returns the tree to train with."""


def contents_of(
    run: TrainingRun,
    stacking: Stacking,
    client_state: Mapping[str, Any],
    *,
    allows_bytes: bool,
    seed: int,
    state: CarriedState | None = None,
) -> SaveContents:
    """Return what this rank saves of `run`, cut by `stacking`. Collective where there are stages."""
    run.zero.consistency.require()
    run.zero.params.wait_all_gathers()
    scalars = run.scalars(client_state, may_have_bytes=allows_bytes)
    steps = {stacking.in_whole(name, (), 0)[0]: count for name, count in run.zero.steps.items()}
    scalars["param_steps"] = over_stages(run.model_parallel_group, steps)
    optimizer = run.zero.optimizer
    if isinstance(optimizer, OptaxOptimizer):
        scalars["client_optimizer"] = {_OPTAX: dict(optimizer.numbers)}
    if run.schedule is not None:
        scalars["lr_scheduler"] = run.schedule.state_dict()
    scalars[_SEED] = seed
    return SaveContents(
        pieces=lambda: pieces_of(run, stacking, state),
        scalars=scalars,
        rank_blobs=optimizer.state_blobs(run.communicator.rank) if isinstance(optimizer, WholeStates) else {},
    )


def pieces_of(run: TrainingRun, stacking: Stacking, state: CarriedState | None) -> Iterator[TensorPiece]:
    """Yield the tensors that this rank has of `run`, under the user's names."""
    for slot, kind, start, buffer in run.zero.local_shards():
        fqn, shape, at = stacking.in_whole(slot.param.fqn, slot.param.shape, start)
        yield TensorPiece(fqn, kind, shape, buffer.dtype, at, buffer)
    if state is not None:
        yield from state.pieces(whole_shapes(run, stacking))


def load_run(
    run: TrainingRun,
    stacking: Stacking,
    saved: CheckpointReader,
    *,
    optimizer_states: bool,
    schedule: bool,
    name_map: NameMap | None,
    seed: int,
    custom: OwnTree | None = None,
    state: CarriedState | None = None,
) -> tuple[str, dict[str, Any]]:
    """Take over a checkpoint on all ranks or none; return path and client state. Collective."""
    run.zero.params.wait_all_gathers()
    members = run.members()

    def check() -> LoadPlan:
        return _check(
            run,
            stacking,
            saved,
            members,
            optimizer_states=optimizer_states,
            schedule=schedule,
            name_map=name_map,
            custom=custom,
            state=state,
        )

    run.load_together(saved, check)
    if optimizer_states and (theirs := saved.scalars.get(_SEED, seed)) != seed and run.communicator.rank == 0:
        log.warning("the run was saved with seed=%s and continues with seed=%s: its random keys differ", theirs, seed)
    return f"{saved.storage.location}/{saved.tag}", saved.scalars["client_state"]


def _check(
    run: TrainingRun,
    stacking: Stacking,
    saved: CheckpointReader,
    members: Mapping[str, int | None],
    *,
    optimizer_states: bool,
    schedule: bool,
    name_map: NameMap | None,
    custom: OwnTree | None,
    state: CarriedState | None,
) -> LoadPlan:
    """Check what this rank takes over; `members`: all stages' parameters. See [Note: All-or-nothing load]."""
    shapes = whole_shapes(run, stacking)
    buffers = () if state is None else state.saved_names(shapes)
    renamed = RenamedReader(saved, name_map, shapes, stacking.layers, buffers)
    state_names(saved, None, wanted=optimizer_states)
    renamed.scalars = own_scalars(run, renamed, members, wanted=optimizer_states)
    reader: RenamedReader | CustomLoadReader = renamed
    values = SavedValues.from_reader(reader)
    if custom is None:
        check_names(run.zero, reader, strict=True, elsewhere=members)
    else:
        given = custom.values(saved, run.accelerator.allocate)
        given.check(shapes)
        own = {param.fqn: param.global_shape for param in run.zero.layout.params}
        reader = CustomLoadReader(renamed, given.in_parts(stacking.layers), own)
    run.check_progress(values)
    sources = run.match_groups(reader, values, members, wanted=optimizer_states)
    wanted = wanted_state(run.zero, reader, optimizer_states=optimizer_states, strict=True)
    optax = run.zero.optimizer if sources is not None and isinstance(run.zero.optimizer, OptaxOptimizer) else None
    numbers = values.client_optimizer.get(_OPTAX, {})
    if optax is not None and numbers.keys() != optax.numbers.keys():
        raise CheckpointError(
            f"checkpoint {reader.tag!r} has the numbers {sorted(numbers)} of an optax transformation, this run's has "
            f"{sorted(optax.numbers)}",
            hint="load another tag, or begin with a new optimizer: load_optimizer_states=False",
            value=sorted(numbers),
        )
    whole = run.zero.optimizer if sources is not None and isinstance(run.zero.optimizer, WholeStates) else None
    states = None if whole is None else whole.read_states(saved.rank_blobs(0) | saved.owned_blobs())
    of_schedule = values.lr_scheduler if schedule and run.schedule is not None else None
    if of_schedule is not None:
        if IMPORTED in saved.scalars:
            of_schedule = own_schedule_state(reader.tag, of_schedule, run.schedule.state_dict())
        validate_state_dict(run.schedule, of_schedule)
    wanted.verify(reader)
    take_state = None if state is None else state.loading(renamed, shapes, run.accelerator.allocate)

    def read() -> None:
        wanted.read(reader, run.accelerator)
        if take_state is not None:
            take_state()
        run.load_progress(values)
        if sources is not None:
            wanted.begin_fresh(run)
            run.load_groups(values, sources)
        if optax is not None:
            optax.numbers.update(numbers)
        if whole is not None:
            whole.take_states(states)
        if of_schedule is not None:
            run.schedule.load_state_dict(of_schedule)

    steps = {fqn: reader.steps_of(fqn) for fqn in run.zero.steps} if sources is not None else {}
    return LoadPlan(read=read, is_whole=optimizer_states, steps=steps)


def whole_shapes(run: TrainingRun, stacking: Stacking) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters by name, stacked ones as one."""
    return dict(stacking.in_whole(param.fqn, param.shape, 0)[:2] for param in run.zero.layout.params)


@dataclass(frozen=True, slots=True)
class OwnTree:
    """A user's function, and the parameters as they are."""

    function: CustomLoad
    params: Any

    def values(self, saved: CheckpointReader, allocate: Any) -> GivenValues:
        """Return what the user's function makes of the checkpoint."""
        src = {
            name: value.data.view(numpy_dtype(value.dtype)).reshape(value.shape)
            for name, value in saved_values(saved, allocate)
        }
        dst = jax.tree.map(_wide, self.params)
        made = call_load_fn(self.function, src, dst)
        found, wanted = jax.tree.structure(made), jax.tree.structure(dst)
        if found != wanted:
            raise CheckpointError(
                f"custom_load_fn returned a tree of the structure {str(found)[:200]}, not {str(wanted)[:200]}",
                hint="return a tree like dst",
                value=str(found)[:200],
            )
        return GivenValues({fqn: _value(fqn, leaf) for fqn, leaf in named_leaves(made)[0].items()})


def _wide(leaf: Any) -> np.ndarray[Any, Any]:
    array = np.array(leaf)
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) and array.itemsize < 4 else array


def _value(fqn: str, leaf: Any) -> GivenValue:
    dtype = dtype_of(fqn, leaf)
    array = np.ascontiguousarray(np.asarray(leaf), numpy_dtype(dtype))
    return GivenValue(np.shape(leaf), dtype, array.reshape(-1).view(np.uint8))
