"""Reading and writing what is known of one parameter: its value, gradient and optimizer states, wherever they rest.

A *fragment* is the run of a parameter that this rank updates: its slice, or all of it under a replicated optimizer.
Kinds are `param` (in the best precision there is), `grad`, and the optimizer's own names such as `exp_avg`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.zero.engine import ZeroEngine

PARAM, GRAD = "param", "grad"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + values.numel) of a flattened parameter."""

    start: int
    values: Buffer


def fragment(step: ZeroEngine, fqn: str, kind: str) -> Fragment | None:
    """This rank's fragment; None where it has none of that parameter. Writing to it changes the state itself.

    A gradient must have been settled (`flush_reductions`). Raises ShardingError for a kind that does not exist.
    """
    params, slot = step.params.locate(fqn)
    if (piece := params.slice_of(slot)) is not None:
        source = _source(step, params.bucket.index, fqn, kind)
        return Fragment(piece.start, source.view(piece.shard_offset, piece.length))
    if slot.param.numel == 0:
        return Fragment(0, _source(step, params.bucket.index, fqn, kind).view(0, 0))
    return None


def flush_reductions(step: ZeroEngine, fqn: str) -> bool:
    """Reduce what is still to be reduced; whether the parameter has a gradient then. Collective.

    Between micro-batches replicated gradients are not reduced yet, and there is none.
    """
    _, slot = step.layout.locate(fqn)
    if not slot.param.trainable:
        return False
    step.reducer.finish_reductions()
    return step.reducer.gradients_of(fqn)[0].holds_result and fqn in step.agree_on_arrivals().params


def read_whole(
    step: ZeroEngine, fqn: str, kind: str, agreed: DType | None = None, *, may_be_view: bool = False
) -> Buffer:
    """All of a parameter's state of one kind, flat, in float32 (or float64). Collective where it is sharded.

    `agreed` is the type of an optimizer state that all ranks know to be there. `may_be_view`: the result may be the
    engine's own memory, to be read before the next update."""
    params, slot = step.params.locate(fqn)
    holders = step.holders(fqn)
    is_complete = params.updates_all or not slot.param.numel
    if agreed is not None:
        dtype = agreed
    elif kind in (PARAM, GRAD) or is_complete:
        dtype = _source(step, params.bucket.index, fqn, kind).dtype
    else:
        dtype = _agreed_type(step, params.bucket.index, fqn, kind)
    own = fragment(step, fqn, kind)
    wide = dtype if dtype is DType.FLOAT64 else DType.FLOAT32
    if (
        may_be_view
        and is_complete
        and own is not None
        and own.values.dtype is wide
        and type(own.values) is type(holders.allocate(0, wide))  # a file has no memory to look at
    ):
        return own.values
    whole = holders.allocate(slot.param.numel, wide)
    if own is not None:
        whole.view(own.start, own.values.numel).copy_from(own.values)
    if not is_complete:
        holders.all_reduce(
            whole, label=f"whole {kind}", bucket=params.bucket.index
        )  # zeros elsewhere, so nothing is rounded
    return whole


def _agreed_type(step: ZeroEngine, index: int, fqn: str, kind: str) -> DType:
    """The type of a parameter's optimizer state, of which this rank may hold no element. Collective: a rank without
    elements of the bucket cannot know which states there are, and all raise ShardingError where none has it."""
    has = fragment(step, fqn, PARAM) is not None
    own = {name: state.dtype.value for name, state in _states(step, index).items()} if has else None
    all_types = [found for found in step.holders(fqn).all_gather_object(own) if found is not None]
    if not all(kind in found for found in all_types):
        raise _no_state(fqn, kind, sorted(set.intersection(*map(set, all_types))))
    return DType.parse(all_types[0][kind])


def write_fragment(step: ZeroEngine, fqn: str, kind: str, value: Buffer) -> None:
    """Overwrite this rank's fragment with `value`, of its length. A parameter is published: collective then."""
    own = fragment(step, fqn, kind)
    length = 0 if own is None else own.values.numel
    if value.numel != length:
        raise ShardingError(
            f"{value.numel} elements cannot be this rank's {length} of parameter {fqn!r}",
            hint="pass a value of the shape that the matching get function returns",
            value=value.numel,
        )
    if own is not None:
        own.values.copy_from(value)
    if kind == PARAM:
        step.params.all_gather_master(step.layout.locate(fqn)[0].index)
        step.params.refresh_private_view(fqn)


def write_whole(step: ZeroEngine, fqn: str, kind: str, value: Buffer) -> None:
    """Overwrite a parameter's state of one kind with `value`, flat, whole, and equal on all ranks. Not collective."""
    if kind == PARAM:
        step.params.write(fqn, value)
        return
    own = fragment(step, fqn, kind)
    if own is not None:
        own.values.copy_from(value.view(own.start, own.values.numel))
    if kind == GRAD:
        note_written(step, fqn)


@dataclass(frozen=True, slots=True)
class ShownGradient(Fragment):
    """A fragment of a gradient that user code reads and changes where the update reads it.

    `is_whole`: it is all of the parameter, on every rank. `is_touched`: this rank had a gradient, or user code set one.
    """

    is_whole: bool
    is_touched: bool


