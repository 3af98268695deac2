"""A model that was not written for a pipeline, of which a stage has some blocks: its own forward pass runs on every
stage.

[Note: Full forward pass per stage]
Every stage calls the whole model with the micro-batch's own inputs. So the inputs of blocks other than the values of
the block before (masks, positions, rotary embeddings, flags) is computed where it is needed, by the model itself, and
never sent; and nothing must be known of how the model calls its blocks. In the places of blocks that are elsewhere
stand modules without parameters: those before the stage's first block give what the stage before has sent, in the very
structure in which its last block gave it, and the first one behind the stage's last block ends the pass. What the model
computes before its blocks is computed on every stage: that is little next to the blocks.

[Note: Parameter stand-ins]
Where a parameter belongs to another stage, a tensor of its shape stands in for it, all of whose elements are one: NaN.
It takes no memory, and shapes, types and masks come out as if it were the parameter. The trial (see `trial`) has found
which parameters reach the blocks of this stage otherwise than through what is sent; they are shared like tied weights,
with the first stage that uses them as their owner. Had it missed one, the loss would be
NaN, and not a number that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.partition import layer_weights, split_layers
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.pipeline.blocks import BlockList, find_block_lists
from polyaccel.torch.pipeline.module import TiedModule
from polyaccel.torch.pipeline.trace import ModelTrace, trace_first
from polyaccel.torch.sharding.units import has_units, set_parts, set_units

_OWN_OF_MODULES = frozenset(vars(nn.Module())) | {"forward"}
_NAN = float("nan")
_CHANGES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


class StageModule:
    """`model`, of which this stage keeps the blocks of its chunks, and what else of it the stage owns.

    `placement` is the stage of each chunk, in the order in which a micro-batch passes them. `partition_method` as in
    the config's section `pipeline`: the first block weighs as much as it and what comes before, the last as it and what
    comes after. `weigh` gives for "profiled" what the blocks of a model weigh; `numels` how many elements a rank will
    have of each parameter, where those are not its own. Raises PipelineError for a model that cannot be cut, naming the
    place.
    """

    schedule: str | None = None
    chunks: int = 0

    def __init__(
        self,
        model: nn.Module,
        placement: Sequence[int],
        stage: int,
        partition_method: str,
        weigh: Callable[[nn.Module, BlockList], Sequence[float]] | None = None,
        numels: Mapping[str, int] | None = None,
    ) -> None:
        self.placement, self.stage, self.num_stages = tuple(placement), stage, max(placement) + 1
        self.loss_fn: Callable[..., Any] | None = getattr(model, "loss_fn", None)
        self.model = model
        blocks, trial = trace_first(model, find_block_lists(model))
        self.names = blocks.names
        """The full names of all blocks."""
        self._list = blocks.modules
        self._outputs = trial.outputs
        if weigh is not None and partition_method.lower() == "profiled":
            weights = weigh(model, blocks)
        else:
            weights = self._weights(trial, partition_method, numels or {})
        self.parts = split_layers(weights, len(self.placement))
        """The blocks of each chunk."""
        self.stages = tuple(stage for stage, part in zip(self.placement, self.parts, strict=True) for _ in part)
        """The stage of each block."""
        self.ties: dict[str, TiedModule] = {}
        """The parameters of this stage that others use too, by name."""
        self._standing_in: list[tuple[nn.Module, str, Tensor]] = []
        self._pass: _Pass | None = None
        self._own = {
            index: block
            for index, (block, at) in enumerate(zip(self._list.children(), self.stages, strict=True))
            if at == stage
        }
        self._others = [_RemoteBlock(self, index, block) for index, block in enumerate(self._list.children())]
        self._let_go_of_parameters(trial)
        self.foreign_buffers: set[str] = set()
        """Buffers that another stage saves."""
        self._let_go_of_buffers()
        self._let_go_of_blocks()
        model.__dict__["forward"] = _StageForward(self, model.forward)

    def parameters(self) -> Iterator[Tensor]:
        """The parameters that this stage owns."""
        return self.model.parameters()

    def last_layer_of(self, chunk: int) -> str:
        """The last block of a chunk of the model, by its full name."""
        return self.names[self.parts[chunk].stop - 1]

    def place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Let what stands in for parameters be on `device`, and where it is floating of `dtype`, if there is one."""
        for module, name, before in self._standing_in:
            stand_in = _stand_in(before, device, dtype)
            changed = before.changed if isinstance(before, RemoteParameter) else None
            setattr(module, name, stand_in if changed is None else RemoteParameter.from_stand_in(stand_in, changed))

    def run(self, call: Callable[[], Any], chunk: int, received: Sequence[Tensor | None]) -> Any:
        """A forward pass of a chunk of this stage: `call` calls the model on the micro-batch, `received` are the values
        of the chunk before. Gives the tensors and None to be sent; of the last chunk, what the model gives."""
        part = self.parts[chunk]
        before = self._outputs[part.start - 1].value_of(received) if part.start else None
        self._pass = _Pass(part, before)
        try:
            with self._only(part):
                return call()
        finally:
            self._pass = None

    def forward(self, original: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """The model's forward pass, inside of `run`. Raises PolyaccelError outside of it, and PipelineError where the
        blocks of this stage are not called once each and in order."""
        current = self._pass
        if current is None:
            raise PolyaccelError(
                f"{type(self.model).__name__}(...): this rank has stage {self.stage} of {self.num_stages} alone",
                hint="call engine.train_batch(data_iter) or engine.eval_batch(data_iter) on every rank",
                value=self.stage,
            )
        part, outputs, has_ended = current.part, None, False
        try:
            outputs = original(*args, **named)
        except _PassEnded:
            has_ended = True
        except Exception as error:
            if current.reached or not part.start or not self._standing_in:
                raise
            raise PipelineError(
                f"what {type(self.model).__name__} computes before {self.names[0]} fails on stage {self.stage}, where "
                f"NaN stands in for the weights of another stage: {type(error).__name__}: {error}",
                hint="let the model accept NaN there, or shard it by tensor_parallel or zero_optimization instead",
                value=self.names[0],
            ) from error
        is_last = part.stop == len(self.names)
        if current.reached != part.stop or has_ended == is_last:
            raise PipelineError(
                f"{type(self.model).__name__} did not call {self.names[min(current.reached, part.stop)]} on stage "
                f"{self.stage}",
                hint="let the model call all blocks in every forward pass (no layer drop, no early exit)",
                value=current.reached,
            )
        if is_last:
            return outputs
        return self._outputs[part.stop - 1].tensors_of(current.given, self.names[part.stop - 1])

    def passes(self, index: int) -> Any:
        """What stands in the place of block `index` is called. Gives what the chunk before has sent, or ends it all."""
        current = self._pass
        if current is None:
            raise PolyaccelError(
                f"{self.names[index]} is on stage {self.stages[index]}, and this rank has stage {self.stage}",
                hint="call engine.train_batch(data_iter) or engine.eval_batch(data_iter) on every rank",
                value=index,
            )
        self._require_next(current, index)
        if index >= current.part.stop:
            raise _PassEnded
        current.reached += 1
        return current.before

    def keeps(self, index: int, output: Any) -> None:
        """Block `index` of this stage has given `output`."""
        current = self._pass
        if current is not None:
            self._require_next(current, index)
            current.reached += 1
            current.given = output

    def _require_next(self, current: _Pass, index: int) -> None:
        if index != current.reached:
            expected = self.names[current.reached] if current.reached < len(self.names) else "no more"
            raise PipelineError(
                f"{type(self.model).__name__} called {self.names[index]} where {expected} comes in order",
                hint="let the model call all blocks once in every forward pass, in order",
                value=index,
            )

    @contextmanager
    def _only(self, part: range) -> Iterator[None]:
        """With the blocks of `part` in the list and none of this stage's other chunks."""
        keys = list(self._list._modules)
        absent = {keys[index]: block for index, block in self._own.items() if index not in part}
        self._list._modules.update({keys[index]: self._others[index] for index in self._own if index not in part})
        try:
            yield
        finally:
            self._list._modules.update(absent)

    def _weights(self, trial: ModelTrace, method: str, sizes: Mapping[str, int]) -> list[float]:
        last = len(self.names) - 1
        numels = [0] * len(self.names)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, parts in trial.users.items():
            numel = sizes.get(names[parameter], parameter.numel()) if parameter.requires_grad else 0
            for block in {min(part, last) for part in parts}:
                numels[block] += numel
        kinds = [type(block).__name__ for block in self._list.children()]
        return layer_weights(method, kinds, numels)

    def _let_go_of_parameters(self, trial: ModelTrace) -> None:
        """Keep the parameters that this stage owns, as the first of those that use them."""
        last = len(self.names) - 1
        places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
        for prefix, module in self.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full = f"{prefix}.{name}" if prefix else name
                    places.setdefault(parameter, []).append((full, module, name))
        for parameter, found in places.items():
            users = tuple(sorted({self.stages[min(part, last)] for part in trial.users[parameter]}))
            block = self._block_of(found[0][0])
            if block is not None and users[0] != self.stages[block]:
                raise PipelineError(
                    f"{type(self.model).__name__} cannot be cut into stages: {found[0][0]} is used before "
                    f"{self.names[block]}, on stage {users[0]}",
                    hint="let a module outside of the blocks have it",
                    value=found[0][0],
                )
            is_owner, is_user = self.stage == users[0], self.stage in users
            stand_in = _stand_in(parameter).requires_grad_(parameter.requires_grad and is_user)
            if block is not None and not is_user and type(stand_in) is Tensor:  # a fake one is never changed
                stand_in = RemoteParameter.from_stand_in(stand_in, partial(self.is_changed_there, block))
            for _, module, name in () if is_owner else found:
                del module._parameters[name]
                setattr(module, name, stand_in)
                if not is_user:
                    self._standing_in.append((module, name, stand_in))
            if len(users) > 1 and is_user:
                (first, *also), holder = [(module, name) for _, module, name in found], nn.Module()
                if is_owner:
                    holder.register_parameter("shared", parameter)
                lent = () if is_owner else (first,)
                self.ties[found[0][0]] = TiedModule(holder, users, lent, () if is_owner else tuple(also))
        own = {found[0][0]: trial.users[parameter] for parameter, found in places.items()}
        set_parts(self.model, {name: self._chunks_among(own[name]) for name, _ in self.model.named_parameters()})

    def _block_of(self, name: str) -> int | None:
        return next((index for index, block in enumerate(self.names) if name.startswith(f"{block}.")), None)

    def stage_of(self, name: str) -> int | None:
        """The stage of the block that a module or parameter belongs to, by its full name; None outside of blocks."""
        block = self._block_of(name)
        return None if block is None else self.stages[block]

    def is_changed_there(self, index: int) -> None:
        """Raise PipelineError unless the stage of block `index` runs what runs now, and changes it in place itself."""
        current = self._pass
        ends = next(part.stop for part in self.parts if index in part)
        if current is None or current.reached > ends:
            raise PipelineError(
                f"{type(self.model).__name__} changes parameters of {self.names[index]} on stage {self.stage}, where "
                f"stage {self.stages[index]}, which has them, does not run",
                hint="change them before the blocks are called",
                value=self.names[index],
            )

    def _chunks_among(self, users: Sequence[int]) -> str:
        """The chunks of this stage among the parts of the forward pass that use a parameter."""
        blocks = {min(part, len(self.names) - 1) for part in users}
        chunks = [
            str(chunk)
            for chunk, (stage, part) in enumerate(zip(self.placement, self.parts, strict=True))
            if stage == self.stage and not blocks.isdisjoint(part)
        ]
        return " ".join(chunks)

    def _let_go_of_buffers(self) -> None:
        """Let only the stage save a buffer that has it: that of its block; what comes before the blocks in the order in
        which the model was written is the first's, what comes after them the last's."""
        prefixes = {f"{name}.": stage for name, stage in zip(self.names, self.stages, strict=True)}
        stage = self.stages[0]
        for path, module in self.model.named_modules():
            inside = next((at for prefix, at in prefixes.items() if f"{path}.".startswith(prefix)), None)
            if inside is not None:
                stage = self.stages[-1]
            if (stage if inside is None else inside) != self.stage:
                module._non_persistent_buffers_set.update(module._buffers)
                self.foreign_buffers.update(f"{path}.{name}" if path else name for name in module._buffers)

    def _let_go_of_blocks(self) -> None:
        """Take other stages' blocks out, and record what this stage's give."""
        keys = list(self._list._modules)
        for index, other in enumerate(self._others):
            if index in self._own:
                self._own[index].register_forward_hook(lambda _, __, output, index=index: self.keeps(index, output))
            else:
                self._list._modules[keys[index]] = other
                for module in other.__dict__["_block"].modules():
                    module._buffers.update({name: _stand_in(one) for name, one in _real_buffers(module).items()})
        if not has_units(self.model):
            set_units(self.model, self._own.values())


class _Pass:
    """A forward pass under way."""

    def __init__(self, part: range, before: Any) -> None:
        self.part = part
        """The blocks that it is of."""
        self.before = before
        """What the block before these gave."""
        self.reached = 0
        """The next block to be called."""
        self.given: Any = None
        """What the block called last gave, of those that are here."""


class _PassEnded(BaseException):
    """A stage's last block has given its output. No error, so that no handler of a model's takes it for one."""


class _RemoteBlock(nn.Module):
    """Stands in the place of a block of another stage. Its parts are the block's, with stand-ins for parameters."""

    _cut: StageModule
    _index: int

    def __init__(self, cut: StageModule, index: int, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(block).items() if name not in _OWN_OF_MODULES})
        self.__dict__["_cut"], self.__dict__["_index"], self.__dict__["_block"] = cut, index, block

    def __getattr__(self, name: str) -> Any:
        if "_block" not in self.__dict__:
            return super().__getattr__(name)
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._cut.passes(self._index)

    def extra_repr(self) -> str:
        return f"on stage {self._cut.stages[self._index]}"


