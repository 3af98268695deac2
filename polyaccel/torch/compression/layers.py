"""Layers whose weight is compressed in each forward pass, and stays as it is for the optimizer.

[Note: Compressed layers]
A layer stays the object that it was, and an instance of its class. Its forward sees a compressed weight in the place of
the parameter. That is a function of the whole weight, of masks among its buffers and of the step. It is equal on every
rank, and computed from the gathered weight at stage 3. Gradients pass quantisation as if it were not there
(straight-through, Bengio et al. 2013, arXiv 1308.3432), and masks as the products that they are. Autograd keeps a note
in place of the compressed weight, and computes it again in backward: under stage 3 nothing whole stays between the
passes.

[Note: Masks of pruning]
A mask has one number for each unit: -1 before pruning begins, then 1 or 0. Layers that follow a pruned one (its
`related_modules`) ignore the inputs that are pruned, so that the exported model computes what the trained one does,
whatever lies between both layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.engine.policies.compression import InputRule, PruningRule, WeightRule
from polyaccel.torch.compression.cut_layers import CutLayer
from polyaccel.torch.compression.formulas import (
    largest,
    magnitudes,
    noise_for,
    quantized_in_range,
    quantized_tokens,
    quantized_weight,
    same,
)
from polyaccel.torch.compression.pace import END, BitPace
from polyaccel.torch.compression.saved_notes import noted
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.sharding.pending import PendingParameter
from polyaccel.torch.sharding.sharded import ShardedParameter

_ABSENT = (ShardedParameter, PendingParameter)
_INPUTS = ("input", "x")
"""The names of the input of layers that are called by name: torch's and transformers'."""


class Clock:
    """The optimizer steps that are done: an engine's, or those that `advance` has counted. Copies keep the number."""

    def __init__(self) -> None:
        self._own = 0
        self._source: Callable[[], int] | None = None

    @property
    def step(self) -> int:
        return self._own if self._source is None else self._source()

    @property
    def is_untouched(self) -> bool:
        """Whether no engine has ever given the number, and nothing was counted."""
        return self._source is None and not self._own

    def finish(self) -> None:
        """Go to the end of every schedule."""
        self._own, self._source = END, None

    def follow(self, source: Callable[[], int] | None) -> None:
        """Take the number from `source` from now on; None keeps the present one."""
        self._own, self._source = self.step, source

    def advance(self) -> None:
        """Count a step, in training without an engine."""
        self._own += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"_own": self.step, "_source": None}


class Mask:
    """What is pruned of `layer` along `dim` of its weight, in units of `block` slices; `dim` None: single weights."""

    def __init__(self, layer: CompressedLayer, rule: PruningRule, dim: int | None, block: int, name: str) -> None:
        self.layer, self.rule, self.dim, self.block, self.name = layer, rule, dim, block, name
        self._version = -1
        self._has_begun = False

    @property
    def scores(self) -> Tensor | None:
        """The scores that are trained; None where magnitudes decide once."""
        found: Tensor | None = parameter_of(self.layer, f"{self.name}_scores")
        return found

    @property
    def values(self) -> Tensor:
        """The mask in its buffer."""
        values = self.layer._buffers[f"{self.name}_mask"]
        assert values is not None  # registered with it
        return values

    def has_begun(self) -> bool:
        """Whether the mask was made, by this process or before its values were loaded."""
        values = self.values
        if values._version != self._version:
            self._version = values._version
            self._has_begun = bool(values.flatten()[0] >= 0)
        return self._has_begun

    def is_due(self, step: int) -> bool:
        """Whether the mask is to be made of magnitudes now."""
        is_of_magnitudes = not self.rule.is_learned and self.rule.removal is None
        return is_of_magnitudes and step >= self.rule.offset and not self.has_begun()

    @torch.no_grad()
    def make(self) -> None:
        """Make the mask of the weight's present magnitudes. Collective where ranks have blocks of it."""
        self.values.copy_(largest(self.magnitudes(), self.rule.dense_ratio))

    def magnitudes(self) -> Tensor:
        """Return the magnitude of each unit of the whole weight. Collective where ranks have blocks of it."""
        weight = self.layer.compression.whole(parameter_of(self.layer, "weight").detach())
        return weight.abs() if self.dim is None else magnitudes(weight, self.dim, self.block)

    def at(self, step: int) -> Tensor | None:
        """Return the mask of each unit: a function of scores, or what the buffer has; None before pruning begins."""
        if (scores := self.scores) is None:  # a mask that was loaded holds before an engine counts its steps
            return self.values if self.has_begun() else None
        if step < self.rule.offset:
            return None
        return _Largest.apply(scores, self.rule.dense_ratio)  # type: ignore[no-untyped-call, no-any-return]

    def kept(self, step: int) -> Tensor:
        """Return the indices along `dim` that stay."""
        found = self.at(step)
        total = len(self.values) * self.block
        if found is None:
            return torch.arange(total)
        return torch.nonzero(found.detach().repeat_interleave(self.block) > 0).flatten()


