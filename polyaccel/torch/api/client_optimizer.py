"""A torch optimizer of the user's own, run on slices.

While it steps, its parameters are exchanged for views of the master weights: flat slices when its update is
elementwise, tensors of the true shape when it is not (possible only where optimizer states are replicated). At all
other times its groups hold the module's parameters. Its states of a slice's length become views of flat buffers too, so
that checkpoints hold them like those of any other optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import dtype_of, wrap_torch
from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.comm.base import Communicator
from polyaccel.core.types import ReduceOp
from polyaccel.errors import CheckpointError
from polyaccel.ops.base import SCALE
from polyaccel.torch.api.optimizer_proof import NUMBER_STATES
from polyaccel.torch.sharding.row_gradient import sparse_slice
from polyaccel.zero.plan.layout import Slice
from polyaccel.zero.update.optimizers import Group, PeerState, Shard, SliceOptimizer

FAMILIES = {
    torch.optim.Adam: "Adam", torch.optim.AdamW: "Adam", torch.optim.NAdam: "NAdam", torch.optim.RAdam: "RAdam",
    torch.optim.Adagrad: "Adagrad", torch.optim.Adadelta: "Adadelta", torch.optim.Adamax: "Adamax",
    torch.optim.ASGD: "ASGD", torch.optim.RMSprop: "RMSprop", torch.optim.Rprop: "Rprop", torch.optim.SGD: "Sgd",
}  # fmt: skip
"""Whose states each of torch's optimizers continues from, as `PeerState.family` calls it."""

_COMPUTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of torch's optimizers that choose how the same numbers are computed."""


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class StatesByKind:
    """An optimizer's states on one rank, as plain values, by parameter: the element types of those with a value for
    each element, numbers, and the names of the rest."""

    flat: dict[str, dict[str, str]]
    numbers: dict[str, dict[str, float]]
    others: list[tuple[str, str]]