class RemoteParameter(Tensor):
    """A stand-in for a parameter of another stage's block. `changed` is called where a model changes it in place, which
    the other stage does itself."""

    changed: Callable[[], None]

    @classmethod
    def from_stand_in(cls, stand_in: Tensor, changed: Callable[[], None]) -> RemoteParameter:
        found: RemoteParameter = stand_in.as_subclass(cls)
        found.changed = changed
        return found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        is_change = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        with torch._C.DisableTorchFunctionSubclass():
            if not is_change or not isinstance(args[0], cls):
                return function(*args, **(kwargs or {}))
            args[0].changed()
            return args[0]


class _StageForward:
    """What stands for the forward of a model that was cut."""

    def __init__(self, cut: StageModule, original: Callable[..., Any]) -> None:
        self.cut = cut
        self._original = original
        update_wrapper(self, original)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.cut.forward(self._original, args, named)


def _real_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: one for name, one in module._buffers.items() if one is not None and one.is_floating_point()}


def cut_of(model: nn.Module) -> StageModule | None:
    """The cut that was made of `model`; None where none was."""
    forward = vars(model).get("forward")
    return forward.cut if isinstance(forward, _StageForward) else None


def _stand_in(like: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of one element that is repeated. See [Note: Parameter stand-ins]."""
    is_real = like.is_floating_point()
    kind = dtype if is_real and dtype is not None else like.dtype
    value = _NAN if is_real or like.is_complex() else 0
    return torch.full((), value, dtype=kind, device=device or "cpu").expand(like.shape)
