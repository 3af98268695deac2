"""A model tried on a small micro-batch: what each of its blocks gives, and which parameters every part of it uses.

[Note: Forward pass parts]
With n blocks a forward pass has n + 1 parts: part i goes from what block i - 1 gave to what block i gives, so part 0
has all that comes before the first block, and part n all that comes after the last. In the trial what a block gives is
cut off: a leaf of autograd's graph continues in its place. Behind the outputs of a part, that graph then has as leaves
the parameters that the part uses, wherever in the model they stand, and what the block before gave. Hence parameters
are found that several parts use (tied words, positions that every block is given), and so is a value that reaches a
part past the block before it, which a stage could not have.

The trial is in eval mode, takes no random numbers and changes nothing of the model (`trial_state`). A parameter that is
read without a gradient belongs to the block that reads it; read outside of blocks, to all parts that follow, for any of
them may be given the value (RoFormer's positions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from logging import getLogger
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.data import call_with, to_device
from polyaccel.torch.deferred_init.values import is_deferred
from polyaccel.torch.pipeline.blocks import BlockList, small_inputs
from polyaccel.torch.pipeline.trial_state import unchanged

_PLAIN = (bool, int, float, str)
_log = getLogger(__name__)


@dataclass(frozen=True)
class BlockOutput:
    """How what a block gives is made of tensors, None, and plain values, which are always the same."""

    spec: TreeSpec
    plain: tuple[Any, ...]
    """The plain values among the leaves; None where there is a tensor or None."""

    def tensors_of(self, value: Any, name: str) -> list[Tensor | None]:
        """The tensors and None of what the block `name` gave. Raises PipelineError where it is made otherwise."""
        leaves, spec = tree_flatten(value)
        if spec != self.spec or any(
            not (leaf is None or isinstance(leaf, Tensor)) if plain is None else leaf != plain
            for leaf, plain in zip(leaves, self.plain, strict=True)
        ):
            raise PipelineError(
                f"{name} gave {_shown(leaves)} and not what it gave when the model was tried: {_shown(self.plain)}",
                hint="let the blocks of a model that is cut into stages give the same kinds of values every time",
                value=name,
            )
        return [leaf for leaf, plain in zip(leaves, self.plain, strict=True) if plain is None]

    def value_of(self, tensors: Sequence[Tensor | None]) -> Any:
        """What the block gave, from its tensors and None."""
        left = iter(tensors)
        return tree_unflatten([next(left) if plain is None else plain for plain in self.plain], self.spec)


@dataclass(frozen=True)
class ModelTrace:
    """See [Note: Forward pass parts]."""

    outputs: tuple[BlockOutput, ...]
    """Of each block."""
    users: Mapping[nn.Parameter, tuple[int, ...]]
    """The parts that use a parameter, in order; at least one."""


def trace_first(model: nn.Module, lists: Sequence[BlockList]) -> tuple[BlockList, ModelTrace]:
    """The first of `lists` that is a chain, and its trace; of all but the first nothing is computed between the blocks.
    Raises PipelineError as the trace of the first one."""
    failures: list[PipelineError] = []
    for blocks in lists:
        try:
            found = trace_model(model, blocks)
        except PipelineError as error:
            failures.append(error)
            continue
        if failures and _has_layers_between(blocks, found):
            continue
        if len(lists) > 1:
            others = " and ".join(one.name for one in lists if one is not blocks)
            message = (
                "stages share %s of %s; all compute what is called before it, the last one what is called after it: %s"
            )
            _log.warning(message, blocks.name, type(model).__name__, others)
        return blocks, found
    raise failures[0]


def _has_layers_between(blocks: BlockList, trace: ModelTrace) -> bool:
    """Whether a model has parameters that only stand between blocks of a list, which is then hardly its main one."""
    inside = set(blocks.modules.parameters())
    middle = range(1, len(blocks.names))
    return any(all(part in middle for part in parts) for one, parts in trace.users.items() if one not in inside)


def trace_model(model: nn.Module, blocks: BlockList) -> ModelTrace:
    """Run `model` on a small micro-batch. Raises PipelineError for a model whose blocks are not a chain, naming the
    block and the value."""
    kind = type(model).__name__
    inputs = as_called(model, small_inputs(model))
    recorder = _Recorder(blocks, kind)
    with (
        other_parameters(model) as twins,
        recorder,
        evaluating(model),
        unchanged(model, recorder.reach) as hidden,
        torch.enable_grad(),
    ):
        try:
            outputs = call_with(model, inputs)
        except PolyaccelError:
            raise
        except Exception as error:
            raise PipelineError(
                f"{kind} cannot be cut into stages: it was tried on {_shown(tree_leaves(inputs))} and raised "
                f"{type(error).__name__}: {error}",
                hint="give the model dummy_inputs, a small micro-batch that it takes",
                value=kind,
            ) from error
        recorder.end(outputs)
        users: dict[nn.Parameter, set[int]] = {}
        for part, outputs in enumerate(recorder.parts):
            for leaf in _leaves_behind(outputs):
                if id(leaf) in twins:
                    users.setdefault(twins[id(leaf)], set()).add(part)
                elif (before := recorder.origin_of(leaf)) is not None and before != part - 1:
                    raise _side_path(kind, blocks, before, part)
        for read, reach in hidden:
            if id(read) in twins:
                users.setdefault(twins[id(read)], set()).update(reach)
    for parameter, parts in _by_place(model, blocks).items():
        if parts.inside or parameter not in users:
            users.setdefault(parameter, set()).update(parts.inside or {parts.outside})
    return ModelTrace(tuple(recorder.outputs), {parameter: tuple(sorted(parts)) for parameter, parts in users.items()})


class _Recorder:
    """Cuts off what the blocks of a model give, and keeps it."""

    def __init__(self, blocks: BlockList, kind: str) -> None:
        self._blocks = blocks
        self._kind = kind
        self._handles: list[Any] = []
        self._boundaries: dict[int, tuple[Tensor, int]] = {}
        self._inside: int | None = None
        self.outputs: list[BlockOutput] = []
        self.parts: list[list[Tensor]] = []
        """The tensors that each part gives."""

    def __enter__(self) -> None:
        for index, block in enumerate(self._blocks.modules):
            hook = self._hook_of(index)
            self._handles.append(block.register_forward_pre_hook(lambda *_, index=index: self._begin(index)))
            self._handles.append(block.register_forward_hook(hook, prepend=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def reach(self) -> range:
        """Return the parts that may use a value computed now: inside of a block its own, else all that follow."""
        if self._inside is not None:
            return range(self._inside, self._inside + 1)
        return range(len(self.parts), len(self._blocks.names) + 1)

    def _begin(self, index: int) -> None:
        self._inside = index

    def origin_of(self, leaf: Tensor) -> int | None:
        """The block that gave what `leaf` stands for; None where it is another tensor."""
        found = self._boundaries.get(id(leaf))
        return None if found is None else found[1]

    def end(self, outputs: Any) -> None:
        """The model gave `outputs`. Raises PipelineError unless all blocks were called."""
        if len(self.parts) < len(self._blocks.names):
            raise PipelineError(
                f"{self._kind} cannot be cut into stages: it did not call {self._blocks.names[len(self.parts)]}",
                hint="write it as a polyaccel.torch.pipeline.PipelineModule",
                value=self._kind,
            )
        self.parts.append(tensors_in(outputs))

    def _hook_of(self, index: int) -> Any:
        def cut(block: nn.Module, args: Any, output: Any) -> Any:
            self._inside, names = None, self._blocks.names
            name, reached = names[index], len(self.parts)
            if index != reached:
                expected = names[reached] if reached < len(names) else "no more"
                raise PipelineError(
                    f"{self._kind} cannot be cut into stages: it called {name} where {expected} comes in order",
                    hint="write it as a polyaccel.torch.pipeline.PipelineModule",
                    value=name,
                )
            leaves, spec = tree_flatten(output)
            for leaf in leaves:
                if not (leaf is None or isinstance(leaf, (Tensor, *_PLAIN))):
                    raise PipelineError(
                        f"{self._kind} cannot be cut into stages: {name} gives a {type(leaf).__name__}, and stages "
                        "send each other tensors and None",
                        hint="let it give tensors, or write the model as a polyaccel.torch.pipeline.PipelineModule",
                        value=name,
                    )
            self.parts.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
            self.outputs.append(BlockOutput(spec, tuple(leaf if isinstance(leaf, _PLAIN) else None for leaf in leaves)))
            return tree_unflatten([self._cut_off(leaf, index) for leaf in leaves], spec)

        return cut

    def _cut_off(self, leaf: Any, index: int) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        found = leaf.detach().requires_grad_()
        self._boundaries[id(found)] = (found, index)
        return found


@dataclass
class _Places:
    """The parts where a parameter stands: those of the blocks that have it; where it stands in none, the first part or
    the last, as it comes before or after the blocks in the order in which the model was written."""

    inside: set[int]
    outside: int


def _by_place(model: nn.Module, blocks: BlockList) -> dict[nn.Parameter, _Places]:
    found: dict[nn.Parameter, _Places] = {}
    prefixes = {f"{name}.": part for part, name in enumerate(blocks.names)}
    outside = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part = next((part for prefix, part in prefixes.items() if name.startswith(prefix)), None)
        if part is not None:
            outside = len(blocks.names)
        places = found.setdefault(parameter, _Places(set(), outside))
        if part is not None:
            places.inside.add(part)
    return found


@contextmanager
def other_parameters(model: nn.Module, device: torch.device | None = None) -> Iterator[dict[int, nn.Parameter]]:
    """Let all parameters of `model` be others with the same values, whose gradients are wanted: zeros where there are
    no values yet. With a `device` they are there, and so are the buffers. Gives the parameters by the identities of
    those others."""
    twins: dict[int, nn.Parameter] = {}
    by_own: dict[int, nn.Parameter] = {}
    before = [(module, module._parameters, module._buffers) for module in model.modules()]
    for _, parameters, _ in before:
        for parameter in parameters.values():
            if parameter is not None and id(parameter) not in by_own:
                twin = by_own[id(parameter)] = _twin(parameter, device)
                twins[id(twin)] = parameter
    try:
        for module, parameters, buffers in before:
            module.__dict__["_parameters"] = {
                name: None if parameter is None else by_own[id(parameter)] for name, parameter in parameters.items()
            }
            if device is not None:
                module.__dict__["_buffers"] = to_device(buffers, device)
        yield twins
    finally:
        for module, parameters, buffers in before:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers


def _twin(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    # Zeros that are not written are memory that the system need not find.
    values = torch.zeros(parameter.shape, dtype=parameter.dtype) if is_deferred(parameter) else parameter.detach()
    values = values if device is None else values.to(device)
    return nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """With all modules in eval mode, and then as they were."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def as_called(model: nn.Module, inputs: Any) -> Any:
    """`inputs` where the model's tensors are, in its type where they are real numbers, and without caches of keys."""
    first = next((parameter for parameter in model.parameters() if not is_deferred(parameter)), None)
    if first is not None:
        inputs = to_device(inputs, first.device)
    if isinstance(inputs, Mapping) and "use_cache" not in inputs:
        accepted = "use_cache" in signature(model.forward).parameters
        inputs = {**inputs, "use_cache": False} if accepted else inputs
    return inputs


def _leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of autograd's graph behind `outputs`, and those among them."""
    found = [output for output in outputs if output.requires_grad and output.grad_fn is None]
    left = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return found


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors in what a model gives: nested containers, or an object with attributes."""
    found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if not found and hasattr(outputs, "__dict__"):
        found = [leaf for leaf in tree_leaves(dict(vars(outputs))) if isinstance(leaf, Tensor)]
    return found


def _side_path(kind: str, blocks: BlockList, before: int, part: int) -> PipelineError:
    count = len(blocks.names)
    reached = blocks.names[part] if part < count else "what the model gives"
    through = blocks.names[part - 1]
    return PipelineError(
        f"{kind} cannot be cut into stages: a value of {blocks.names[before]} reaches {reached} by another way than "
        f"through {through}",
        hint="switch off in its config what collects values of all blocks (output_hidden_states, output_attentions, "
        "output_router_logits), or write the model as a polyaccel.torch.pipeline.PipelineModule",
        value=blocks.names[before],
    )


def _shown(leaves: Sequence[Any]) -> str:
    described = [f"a tensor of {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return "(" + ", ".join(described) + ")"