def shown_gradient(step: ZeroEngine, fqn: str) -> ShownGradient | None:
    """A parameter's reduced gradient, for user code to read and to change; None where the bucket has none. Waits for
    its reduction and is not collective.

    Raises PolyaccelError after a pass that failed, ShardingError while the gradient is not reduced over several ranks.
    """
    gradients, index = step.reducer.gradients_of(fqn)
    step.reducer.require_complete(fqn)
    is_alone = step.holders(fqn).world_size == 1
    if gradients.holds_unreduced:
        summed = gradients.unreduced(index)
        if summed is None or is_alone:
            return None if summed is None else ShownGradient(0, summed, True, True)
        raise ShardingError(
            f"the gradient of {fqn!r} is this rank's own sum, which is not reduced before the last backward pass of an "
            "accumulation",
            hint="read or change it after the last backward pass, right before the engine.step() that updates; "
            "engine.zero_grad() forgets what has accumulated",
            value=fqn,
        )
    gradients.finish()
    if gradients.has_late and not is_alone:
        raise ShardingError(
            f"a part of the gradient of {fqn!r} came after its bucket's reduction, as in a second backward pass",
            hint="call polyaccel.utils.safe_get_full_grad for this parameter first, on all ranks: it reduces the rest",
            value=fqn,
        )
    if gradients.has_late:
        gradients.reduce_late()
    if not gradients.holds_result:
        return None
    step.reducer.user_edits.shown.add(gradients.bucket.index)
    own = fragment(step, fqn, GRAD) or Fragment(0, gradients.result().view(0, 0))
    params = step.params[gradients.bucket.index]
    return ShownGradient(own.start, own.values, params.updates_all, gradients.touched[index])


def replace_gradient(step: ZeroEngine, fqn: str, value: Buffer, *, is_part: bool = False, counts: bool = True) -> None:
    """Let the next update use `value`, flat, whole and equal on all ranks, as the gradient of a parameter. `is_part`:
    `value` is this rank's fragment. `counts`: the parameter has a gradient now, if it had none. Not collective.

    Raises as `shown_gradient` does.
    """
    gradients, index = step.reducer.gradients_of(fqn)
    shown = shown_gradient(step, fqn)
    if shown is None and gradients.holds_unreduced:
        gradients.add(index, value, reducing=False)
    else:
        gradients.provide_result()
        own = shown_gradient(step, fqn) if shown is None else shown
        assert own is not None  # there is a result now
        own.values.copy_from(value if is_part else value.view(own.start, own.values.numel))
    note_written(step, fqn, counts=counts)


def note_written(step: ZeroEngine, fqn: str, *, counts: bool = True) -> None:
    """User code changed a parameter's gradient. `counts`: the parameter has one now, if it had none."""
    gradients, index = step.reducer.gradients_of(fqn)
    gradients.touched[index] |= counts
    step.reducer.user_edits.written.add(fqn)
    step.reducer.user_edits.dropped.discard(fqn)


def drop_gradient(step: ZeroEngine, fqn: str) -> None:
    """Forget the gradient of a parameter, as if none had appeared since the last update. Not collective.

    Raises PolyaccelError inside a backward pass.
    """
    gradients, index = step.reducer.gradients_of(fqn)
    step.reducer.require_complete(fqn)
    gradients.drop(index)
    own = fragment(step, fqn, GRAD) if gradients.holds_result else None
    if own is not None:
        own.values.fill(0.0)
    step.reducer.user_edits.dropped.add(fqn)
    step.reducer.user_edits.written.discard(fqn)


def _source(step: ZeroEngine, index: int, fqn: str, kind: str) -> Buffer:
    """The buffer in which fragments of a bucket lie, as long as `master`."""
    if kind == PARAM:
        step.params.end_fetches()
        return step.params[index].master
    if kind == GRAD:
        gradients, _ = step.reducer.gradients_of(fqn)
        gradients.finish()
        if not gradients.holds_result:
            raise PolyaccelError(
                f"parameter {fqn!r} has no gradient now", hint="ask between engine.backward() and engine.step()"
            )
        return gradients.result()
    states = _states(step, index)
    if kind not in states:
        raise _no_state(fqn, kind, list(states))
    return states[kind]


def _states(step: ZeroEngine, index: int) -> Mapping[str, Buffer]:
    """The optimizer states of a bucket on this rank."""
    return next((shard.states for shard in step.shards if shard.bucket.index == index), {})


def state_names(step: ZeroEngine, fqn: str) -> tuple[str, ...]:
    """Return the names of the optimizer states that this rank has of a parameter's bucket."""
    return tuple(_states(step, step.layout.locate(fqn)[0].index))


def _no_state(fqn: str, kind: str, states: Sequence[str]) -> ShardingError:
    return ShardingError(
        f"parameter {fqn!r} has no optimizer state {kind!r}",
        hint=f"its states are {', '.join(states) or 'none (yet)'}",
        value=kind,
    )