class Compression:
    """What happens to one layer's weight and inputs. `masks` are its own, `followed` those of layers before it."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.weights: WeightRule | None = None
        self.inputs: InputRule | None = None
        self.masks: list[Mask] = []
        self.followed: list[tuple[Mask, int]] = []
        """Masks of layers before it, each with the dimension of this layer's weight that they prune."""
        self.pace: BitPace | None = None
        """When the weight loses bits, where that follows the curvature of its block."""
        self.cut: CutLayer | None = None
        """The block of the weight that this rank has. See [Note: Compressed layers on tensor ranks]."""
        self.is_of_part = False
        """Whether the layer is one of a model of which this rank has a part."""
        self.seen: tuple[Tensor, Tensor] | None = None
        """The least and the largest input since the last step, for a static range."""

    def whole(self, value: Tensor) -> Tensor:
        """Return the whole of what is a block of the weight's shape. Collective where ranks have blocks of it."""
        return value if self.cut is None else self.cut.whole(value)

    def begin_masks(self) -> None:
        """Make the masks whose step has come, of magnitudes."""
        for mask in self.masks:
            if mask.is_due(self.clock.step):
                mask.make()

    def masked(self, layer: CompressedLayer, weight: Tensor) -> Tensor:
        """Return `weight` with zeros for what is pruned."""
        for mask, dim in (*((one, one.dim) for one in self.masks), *self.followed):
            found = mask.at(self.clock.step)
            if found is not None:
                own = found if self.cut is None else self.cut.own_units(found, dim, mask.block)
                block = mask.block if self.cut is None else 1
                weight = _Masked.apply(weight, shaped(own, weight, dim, block))  # type: ignore[no-untyped-call]
        return weight

    def masked_bias(self, layer: CompressedLayer, bias: Tensor) -> Tensor:
        """Return `bias` with zeros for outputs that are pruned."""
        for mask, dim in (*((one, one.dim) for one in self.masks), *self.followed):
            if dim == output_dim(layer) and (found := mask.at(self.clock.step)) is not None:
                own = found.repeat_interleave(mask.block)
                if self.cut is not None:
                    own = self.cut.own_outputs(own)
                bias = _Masked.apply(bias, own)  # type: ignore[no-untyped-call]
        return bias

    def quantized(self, weight: Tensor) -> Tensor:
        """Return the values of `weight` in the bits of this step, without a graph."""
        rule, step = self.weights, self.clock.step
        bits = 0 if rule is None else (self.pace or rule).bits_at(step)
        if rule is None or not bits:
            return weight
        with torch.no_grad():
            found = self._in_bits(weight, bits, rule, step)
            share = rule.own_share_at(step)
            return share * weight + (1.0 - share) * found if share else found

    def _in_bits(self, weight: Tensor, bits: int, rule: WeightRule, step: int) -> Tensor:
        groups, cut = rule.groups, self.cut
        if cut is not None and not rule.is_stochastic and (own := cut.own_groups(groups)):
            groups, cut = own, None
        whole = weight if cut is None else cut.whole(weight)
        noise = noise_for(self.name, step, whole) if rule.is_stochastic else None
        found = quantized_weight(whole, bits, groups, is_symmetric=rule.is_symmetric, noise=noise)
        return found if cut is None else cut.own(found)

    def quantized_input(self, layer: CompressedLayer, x: Tensor) -> Tensor:
        """Return the values of `x` in few bits, without a graph; a static range sees it."""
        rule = self.inputs
        if rule is None or not x.is_floating_point() or not x.numel():
            return x
        agree = same if self.cut is None else self.cut.largest_input
        if not rule.is_static:
            if self.clock.step < rule.offset:
                return x
            return quantized_tokens(x, rule.bits, is_symmetric=rule.is_symmetric, agree=agree)
        low, high = x.detach().amin().float(), x.detach().amax().float()
        low, high = -agree(-low), agree(high)
        if layer.training and torch.is_grad_enabled():
            self.seen = (low, high) if self.seen is None else _joined(self.seen, (low, high))
        if self.clock.step < rule.offset:
            return x
        known = layer._buffers["input_range"]
        assert known is not None  # registered with the rule
        is_known = known[0] <= known[1]
        low, high = torch.where(is_known, known[0], low), torch.where(is_known, known[1], high)
        return quantized_in_range(x, rule.bits, low, high, is_symmetric=rule.is_symmetric)


