"""A proof by trial that a torch optimizer may run on a part of the parameters, before it does.

Copies of the optimizer step on small stand-ins of its own parameters, in its own groups: once on all of them, and once
on what two ranks would have, flat slices or whole tensors. Where the weights differ, so would the training.

[Note: Stand-ins of the optimizer trial]
Stand-ins have the parameters' places in the groups, ranks of tensors and attributes, but smaller shapes; a few of each
kind are large enough for the usual thresholds of factored and blocked optimizers. Gradients are random, weights are in
float64, and a learning rate of 0 (the begin of a warmup) is replaced. What an optimizer does after more steps than are
tried is not seen. Nothing of the user's optimizer changes: neither state nor hooks, and no generator moves.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyaccel.errors import ShardingError
from polyaccel.torch.api.whole_optimizers import WHOLE_OPTIMIZERS
from polyaccel.torch.muon.plain import Muon

_log = logging.getLogger(__name__)

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
"""Optimizers of torch whose update of an element depends on that element alone."""

TENSORWISE = frozenset(
    (
        *(Muon, *WHOLE_OPTIMIZERS.values()),
        *(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)),
    )
)
"""Optimizers whose update of a parameter depends on all of that parameter and on no other one. They find their states
in `Optimizer.state` in every step, and nowhere else."""

_LARGE = {1: 300, 2: 136}
"""The longest dimension of a large stand-in by its number of dimensions, 8 for more."""
_SMALL = 3
_MOST = 400
"""So many parameters are tried at most."""
_FEW = 8
"""So many stand-ins, at most two of each kind, are tried over more steps, and so many are large."""
NUMBER_STATES = frozenset({"step", "eta", "mu", "mu_product"})
"""States that torch's optimizers keep once for a parameter. For one without dimensions, the shape does not separate
these from states of its elements."""
_HOOKS = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def check_sliceable(optimizer: torch.optim.Optimizer, *, sharded: bool, allow_untested: bool) -> bool:
    """Return whether `optimizer` runs on slices; else it gets whole parameters, each on one rank where its states are
    `sharded`. Raises ShardingError where neither gives the numbers of all parameters together."""
    if type(optimizer) in ELEMENTWISE:
        return True
    if not sharded or type(optimizer) in TENSORWISE:
        return False
    name = type(optimizer).__name__
    if not allow_untested:
        raise ShardingError(
            f"{name} may update a parameter by what others hold, and ZeRO shares parameters out over ranks",
            hint='use "zero_optimization": {"stage": 0}; if it updates each parameter alone, '
            '"zero_allow_untested_optimizer": true',
            value=name,
        )
    trial = try_on_slices(optimizer)
    if not trial.differs and not trial.untried:
        return True
    alone = try_on_owners(optimizer)
    if alone.differs:
        raise ShardingError(
            f"{name} does not update each parameter alone ({alone.differs}), and ZeRO shares parameters out over ranks",
            hint='use "zero_optimization": {"stage": 0}, or an optimizer whose update of a parameter depends on that '
            "parameter alone",
            value=name,
        )
    if alone.untried:
        _log.warning(
            "%s runs on the parameters of each rank, as zero_allow_untested_optimizer allows; whether it may was not "
            "tried: %s. An optimizer that looks at all parameters trains wrongly there, and stage 0 has all of them",
            *(name, alone.untried),
        )
    else:
        _log.info("%s needs whole parameters (%s): each is updated by the rank that owns it", name, trial.differs)
    return False


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome. `differs`: how parts differ from all parameters together, "" where they do not; `untried`: why
    nothing was tried, "" where it was."""

    differs: str = ""
    untried: str = ""


class _Untried(Exception):
    pass


class _Differs(Exception):
    pass


def try_on_slices(optimizer: torch.optim.Optimizer) -> Trial:
    """Compare copies of `optimizer` on whole stand-ins and on slices of them. See
    [Note: Stand-ins of the optimizer trial]."""
    return _try(optimizer, owned=False)


def try_on_owners(optimizer: torch.optim.Optimizer) -> Trial:
    """Compare copies of `optimizer`, without a past, on all stand-ins and on two ranks that have every other one."""
    return _try(optimizer, owned=True)


def _try(optimizer: torch.optim.Optimizer, *, owned: bool) -> Trial:
    try:
        everyone, few = _stand_ins(optimizer)
        with _generators_kept({each.parameter.device for each in everyone}):
            _compare(optimizer, everyone, 3, owned=owned)
            _compare(optimizer, few, 12, owned=owned)
    except _Differs as found:
        return Trial(differs=str(found))
    except _Untried as found:
        return Trial(untried=str(found))
    return Trial()


