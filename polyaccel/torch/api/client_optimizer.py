"""A torch optimizer of the user's own, run on slices or on the whole parameters that this rank owns.

While it steps, its parameters are exchanged for views of the master weights: flat slices when its update is
elementwise, tensors of the true shape when it is not. Of these each rank has those that the layout gives it
([Note: Uneven shards]), or all where optimizer states are replicated. At all other times its groups hold
the module's parameters. Its states of a slice's length become views of flat buffers too, so that checkpoints hold them
like those of any other optimizer. Those of whole parameters have any shape: they stay with the optimizer, unless it is
known to look at `optimizer.state` alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import dtype_of, wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.core.types import ParamSpec, ReduceOp
from polyaccel.errors import CheckpointError, ShardingError
from polyaccel.ops.base import SCALE
from polyaccel.torch.api.optimizer_proof import NUMBER_STATES, TENSORWISE, try_on_slices
from polyaccel.torch.api.whole_states import StatesByKind, pack_states, unpack_states
from polyaccel.torch.sharding.row_gradient import sparse_slice
from polyaccel.zero.plan.layout import WHOLE, Granule, Slice
from polyaccel.zero.plan.policy import ENGINE_STATES
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


class ClientOptimizer(SliceOptimizer):
    """Adapts `optimizer`, whose groups hold parameters of the module named by `names`. It sees those of `whole` as they
    are, and slices of the rest. `is_sharded`: ranks share the states out."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[nn.Parameter, str],
        *,
        whole: Collection[str],
        is_sharded: bool,
    ) -> None:
        self.optimizer = optimizer
        self._whole = frozenset(whole)
        self.is_sharded = is_sharded
        self._moves_states = type(optimizer) in TENSORWISE
        """States of whole parameters become views of flat buffers where they can."""
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
        return f"{name} on {'whole parameters' if self._whole else 'slices'}"

    def granules(self, params: Sequence[ParamSpec]) -> Mapping[str, Granule]:
        cut = [param.fqn for param in params if param.fqn in self._whole and param.trainable and param.cut]
        may_be_cut = not self.is_sharded and not self._moves_states and not self.evaluates
        if cut and not (may_be_cut and not try_on_slices(self.optimizer).differs):
            raise ShardingError(
                f"{type(self.optimizer).__name__} updates whole parameters, and {cut[0]!r} is cut over ranks by its "
                "shape",
                hint="leave tensor and expert parallelism out, or use an optimizer whose update is elementwise",
                value=cut[0],
            )
        return dict.fromkeys(self._whole, WHOLE)

    def adopt_groups(self, peer: PeerState) -> list[dict[str, Any]]:
        """Return the saved groups. An optimizer that is not torch's own continues from one with the same settings."""
        peer.require(self.kind, fits=not self._whole)
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
        shapes = {slot.param.fqn: slot.param.shape for shard in shards for slot in shard.bucket.slots}
        parameters = {fqn: parameter for parameter, fqn in self._names.items()}
        earlier = self._resting | dict(self.optimizer.state)
        self.optimizer.state.clear()
        views: dict[str, Tensor] = {}
        for shard in shards:
            for piece in shard.slices:
                view = shard.master.view(piece.shard_offset, piece.length).raw
                parameter = parameters[piece.fqn]
                is_whole = piece.fqn in self._whole
                tensor = _as_whole(view, parameter, shapes[piece.fqn]) if is_whole else view
                if self.evaluates:
                    tensor = parameter
                if parameter in earlier:
                    own = earlier[parameter]
                    self.optimizer.state[tensor] = dict(own) if is_whole else _cut_state(own, parameter, piece)
                views[piece.fqn] = tensor  # a parameter has one slice at most in a shard, and one bucket
                self._places[(shard.bucket.index, piece.fqn)] = (piece, tensor)
            self._adopt_states(shard)
        self._resting = {one: state for one, state in earlier.items() if self._names.get(one) not in shapes}
        for group in self.optimizer.param_groups:
            names = [self._names[parameter] for parameter in group["params"]]
            self._members.append([views[name] for name in names if name in views])
            self._member_names.append([name for name in names if name in views])

    def rebind(self, shards: Sequence[Shard]) -> None:
        """Continue with other shards; whole states move along, slices are left to `restore`."""
        parameters = {fqn: parameter for parameter, fqn in self._names.items()}
        state = self.optimizer.state
        moved = [] if self.is_sharded else [each for each in self._tensors() if each[0] in self._whole]
        kept = {parameters[fqn]: state.pop(tensor, {}) for fqn, tensor in moved}
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
        for piece in shard.slices:
            _, tensor = self._places[(shard.bucket.index, piece.fqn)]
            state = self.optimizer.state.get(tensor, {})
            for name, value in state.items():
                if self._may_move(shard, piece, name, value, tensor):
                    held = shard.states.get(name) or shard.allocate_state(name, dtype_of(value.dtype))
                    view = held.view(piece.shard_offset, piece.length).raw
                    if value.data_ptr() != view.data_ptr():
                        view = view.view(tensor.shape) if piece.fqn in self._whole else view
                        view.copy_(value)
                        state[name] = view

    def _may_move(self, shard: Shard, piece: Slice, name: str, value: Any, tensor: Tensor) -> bool:
        """Whether a state of a slice stands in a flat buffer of the shard, or may move there."""
        if not _is_elementwise(name, value, piece.length, tensor):
            return False
        if piece.fqn not in self._whole:
            return True
        held = shard.states.get(name)
        fits = value.shape == tensor.shape and value.is_floating_point()
        return self._moves_states and fits and (held is None or held.dtype is dtype_of(value.dtype))

    def whole_state(self) -> bytes | None:
        """Serialise the states of this rank's whole parameters that are in no flat buffer, by name; None where all
        are."""
        if not self._whole:
            return None
        return pack_states({fqn: self._kept_states(place) for fqn, place in self._wholes()})

    def saves_whole_states(self, rank: int) -> bool:
        """Whether `rank`, this one among those of the parameters, has states of whole parameters to save."""
        return self.is_sharded or rank == 0

    def _wholes(self) -> Iterator[tuple[str, tuple[int, Slice, Tensor]]]:
        """This rank's whole parameters, each with its bucket, place and tensor."""
        for (index, fqn), (piece, tensor) in self._places.items():
            if fqn in self._whole:
                yield fqn, (index, piece, tensor)

    def _kept_states(self, place: tuple[int, Slice, Tensor]) -> dict[str, Any]:
        """The states of a whole parameter that are in no flat buffer."""
        index, piece, tensor = place
        state, shard = self.optimizer.state.get(tensor, {}), self._shards[index]
        return {name: value for name, value in state.items() if not self._may_move(shard, piece, name, value, tensor)}

    def check_whole_state(self, blobs: Sequence[bytes]) -> None:
        """Raise CheckpointError for what `load_whole_state` could not take over."""
        self._saved_states(blobs)

    def load_whole_state(self, blobs: Sequence[bytes]) -> None:
        """Take over the states that `whole_state` gave on all ranks, next to those in flat buffers; the hyperparameters
        stay as they are."""
        self.take_whole_states(self._saved_states(blobs))

    def take_whole_states(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over states of this rank's whole parameters, by parameter, next to those in flat buffers."""
        groups = self.optimizer.param_groups
        with self._on_slices():
            state = self.optimizer.state_dict()
            tensors = [tensor for group in groups for tensor in group["params"]]
            numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
            for fqn, (_, _, tensor) in self._wholes():
                values = {**state["state"].get(numbers[id(tensor)], {}), **found.get(fqn, {})}
                if values:
                    state["state"][numbers[id(tensor)]] = values
            self.optimizer.load_state_dict(state)
        self.optimizer.param_groups = groups  # torch made new ones, which schedules would not refer to
        for shard in self._shards.values():
            self._adopt_states(shard)

    def _saved_states(self, blobs: Sequence[bytes]) -> dict[str, dict[str, Any]]:
        """The states in `whole_state`'s results of all ranks. Raises CheckpointError unless they are of the same
        parameters as this run's."""
        found = unpack_states(blobs)
        trained = {slot.param.fqn for shard in self._shards.values() for slot in shard.bucket.slots if slot.param.numel}
        ours = trained & self._whole
        if only := sorted(ours - found.keys()):
            raise CheckpointError(
                f"the saved optimizer has states of {len(found)} parameters, this one of {len(ours)}; "
                f"only this one has {', '.join(only[:8])}",
                hint="build the same groups and freeze the same layers, or load another tag",
                value=only,
            )
        return found

    def holds(self, shard: Shard, fqn: str, name: str) -> bool:
        """Whether the parameter has state `name` in the shard: none before its first update, whatever others have."""
        _, tensor = self._places[(shard.bucket.index, fqn)]
        return name in self.optimizer.state.get(tensor, {})

    def _numbers(self) -> dict[str, dict[str, float]]:
        """States of one number each, for example step counts, by parameter name."""
        found: dict[str, dict[str, float]] = {}
        for fqn, tensor in self._tensors():
            if fqn in self._whole:
                continue
            numbers = {name: _number(value) for name, value in self.optimizer.state.get(tensor, {}).items()}
            found[fqn] = {name: number for name, number in numbers.items() if number is not None}
        return {fqn: numbers for fqn, numbers in found.items() if numbers}

    def states_by_kind(self) -> StatesByKind:
        """The states on this rank, except for those of whole parameters that every rank keeps for itself."""
        flat, others = dict[str, dict[str, str]](), list[tuple[str, str]]()
        for (index, fqn), (_, tensor) in self._places.items():
            shard = self._shards[index]
            if fqn in self._whole and not self._moves_states:
                continue
            for name, value in self.optimizer.state.get(tensor, {}).items():
                if name in shard.states:
                    flat.setdefault(fqn, {})[name] = shard.states[name].dtype.value
                elif value is not None and _number(value) is None and fqn not in self._whole:
                    others.append((fqn, name))
        kept = [(fqn, name) for fqn, place in self._wholes() for name in self._kept_states(place)]
        return StatesByKind(flat, self._numbers(), others, kept if self.is_sharded else [])

    def states_of_wholes(self) -> dict[str, Mapping[str, Any]]:
        """The states of this rank's whole parameters, by parameter."""
        return {fqn: self.optimizer.state.get(tensor, {}) for fqn, (_, _, tensor) in self._wholes()}

    def restore(
        self,
        shards: Sequence[Shard],
        scalars: Mapping[str, Mapping[str, float]],
        is_saved: Callable[[str, str], bool],
        names: Collection[str] | None = None,
    ) -> None:
        """Point states at the shards' loaded buffers; `is_saved(fqn, name)` decides which. Given `names`, those alone,
        and states of whole parameters that are in no buffer stay."""
        for shard in shards:
            for piece in shard.slices:
                is_whole = piece.fqn in self._whole
                if (names is not None and piece.fqn not in names) or (is_whole and not self._moves_states):
                    continue
                _, tensor = self._places[(shard.bucket.index, piece.fqn)]
                state: dict[str, Any] = {
                    name: torch.tensor(number, dtype=torch.float32)
                    for name, number in scalars.get(piece.fqn, {}).items()
                }
                if is_whole and names is not None:
                    state = self._kept_states((shard.bucket.index, piece, tensor))
                for name, buffer in shard.states.items():
                    if name not in ENGINE_STATES and is_saved(piece.fqn, name):
                        view = buffer.view(piece.shard_offset, piece.length).raw
                        state[name] = view.view(tensor.shape) if is_whole else view
                self.optimizer.state.pop(tensor, None)
                if state:
                    self.optimizer.state[tensor] = state


def _as_whole(view: Tensor, parameter: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    """A view of a whole parameter's master weights, with the attributes that users gave the parameter."""
    tensor = view.view(shape)
    vars(tensor).update({name: value for name, value in vars(parameter).items() if not name.startswith(("_", "ds_"))})
    return tensor


def _cut_state(state: dict[str, Any], parameter: Tensor, piece: Slice) -> dict[str, Any]:
    """The part of a parameter's present state that belongs to a slice of it."""
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