class CompressedLayer(nn.Module):
    """A layer with a compressed weight in forward. See [Note: Compressed layers]."""

    compression: Compression

    @outside_graphs
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The layer's own forward, with compressed inputs and weight."""
        how, own = self.compression, self.__dict__
        before: dict[str, Any] = {name: own[name] for name in ("weight", "bias") if name in own}
        if inputs and isinstance(inputs[0], Tensor):
            inputs = (straight_through(inputs[0], how.quantized_input(self, inputs[0])), *inputs[1:])
        for name in _INPUTS if not inputs else ():
            if isinstance(x := named.get(name), Tensor):
                named[name] = straight_through(x, how.quantized_input(self, x))
        weight = parameter_of(self, "weight")
        if self.training and torch.is_grad_enabled():
            how.begin_masks()  # without an engine, and where a script calls the model in the place of its engine
        masked = how.masked(self, weight)
        values = how.quantized(masked)
        shown = {"weight": straight_through(masked, values)}
        if (bias := parameter_of(self, "bias")) is not None:
            shown["bias"] = how.masked_bias(self, bias)

        def again(weight: Tensor) -> Tensor:
            with torch.no_grad():
                return how.quantized(how.masked(self, weight))

        own.update(shown)
        try:
            if shown["weight"] is weight:
                return super().forward(*inputs, **named)
            with noted(weight, shown["weight"], again):
                return super().forward(*inputs, **named)
        finally:
            for name in shown:
                own.pop(name, None)
            own.update(before)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class from which this one was made: no module has this one under its name."""
        return _unfilled, (own_class(self),), self.__getstate__()  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """Other values with the gradient of the first ones."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, others: Tensor) -> Tensor:
        return others.view_as(others)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Largest(torch.autograd.Function):
    """The mask of the largest scores, whose gradient is that of the mask."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dense_ratio: float) -> Tensor:
        return largest(scores, dense_ratio).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Masked(torch.autograd.Function):
    """The product of values and a mask, which is kept as it is; a mask of scores has a gradient too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(values if ctx.needs_input_grad[1] else None, mask)
        return values * mask.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        values, mask = ctx.saved_tensors
        of_values = grad * mask.to(grad.dtype) if ctx.needs_input_grad[0] else None
        of_mask = None if values is None else (grad * values).sum_to_size(mask.shape).to(mask.dtype)
        return of_values, of_mask


def straight_through(values: Tensor, others: Tensor) -> Tensor:
    """Return `others`, with gradients that go to `values`; `values` itself where both are one tensor."""
    if values is others:
        return values
    return _StraightThrough.apply(values, others)  # type: ignore[no-untyped-call, no-any-return]


def shaped(mask: Tensor, weight: Tensor, dim: int | None, block: int) -> Tensor:
    """Return the mask of each unit as one that multiplies `weight`."""
    if dim is None:
        return mask
    shape = [1] * weight.dim()
    shape[dim] = -1
    return mask.repeat_interleave(block).view(shape)


def output_dim(layer: nn.Module) -> int:
    """The dimension of the weight that counts outputs: the second one of transformers' Conv1D."""
    return 1 if is_transposed(layer) else 0


def as_matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight as a view of (outputs, inputs)."""
    return weight.t() if is_transposed(layer) else weight.flatten(1)


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight of a layer is (inputs, outputs)."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(layer).__mro__
    )


def present(parameter: Any) -> Any:
    """The parameter, whose values have been brought here: a function of autograd would take an empty one."""
    if type(parameter) in _ABSENT:
        Tensor.detach(parameter)
    return parameter


def parameter_of(layer: nn.Module, name: str) -> Any:
    """The parameter of a layer, with values, or the tensor that stands in its place where another stage has it."""
    return layer.__dict__[name] if name in layer.__dict__ else present(layer._parameters.get(name))


def compressed_layers(model: nn.Module) -> Iterator[tuple[str, CompressedLayer]]:
    """Yield the compressed layers of `model` with their full names."""
    return ((name, part) for name, part in model.named_modules() if isinstance(part, CompressedLayer))


def own_class(layer: nn.Module) -> Any:
    """The class that a layer had before it was compressed."""
    return next(kind for kind in type(layer).__mro__ if not issubclass(kind, CompressedLayer))


def _unfilled(own: type) -> Any:
    kind: Any = compressed_class(own)
    return kind.__new__(kind)


_CLASSES: dict[type, type] = {}


def compressed_class(own: type) -> type:
    """Return the class of compressed layers of the class `own`."""
    if own not in _CLASSES:
        _CLASSES[own] = type(f"Compressed{own.__name__}", (CompressedLayer, own), {"__module__": __name__})
    return _CLASSES[own]


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])