class ClientOptimizer(SliceOptimizer):
    """Adapts `optimizer`, whose groups hold parameters of the module named by `names`."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], *, flat: bool) -> None:
        self.optimizer = optimizer
        self._flat = flat
        self._takes_rows = isinstance(optimizer, torch.optim.SparseAdam)
        self._names = names
        self._places: dict[tuple[int, str], tuple[Slice, Tensor]] = {}
        self._shards: dict[int, Shard] = {}
        self._members: list[list[Tensor]] = []
        """For each group, what stands for its parameters on this rank while the optimizer steps."""
        self._member_names: list[list[str]] = []
        self._resting: dict[Tensor, dict[str, Any]] = {}
        """The states that frozen parameters had, until they are trained."""

    @property
    def kind(self) -> str:
        """The optimizer's class, and whether it steps on slices: states go over to an optimizer of the same kind."""
        name = f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}"
        return f"{name} on {'slices' if self._flat else 'whole parameters'}"

    def adopt_groups(self, peer: PeerState) -> list[dict[str, Any]]:
        """Return the saved groups. An optimizer that is not torch's own continues from one with the same settings."""
        peer.require(self.kind, fits=self._flat)
        known = self.optimizer.defaults.keys()
        family = FAMILIES.get(type(self.optimizer))
        if family is None:
            theirs = [group.keys() - _COMPUTATION - {"initial_lr"} for group in peer.groups]
            peer.require(self.kind, fits=all(keys == known - _COMPUTATION for keys in theirs))
        else:
            peer.require(self.kind, fits=peer.family == family)
        peer.require_known(known, self.kind)
        wanted = {"initial_lr", *known} - _COMPUTATION
        groups = [{key: value for key, value in group.items() if key in wanted} for group in peer.groups]
        if "max_exp_avg_sq" not in peer.states and "exp_avg_sq" in peer.states:
            default = self.optimizer.defaults.get("amsgrad")
            peer.require(f"{self.kind} with amsgrad", fits=not any(each.get("amsgrad", default) for each in groups))
        return groups

    @property
    def evaluates(self) -> bool:
        """Return whether the optimizer reevaluates its closure, as LBFGS does, on the module's parameters."""
        return needs_closure(self.optimizer)

    def minimise(self, closure: Callable[[], Any], communicator: Communicator) -> Any:
        """One step of an optimizer that `evaluates`, every time with the mean loss of all ranks. Collective."""

        def evaluate() -> Tensor:
            with torch.enable_grad():
                loss = torch.as_tensor(closure()).detach()
            mean = loss.float().reshape(1).clone()
            communicator.all_reduce(wrap_torch(mean), ReduceOp.AVG, label="loss of a closure")
            return mean[0]

        return self.optimizer.step(evaluate)  # type: ignore[arg-type]

    def bind(self, shards: Sequence[Shard]) -> None:
        """Bind the shards' master views to parameters and cut the states there; tiers are resident."""
        self._shards = {shard.bucket.index: shard for shard in shards}
        parameters = {fqn: parameter for parameter, fqn in self._names.items()}
        earlier = self._resting | dict(self.optimizer.state)
        self.optimizer.state.clear()
        views: dict[str, Tensor] = {}
        for shard in shards:
            for piece in shard.slices:
                view = shard.master.view(piece.shard_offset, piece.length).raw
                parameter = parameters[piece.fqn]
                tensor = view if self._flat else _as_whole(view, parameter)
                if self.evaluates:
                    tensor = parameter
                if parameter in earlier:
                    self.optimizer.state[tensor] = _cut_state(earlier[parameter], parameter, piece, self._flat)
                views[piece.fqn] = tensor  # a parameter has one slice at most in a shard, and one bucket
                self._places[(shard.bucket.index, piece.fqn)] = (piece, tensor)
            self._adopt_states(shard)
        self._resting = {one: state for one, state in earlier.items() if self._names.get(one) not in views}
        for group in self.optimizer.param_groups:
            names = [self._names[parameter] for parameter in group["params"]]
            self._members.append([views[name] for name in names if name in views])
            self._member_names.append([name for name in names if name in views])

    def rebind(self, shards: Sequence[Shard]) -> None:
        """Continue with other shards; whole states move along, slices are left to `restore`."""
        parameters = {fqn: parameter for parameter, fqn in self._names.items()}
        state = self.optimizer.state
        kept = {} if self._flat else {parameters[fqn]: state.pop(tensor, {}) for fqn, tensor in self._tensors()}
        state.clear()
        state.update({parameter: values for parameter, values in kept.items() if values})
        self._places.clear()
        self._members.clear()
        self._member_names.clear()
        self.bind(shards)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What stands for each parameter on this rank while the optimizer steps."""
        yield from ((fqn, tensor) for (_, fqn), (_, tensor) in self._places.items())

    @contextmanager
    def _on_slices(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold this rank's slices instead of the module's parameters."""
        groups = self.optimizer.param_groups
        originals = [group["params"] for group in groups]
        for group, members in zip(groups, self._members, strict=True):
            group["params"] = members
        try:
            yield
        finally:
            for group, parameters in zip(groups, originals, strict=True):
                group["params"] = parameters

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        ready = []
        for shard in shards:  # one step for all of them, which is why `bind` asks for resident tiers
            ready.append(shard)
            assert shard.grad is not None  # set by the step
            reduced = grad = shard.grad
            is_staged = shard.tier.compute is not communicator.accelerator  # in memory that the next shard uses
            if is_staged or grad.dtype is not shard.master.dtype:
                grad = shard.tier.compute.allocate(shard.master.numel, shard.master.dtype)
                grad.copy_from(reduced)
            if grad_scale != 1.0:
                shard.kernels[SCALE](grad, grad_scale)
            for piece in shard.slices:
                _, tensor = self._places[(shard.bucket.index, piece.fqn)]
                view = grad.view(piece.shard_offset, piece.length).raw.view(tensor.shape)
                if self._takes_rows:
                    view = sparse_slice(view, piece, shard)
                tensor.grad = view if shard.updates(piece) else None
        with self._on_slices():
            self.optimizer.step()
        for shard in ready:
            self._adopt_states(self._shards[shard.bucket.index])
            for piece in shard.slices:
                self._places[(shard.bucket.index, piece.fqn)][1].grad = None
            for run in shard.runs:
                shard.write_params(run)
            yield shard

    def _adopt_states(self, shard: Shard) -> None:
        """Move states as long as their slice into flat buffers of the shard, once, and leave views in their place."""
        if not self._flat:
            return
        for piece in shard.slices:
            _, tensor = self._places[(shard.bucket.index, piece.fqn)]
            state = self.optimizer.state.get(tensor, {})
            for name, value in state.items():
                if _is_elementwise(name, value, piece.length, tensor):
                    held = shard.states.get(name) or shard.allocate_state(name, dtype_of(value.dtype))
                    view = held.view(piece.shard_offset, piece.length)
                    if value.data_ptr() != view.data_ptr():
                        view.raw.copy_(value)
                        state[name] = view.raw

    def whole_state(self) -> bytes | None:
        """Serialise states that cannot be cut, numbered by `names`; None when all are flat."""
        if self._flat:
            return None
        with self._on_slices():
            state = self.optimizer.state_dict()
        return packed({**state, "names": list(chain.from_iterable(self._member_names))}, "the state of the optimizer")

    def check_whole_state(self, data: bytes) -> None:
        """Raise CheckpointError for what `load_whole_state` could not take over."""
        self._renumbered(data)

    def load_whole_state(self, data: bytes) -> None:
        """Take over the states that `whole_state` gave; the hyperparameters stay as they are."""
        state = self._renumbered(data)
        groups = self.optimizer.param_groups
        with self._on_slices():
            self.optimizer.load_state_dict(state)
        self.optimizer.param_groups = groups  # torch made new ones, which schedules would not refer to

    def _renumbered(self, data: bytes) -> dict[str, Any]:
        """Return `whole_state`'s result with this run's numbers. Raises CheckpointError."""
        state = unpacked(data, "the state of the optimizer")
        try:
            saved = [len(group["params"]) for group in state["param_groups"]]
            states = dict(state["state"])
            names = state.get("names")
            if not all(isinstance(each, dict) for each in states.values()):
                raise ValueError("a state is not a dict")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the saved state of the optimizer is none: {error!r}", hint="load another tag"
            ) from error
        ours = list(chain.from_iterable(self._member_names))
        if names is None:  # saved before names were: by position
            names = ours if saved == [len(each) for each in self._member_names] else []
        if sorted(names) != sorted(ours):
            only = sorted(set(names) ^ set(ours))
            raise CheckpointError(
                f"the saved optimizer has groups of {saved} parameters, this one of "
                f"{[len(each) for each in self._member_names]}; only one of both has {', '.join(only[:8])}",
                hint="build the same groups and freeze the same layers, or load another tag",
                value=saved,
            )
        numbers = {name: number for number, name in enumerate(names)}
        with self._on_slices():
            own = self.optimizer.state_dict()["param_groups"]
        renumbered = {number: states[numbers[name]] for number, name in enumerate(ours) if numbers[name] in states}
        return {"state": renumbered, "param_groups": own}

    def holds(self, shard: Shard, fqn: str, name: str) -> bool:
        """Whether the parameter has state `name` in the shard: none before its first update, whatever others have."""
        _, tensor = self._places[(shard.bucket.index, fqn)]
        return name in self.optimizer.state.get(tensor, {})

    def _numbers(self) -> dict[str, dict[str, float]]:
        """States of one number each, for example step counts, by parameter name."""
        found: dict[str, dict[str, float]] = {}
        for fqn, tensor in self._tensors():
            numbers = {name: _number(value) for name, value in self.optimizer.state.get(tensor, {}).items()}
            found[fqn] = {name: number for name, number in numbers.items() if number is not None}
        return {fqn: numbers for fqn, numbers in found.items() if numbers}

    def states_by_kind(self) -> StatesByKind:
        """The states of the slices on this rank; none of an optimizer on whole parameters, which keeps its own."""
        flat, others = dict[str, dict[str, str]](), list[tuple[str, str]]()
        if not self._flat:
            return StatesByKind({}, {}, [])
        for (index, fqn), (_, tensor) in self._places.items():
            shard = self._shards[index]
            for name, value in self.optimizer.state.get(tensor, {}).items():
                if name in shard.states:
                    flat.setdefault(fqn, {})[name] = shard.states[name].dtype.value
                elif value is not None and _number(value) is None:
                    others.append((fqn, name))
        return StatesByKind(flat, self._numbers(), others)

    def states_of_wholes(self) -> dict[str, Mapping[str, Any]]:
        """The states of an optimizer on whole parameters, by parameter; none of one on slices."""
        return {} if self._flat else {fqn: self.optimizer.state.get(tensor, {}) for fqn, tensor in self._tensors()}

    def restore(
        self,
        shards: Sequence[Shard],
        scalars: Mapping[str, Mapping[str, float]],
        is_saved: Callable[[str, str], bool],
        names: Collection[str] | None = None,
    ) -> None:
        """Point states at the shards' loaded buffers; `is_saved(fqn, name)` decides which, for `names`."""
        if not self._flat:
            return
        for shard in shards:
            for piece in shard.slices:
                if names is not None and piece.fqn not in names:
                    continue
                _, tensor = self._places[(shard.bucket.index, piece.fqn)]
                state: dict[str, Any] = {
                    name: torch.tensor(number, dtype=torch.float32)
                    for name, number in scalars.get(piece.fqn, {}).items()
                }
                for name, buffer in shard.states.items():
                    if is_saved(piece.fqn, name):
                        state[name] = buffer.view(piece.shard_offset, piece.length).raw
                self.optimizer.state.pop(tensor, None)
                if state:
                    self.optimizer.state[tensor] = state


def _as_whole(view: Tensor, parameter: nn.Parameter) -> Tensor:
    """A view of a whole parameter's master weights, with the attributes that users gave the parameter."""
    tensor = view.view(parameter.shape)
    vars(tensor).update({name: value for name, value in vars(parameter).items() if not name.startswith(("_", "ds_"))})
    return tensor


def _cut_state(state: dict[str, Any], parameter: Tensor, piece: Slice, flat: bool) -> dict[str, Any]:
    """The part of a parameter's present state that belongs to a slice of it."""
    if not flat:
        return dict(state)
    end = piece.start + piece.length
    return {
        name: value.detach().flatten()[piece.start : end].clone()
        if _is_elementwise(name, value, parameter.numel(), parameter)
        else value
        for name, value in state.items()
    }


def _is_elementwise(name: str, value: Any, numel: int, parameter: Tensor) -> bool:
    """Whether a state has one value for each of the `numel` elements of `parameter`, or of a slice of it."""
    if not isinstance(value, Tensor) or value.numel() != numel:
        return False
    return value.dim() > 0 or (parameter.dim() == 0 and name not in NUMBER_STATES)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor) and value.dim() == 0:
        return float(value)
    return None
