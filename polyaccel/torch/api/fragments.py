"""Full-precision values, gradients and optimizer states of one parameter, for debuggers and custom training loops.

`safe_get_full_*` read and `safe_set_full_*` write a whole tensor; the local variants work on this rank's part, flat:
its slice, possibly empty, or all of it if optimizer states are replicated. The names are DeepSpeed's.

`safe_get_full_*` are collective if anything is sharded: every rank calls them for the same parameters in the same
order. Results are copies in float32 (float64 if the state is that), or None for a parameter without an engine.
`safe_set_full_*` exchange nothing.

Gradients exist between `backward` and `step` at the accumulation boundary (at stages 2 and 3 after each backward pass),
averaged over ranks and micro-batches and without loss scale.

Every function raises ShardingError for an unknown state. The functions that write also raise it for another shape and
for a parameter without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.ownership import ParameterOwner, record_of
from polyaccel.zero.fragments import (
    GRAD,
    PARAM,
    flush_reductions,
    fragment,
    read_whole,
    state_names,
    write_fragment,
    write_whole,
)


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole parameter in full precision, from its master weights. Collective.

    Args:
        param: Parameter of an engine's module.

    Returns:
        Copy of the parameter's shape; None for a parameter without an engine.
    """
    return _get_full(param, PARAM)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient. Collective.

    Args:
        param: Parameter of an engine's module.

    Returns:
        Copy of the parameter's shape; None without an engine or without a gradient yet.
    """
    return _get_full(param, GRAD)


def unreduced_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient that has accumulated on this rank and was not reduced over the others yet.

    Args:
        param: Parameter of an engine's module.

    Returns:
        Copy of the parameter's shape; None without an engine, and where nothing waits for a reduction.
    """
    place = _find(param)
    if place is None:
        return None
    gradients, index = place.owner.step.reducer.gradients_of(place.fqn)
    summed = gradients.unreduced(index)
    if summed is None:
        return None
    values: Tensor = summed.raw.detach().view(param.shape)
    wide = values.clone() if values.dtype is torch.float64 else values.to(torch.float32, copy=True)
    return wide / place.owner.gradient_scale


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state. Collective.

    Args:
        param: Parameter of an engine's module.
        optim_state_key: Name of the state in `torch.optim`, such as `exp_avg`.

    Returns:
        Copy of the parameter's shape; None for a parameter without an engine.
    """
    return _get_full(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the parameter: its master weights, and the values that it computes with.

    Args:
        param: Parameter of an engine's module.
        value: Tensor of the parameter's shape, equal on all ranks, and converted to the dtype in use.
    """
    _set_full(param, PARAM, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the gradient that the next update uses.

    Args:
        param: Parameter of an engine's module.
        value: Tensor of the parameter's shape, equal on all ranks, and converted to the dtype in use.

    Raises:
        PolyaccelError: There is no gradient yet.
    """
    _set_full(param, GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite an optimizer state.

    Args:
        param: Parameter of an engine's module.
        value: Tensor of the parameter's shape, equal on all ranks, and converted to the dtype in use.
        optim_state_key: Name of the state in `torch.optim`, such as `exp_avg`.
    """
    _set_full(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the parameter in full precision.

    Args:
        param: Parameter of an engine's module.

    Returns:
        Flat copy; None for a parameter without an engine.
    """
    return _get_local(param, PARAM)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the gradient. Collective, for the gradient may still have to be reduced.

    Args:
        param: Parameter of an engine's module.

    Returns:
        Flat copy; None without an engine or without a gradient yet.
    """
    return _get_local(param, GRAD)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state.

    Args:
        param: Parameter of an engine's module.
        optim_state_key: Name of the state in `torch.optim`, such as `exp_avg`.

    Returns:
        Flat copy; None for a parameter without an engine.
    """
    return _get_local(param, optim_state_key)


def local_optimizer_state(param: nn.Parameter) -> dict[str, Any]:
    """Return what this rank has of all optimizer states of a parameter, as torch's optimizers keep it.

    Args:
        param: Parameter of an engine's module.

    Returns:
        Copies by name, flat where they are a part of the parameter, and the number of updates as `step`. Empty before
        the first update, and for a parameter without an engine.
    """
    place = _find(param)
    updates = 0 if place is None else place.owner.step.params.steps.get(place.fqn, 0)
    if place is None or not updates:
        return {}
    found: dict[str, Any] = {"step": updates}
    for name in state_names(place.owner.step, place.fqn):
        values = _get_local(param, name)
        if values is not None:
            found[name] = values.view(param.shape) if values.numel() == param.numel() else values
    return found


def set_local_optimizer_state(param: nn.Parameter, state: Mapping[str, Any]) -> None:
    """Overwrite what `local_optimizer_state` returns.

    Args:
        param: Parameter of an engine's module.
        state: Tensors by name, and the number of updates as `step`.
    """
    place = _require(param)
    for name, value in state.items():
        if name == "step":
            place.owner.step.params.steps[place.fqn] = int(value)
        else:
            _set_local(param, name, value.reshape(-1))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's part of the parameter. Collective: stages 1 and 2 all-gather the parts again.

    Args:
        param: Parameter of an engine's module.
        value: Flat tensor with the elements of this rank's part.
    """
    _set_local(param, PARAM, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's part of the gradient that the next update uses.

    Args:
        param: Parameter of an engine's module.
        value: Flat tensor with the elements of this rank's part.

    Raises:
        PolyaccelError: There is no gradient yet.
    """
    _set_local(param, GRAD, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's part of an optimizer state.

    Args:
        param: Parameter of an engine's module.
        value: Flat tensor with the elements of this rank's part.
        optim_state_key: Name of the state in `torch.optim`, such as `exp_avg`.
    """
    _set_local(param, optim_state_key, value)


_PLAIN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What gives a kind of tensor of a parameter that plain torch trains, in a run of a verification."""


def serve_plain(parameter: nn.Parameter, tensor_of: Callable[[str], Tensor | None]) -> None:
    """Let all functions here answer for a parameter that has no engine.

    Args:
        parameter: The parameter, of any shape.
        tensor_of: Returns the tensor of a kind (`"grad"`, or the name of an optimizer state), None where there is none.
    """
    _PLAIN[parameter] = tensor_of


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


def _plain(param: nn.Parameter, kind: str) -> Tensor | None:
    """A copy of what plain torch has of a parameter."""
    found = _PLAIN[param](kind) if param in _PLAIN else None
    return None if found is None else found.detach().clone()


def _get_full(param: nn.Parameter, kind: str, *, may_be_view: bool = False) -> Tensor | None:
    if param in _PLAIN:
        return _plain(param, kind)
    place = _find(param)
    if place is None or not _is_there(place, kind):
        return None
    whole: Tensor = read_whole(place.owner.step, place.fqn, kind, may_be_view=may_be_view).raw.view(param.shape)
    scale = place.owner.gradient_scale
    return whole / scale if kind == GRAD and scale != 1 else whole


def peek_full(param: nn.Parameter, kind: str) -> Tensor | None:
    """Read what `safe_get_full_*` read, without a copy where the engine has it whole. Collective.

    Args:
        param: Parameter of an engine's module.
        kind: `PARAM`, `GRAD` or a name of an optimizer state.

    Returns:
        Values in the parameter's shape, on any device, valid until the next update. None if there are none.
    """
    return _get_full(param, kind, may_be_view=True)


def _get_local(param: nn.Parameter, kind: str) -> Tensor | None:
    if param in _PLAIN:
        return None if (found := _plain(param, kind)) is None else found.reshape(-1)
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
    if param in _PLAIN:
        _set_plain(param, kind, value)
        return
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
    if param in _PLAIN:
        _set_plain(param, kind, value)
        return
    place = _require(param)
    write_fragment(place.owner.step, place.fqn, kind, wrap_torch(_scaled(place, kind, value)))
    _note(place, kind)


def _set_plain(param: nn.Parameter, kind: str, value: Tensor) -> None:
    target = _PLAIN[param](kind)
    if target is None:
        raise ShardingError(f"the parameter has no {kind!r} now", hint="set it after the first step", value=kind)
    target.detach().copy_(value.view(target.shape))


def _scaled(place: _Place, kind: str, value: Tensor) -> Tensor:
    factor = place.owner.gradient_scale if kind == GRAD else 1.0
    return (value.detach() * factor if factor != 1.0 else value.detach()).contiguous()


def _note(place: _Place, kind: str) -> None:
    if kind == PARAM:
        place.owner.on_update()