@dataclass(frozen=True, slots=True)
class _StandIn:
    """What stands for `parameter`: a tensor of `shape`, of which the first rank has `first` elements. Where ranks own
    whole ones, it is that of `owner`."""

    parameter: Tensor
    shape: tuple[int, ...]
    first: int
    owner: int

    def part(self, rank: int) -> slice:
        """The elements of one of the two ranks."""
        return slice(0, self.first) if rank == 0 else slice(self.first, None)


def _stand_ins(optimizer: torch.optim.Optimizer) -> tuple[list[_StandIn], list[_StandIn]]:
    """Those of all parameters, some of them large, and a few small ones for more steps."""
    found: list[_StandIn] = []
    few: list[_StandIn] = []
    counts: dict[tuple[int, int], int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"][: _MOST - len(found)]:
            kind = (index, parameter.dim())
            count = counts[kind] = counts.get(kind, 0) + 1
            longest = _LARGE.get(parameter.dim(), 8) if count == 1 and len(few) < _FEW else _SMALL
            found.append(_stand_in(parameter, longest, count, len(found) % 2))
            if count <= 2 and len(few) < _FEW:
                few.append(_stand_in(parameter, 2 * _SMALL, count, len(few) % 2))
    if not found:
        raise _Untried("it has no parameters")
    return found, few


def _stand_in(parameter: Tensor, longest: int, count: int, owner: int) -> _StandIn:
    """One whose dimensions are at most `longest`: cut, with the first rank or with the second, by `count`."""
    shape = tuple(min(length, longest) for length in parameter.shape)
    numel = prod(shape)
    return _StandIn(parameter, shape, (numel * 3 // 8 or numel, numel, 0)[(count - 1) % 3], owner)


@contextmanager
def _generators_kept(devices: Collection[torch.device]) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    others = [device for device in devices if device.type not in ("cpu", "meta")]
    kind = {"device_type": others[0].type} if others else {}
    with torch.random.fork_rng(sorted({device.index or 0 for device in others}), **kind):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _compare(optimizer: torch.optim.Optimizer, members: Sequence[_StandIn], steps: int, *, owned: bool) -> None:
    """Raise _Differs where what ranks have moves otherwise than all together, _Untried where that cannot be moved."""
    state, reason, draws = torch.random.get_rng_state(), "", _Draws(members)
    for dtype in (torch.float64, torch.float32):
        try:
            whole = _run(optimizer, draws, steps, dtype, None, owned=owned)
            break
        except _Differs:
            raise
        except Exception as error:
            reason = reason or _brief(error)
    else:
        raise _Untried(f"a copy of it cannot be tried ({reason})")
    if not torch.equal(state, torch.random.get_rng_state()):
        raise _Untried("it draws random numbers")
    try:
        ranks = [_run(optimizer, draws, steps, dtype, rank, owned=owned) for rank in range(2)]
        cut = [[torch.cat(parts) for parts in zip(*both, strict=True)] for both in zip(*ranks, strict=True)]
    except Exception as error:
        raise _Differs(
            f"it fails on {'some parameters alone' if owned else 'flat slices'} ({_brief(error)})"
        ) from error
    start = before = [value.flatten() for value in draws.values(-1, dtype)]
    for wanted, found in zip(whole, cut, strict=True):
        if _are_close(wanted, found, before, dtype):  # all of them at a time
            before = wanted
            continue
        for one, other, past, each in zip(wanted, found, before, members, strict=True):
            # Updates are compared: a small learning rate hides in the weights.
            least = 16 * torch.finfo(dtype).eps * _largest(one)
            if not torch.allclose(other, one, rtol=0.0, atol=1e-4 * _largest(one - past) + least, equal_nan=True):
                shape = tuple(each.parameter.shape)
                what = f"a tensor of shape {shape} moves" if owned else f"slices of a tensor of shape {shape} move"
                raise _Differs(f"{what} otherwise than {'with all others' if owned else 'the whole'}")
        before = wanted
    if all(torch.equal(one, past) for one, past in zip(before, start, strict=True)):
        raise _Untried("a copy of it moves nothing")


def _brief(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _are_close(wanted: list[Tensor], found: list[Tensor], before: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether all tensors are near enough, as `_compare` has it for each. False where one has no finite elements."""
    tensors = [wanted, list(torch._foreach_sub(wanted, before)), list(torch._foreach_sub(found, wanted))]
    if not all(each.numel() for each in wanted):
        return False
    largest, moved, off = (torch.stack(list(torch._foreach_norm(each, torch.inf))) for each in tensors)
    return bool((off <= 1e-4 * moved + 16 * torch.finfo(dtype).eps * largest).all())


class _Draws:
    """Weights and gradients of stand-ins: on the CPU, from separate generators."""

    def __init__(self, members: Sequence[_StandIn]) -> None:
        self.members = members
        self._numels = [prod(member.shape) for member in members]
        self._scales = torch.tensor([0.3 + at % 5 for at in range(len(members))], dtype=torch.float64)
        self._drawn: dict[int, Tensor] = {}

    def values(self, step: int, dtype: torch.dtype) -> list[Tensor]:
        """Weights (`step` -1) or gradients, which nothing else refers to."""
        if step not in self._drawn:
            generator = torch.Generator().manual_seed(7919 * (step + 2))
            drawn = torch.randn(sum(self._numels), generator=generator, dtype=torch.float64)
            scales = self._scales.repeat_interleave(torch.tensor(self._numels)) if step >= 0 else 0.5
            self._drawn[step] = scales * drawn
        flat = self._drawn[step].to(dtype, copy=True)
        parts = zip(flat.split_with_sizes(self._numels), self.members, strict=True)
        return [part.view(each.shape) for part, each in parts]


def _run(
    optimizer: torch.optim.Optimizer, draws: _Draws, steps: int, dtype: torch.dtype, rank: int | None, *, owned: bool
) -> list[list[Tensor]]:
    """The members' weights, flat, after each step of a copy of `optimizer`: the parts of `rank`, or whole ones. Parts
    are whole tensors where they are `owned`, and nothing has a past."""
    tensors: list[tuple[int, _StandIn, Tensor]] = []
    wholes: dict[int, Tensor] = {}
    members, weights = draws.members, draws.values(-1, dtype)
    for at, each in enumerate(members):
        parameter = each.parameter
        value = weights[at].to("cpu" if parameter.device.type == "meta" else parameter.device)
        wholes[id(parameter)] = whole = nn.Parameter(value, requires_grad=parameter.requires_grad)
        vars(whole).update(vars(parameter))
        if rank is None:
            tensors.append((at, each, whole))
        elif owned:
            if each.owner == rank:
                tensors.append((at, each, _bare(whole)))
        elif (own := value.flatten()[each.part(rank)].clone()).numel():
            tensors.append((at, each, own))  # as `ClientOptimizer` has them: bare tensors
    stepped = {id(each.parameter): tensor for _, each, tensor in tensors}
    twin = twin_of(optimizer, wholes, stepped)
    for _, each, tensor in tensors:
        state = optimizer.state.get(each.parameter, {})
        if state and not owned:
            twin.state[tensor] = {name: _state(name, value, each, rank, dtype) for name, value in state.items()}
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step  # hooks of the process stay out
    found: list[list[Tensor]] = []
    now = [torch.zeros(0, dtype=dtype)] * len(members)
    for index in range(steps):
        grads = draws.values(index, dtype)
        for at, each, tensor in tensors:
            if each.parameter.requires_grad:
                grad = grads[at].to(tensor.device)
                tensor.grad = grad if rank is None or owned else grad.flatten()[each.part(rank)]
        with torch.no_grad():
            step(twin)
        for at, _, tensor in tensors:
            now[at] = tensor.detach().flatten().cpu()
        found.append(list(torch.cat(now).split_with_sizes([each.numel() for each in now])))
    return found


def _bare(whole: nn.Parameter) -> Tensor:
    """A copy as `ClientOptimizer` has whole parameters: a bare tensor with the attributes that users gave it."""
    tensor = whole.detach().clone()
    vars(tensor).update({name: value for name, value in vars(whole).items() if not name.startswith(("_", "ds_"))})
    return tensor


def twin_of(
    optimizer: torch.optim.Optimizer, wholes: Mapping[int, Tensor], stepped: Mapping[int, Tensor]
) -> torch.optim.Optimizer:
    """Copy `optimizer` without states and hooks, with `stepped` in groups and `wholes` elsewhere."""
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {**wholes, id(optimizer): twin}
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state", "step")}
    for value in kept.values():
        if isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state()
    hooks: dict[str, Any] = {name: OrderedDict() for name in _HOOKS if name in kept}
    vars(twin).update(copy.deepcopy({name: value for name, value in kept.items() if name not in hooks}, memo), **hooks)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        copied = copy.deepcopy({name: value for name, value in group.items() if name != "params"}, memo)
        if isinstance(copied.get("lr"), (int, float)) and not copied["lr"]:
            copied["lr"] = 1e-2
        copied["params"] = [stepped[id(each)] for each in group["params"] if id(each) in stepped]
        twin.param_groups.append(copied)
    return twin


def _state(name: str, value: Any, each: _StandIn, rank: int | None, dtype: torch.dtype) -> Any:
    """The state that a parameter has already, for its stand-in. Raises _Differs for one that cannot be cut."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and (each.parameter.dim() or name in NUMBER_STATES)):
        return copy.deepcopy(value)
    if value.shape != each.parameter.shape:
        raise _Differs(f"its state {name!r} of shape {tuple(value.shape)} is neither a number nor one for each element")
    small = value.detach()[tuple(slice(0, length) for length in each.shape)].clone()
    small = small.to(dtype) if small.is_floating_point() else small
    return small if rank is None else small.flatten()[each.part(rank)]
