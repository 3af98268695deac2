"""Reading and writing what is known of one parameter: its value, gradient and optimizer states, wherever they rest.

A *fragment* is the run of a parameter that this rank updates: its slice, or all of it under a replicated optimizer.
Kinds are `param` (in the best precision there is), `grad`, and the optimizer's own names such as `exp_avg`.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.buffer import Buffer
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.types import DType
from polyaccel.zero.buckets.gradients import GradientBucket
from polyaccel.zero.step import ZeroStep

PARAM, GRAD = "param", "grad"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + values.numel) of a flattened parameter."""

    start: int
    values: Buffer


def fragment(step: ZeroStep, fqn: str, kind: str) -> Fragment | None:
    """This rank's fragment; None where it has none of that parameter. Writing to it changes the state itself.

    A gradient must have been settled (`settle_gradients`). Raises ShardingError for a kind that does not exist.
    """
    place, slot = step.params.locate(fqn)
    source = _source(step, place.bucket.index, fqn, kind)
    for piece in place.slices():
        if piece.fqn == fqn:
            return Fragment(piece.start, source.view(piece.shard_offset, piece.length))
    return Fragment(0, source.view(0, 0)) if slot.param.numel == 0 else None


def settle_gradients(step: ZeroStep, fqn: str) -> bool:
    """Reduce what is still to be reduced; whether the parameter has a gradient then. Collective.

    Between micro-batches replicated gradients are not reduced yet, and there is none.
    """
    _, slot = step.layout.locate(fqn)
    if not slot.param.trainable:
        return False
    step.finish_reductions()
    return _gradients(step, fqn).holds_result and fqn in step.agree_on_arrivals().touched


def read_whole(step: ZeroStep, fqn: str, kind: str) -> Buffer:
    """All of a parameter's state of one kind, flat, in float32 (or float64). Collective where it is sharded."""
    place, slot = step.params.locate(fqn)
    own = fragment(step, fqn, kind)
    dtype = _source(step, place.bucket.index, fqn, kind).dtype
    whole = step.communicator.allocate(slot.param.numel, dtype if dtype is DType.FLOAT64 else DType.FLOAT32)
    if own is not None:
        whole.view(own.start, own.values.numel).copy_from(own.values)
    is_complete = place.master.numel == place.bucket.numel
    if not is_complete and slot.param.numel:
        step.communicator.all_reduce(
            whole, label=f"whole {kind}", bucket=place.bucket.index
        )  # zeros elsewhere, so nothing is rounded
    return whole


def write_fragment(step: ZeroStep, fqn: str, kind: str, value: Buffer) -> None:
    """Overwrite this rank's fragment with `value`, of its length. A parameter is published: collective then."""
    own = fragment(step, fqn, kind)
    length = 0 if own is None else own.values.numel
    if value.numel != length:
        raise ShardingError(
            f"{value.numel} elements cannot be this rank's {length} of parameter {fqn!r}",
            cure="pass a value of the shape that the matching get function returns",
            value=value.numel,
        )
    if own is not None:
        own.values.copy_from(value)
    if kind == PARAM:
        step.params.publish_master(step.layout.locate(fqn)[0].index)


def write_whole(step: ZeroStep, fqn: str, kind: str, value: Buffer) -> None:
    """Overwrite a parameter's state of one kind with `value`, flat, whole, and equal on all ranks. Not collective."""
    if kind == PARAM:
        step.params.write(fqn, value)
        return
    own = fragment(step, fqn, kind)
    if own is not None:
        own.values.copy_from(value.view(own.start, own.values.numel))


def _source(step: ZeroStep, index: int, fqn: str, kind: str) -> Buffer:
    """The buffer in which fragments of a bucket lie, as long as `master`."""
    if kind == PARAM:
        return step.params[index].master
    if kind == GRAD:
        gradients = _gradients(step, fqn)
        if not gradients.holds_result:
            raise PolyaccelError(
                f"parameter {fqn!r} has no gradient now", cure="ask between engine.backward() and engine.step()"
            )
        return gradients.result()
    shard = next((shard for shard in step.shards if shard.bucket.index == index), None)
    states = {} if shard is None else shard.states
    if kind not in states:
        raise ShardingError(
            f"parameter {fqn!r} has no optimizer state {kind!r}",
            cure=f"its states are {', '.join(states) or 'none (yet)'}",
            value=kind,
        )
    return states[kind]


def _gradients(step: ZeroStep, fqn: str) -> GradientBucket:
    """The gradients of a parameter's bucket. Raises ShardingError for a frozen one."""
    bucket, _ = step.layout.locate(fqn)
    for gradients in step.gradient_buckets():
        if gradients.bucket is bucket:
            return gradients
    raise ShardingError(
        f"parameter {fqn!r} is not trained, so it has no gradient", cure="pass a trained one", value=fqn
    )
