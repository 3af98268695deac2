"""A parameter's full-precision value, gradient and optimizer states, for debuggers and custom training loops to read
and to write, whole or this rank's part.

`safe_get_full_*` are collective wherever something is sharded: every rank calls them for the same parameters in the
same order. `safe_set_full_*` take a value of the parameter's shape, equal on all ranks, and exchange nothing. The local
variants work on this rank's part, flat: its slice, possibly empty, or all of it where optimizer states are replicated.
Values are copies in float32 (float64 if the state is that). A parameter that belongs to no engine gives None.

Optimizer states have the names of `torch.optim`, such as `exp_avg`. Gradients are there between `backward` and `step`
at the accumulation boundary (at stages 2 and 3 after each backward), averaged over ranks and micro-batches and without
loss scale; before that, and for a parameter without one, they are None.

Every function raises ShardingError for a value of another shape, for an unknown state, and, when setting, for a
parameter without an engine; setting a gradient that is not there raises PolyaccelError.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.ownership import ParameterOwner, record_of
from polyaccel.zero.fragments import GRAD, PARAM, flush_reductions, fragment, read_whole, write_fragment, write_whole


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole parameter in full precision: its master weights."""
    return _get_full(param, PARAM)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient."""
    return _get_full(param, GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The whole optimizer state of that name."""
    return _get_full(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the parameter: its master weights, and what it computes with."""
    _set_full(param, PARAM, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the gradient that the next update uses."""
    _set_full(param, GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite the optimizer state of that name."""
    _set_full(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the parameter in full precision."""
    return _get_local(param, PARAM)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the gradient. Collective too, for a gradient may be waiting for its reduction."""
    return _get_local(param, GRAD)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of the optimizer state of that name."""
    return _get_local(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's part of the parameter. Collective: at stages 1 and 2 the parts are gathered again."""
    _set_local(param, PARAM, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's part of the gradient that the next update uses."""
    _set_local(param, GRAD, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's part of the optimizer state of that name."""
    _set_local(param, optim_state_key, value)


class _Place(NamedTuple):
    owner: ParameterOwner
    fqn: str


def _find(param: nn.Parameter) -> _Place | None:
    home = record_of(param)
    if home is None or home.owner is None:
        return None
    home.owner.step.params.wait_all_gather(home.owner.step.layout.locate(home.fqn)[0].index)
    home.owner.adopt_here(home.fqn)
    return _Place(home.owner, home.fqn)


def _require(param: nn.Parameter) -> _Place:
    place = _find(param)
    if place is None:
        shape = tuple(param.shape)
        raise ShardingError(
            f"a parameter of shape {shape} belongs to no engine", hint="pass one of engine.module", value=shape
        )
    return place


def _is_there(place: _Place, kind: str) -> bool:
    """Whether there is something to read. Collective for gradients."""
    return kind != GRAD or flush_reductions(place.owner.step, place.fqn)


def _get_full(param: nn.Parameter, kind: str) -> Tensor | None:
    place = _find(param)
    if place is None or not _is_there(place, kind):
        return None
    whole: Tensor = read_whole(place.owner.step, place.fqn, kind).raw.view(param.shape)
    return whole / place.owner.gradient_scale if kind == GRAD else whole


def _get_local(param: nn.Parameter, kind: str) -> Tensor | None:
    place = _find(param)
    if place is None or not _is_there(place, kind):
        return None
    own = fragment(place.owner.step, place.fqn, kind)
    if own is None:
        return torch.empty(0)
    flat = place.owner.step.accelerator.allocate(own.values.numel, own.values.dtype)
    flat.copy_from(own.values)
    values: Tensor = flat.raw if flat.raw.dtype is torch.float64 else flat.raw.float()
    return values / place.owner.gradient_scale if kind == GRAD else values


@torch.no_grad()
def _set_full(param: nn.Parameter, kind: str, value: Tensor) -> None:
    place = _require(param)
    if value.shape != param.shape:
        raise ShardingError(
            f"a value of shape {tuple(value.shape)} cannot be that of parameter {place.fqn!r} of {tuple(param.shape)}",
            hint="pass a value of the parameter's shape",
            value=tuple(value.shape),
        )
    write_whole(place.owner.step, place.fqn, kind, wrap_torch(_scaled(place, kind, value)))
    _note(place, kind)


@torch.no_grad()
def _set_local(param: nn.Parameter, kind: str, value: Tensor) -> None:
    place = _require(param)
    write_fragment(place.owner.step, place.fqn, kind, wrap_torch(_scaled(place, kind, value)))
    _note(place, kind)


def _scaled(place: _Place, kind: str, value: Tensor) -> Tensor:
    factor = place.owner.gradient_scale if kind == GRAD else 1.0
    return (value.detach() * factor if factor != 1.0 else value.detach()).contiguous()


def _note(place: _Place, kind: str) -> None:
    if kind == PARAM:
        place.owner.on_update()
