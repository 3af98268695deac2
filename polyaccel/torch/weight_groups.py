"""Weights of linear layers as int8 with a scale for each group of a row: half the memory of 16 bits.

[Note: Weights in groups]
A row has one scale for every `group_size` inputs; its last group may be shorter. The scale is the largest magnitude of
the group over 127, in float32, so that a weight differs from its original by half a scale at most. The layer keeps its
class and its forward, which finds the weight of a product under the old name, computed again in each pass. Groups are
plain attributes: the engine neither shards nor saves them. A weight that another module has too stays as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.tensor_parallel.layers import become
from polyaccel.torch.tensor_parallel.ranks import TensorRanks

_LARGEST = 127
_MATRIX = 2


class GroupedWeight:
    """A matrix as int8 and scales. `is_transposed`: its first dimension are the inputs. See [Note: Weights in
    groups]."""

    def __init__(self, weight: Tensor, group_size: int, *, is_transposed: bool = False) -> None:
        rows = (weight.detach().t() if is_transposed else weight.detach()).float()
        self._is_transposed, self._inputs, self._dtype = is_transposed, rows.shape[1], weight.dtype
        size = min(group_size, self._inputs)
        padded = functional.pad(rows, (0, -self._inputs % size))
        groups = padded.view(rows.shape[0], -1, size)
        self.scales = groups.abs().amax(-1, keepdim=True) / _LARGEST
        steps = groups / torch.where(self.scales == 0, 1.0, self.scales)
        self.values = steps.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def weight(self) -> Tensor:
        """The matrix in its own type."""
        rows = (self.values * self.scales).flatten(1)[:, : self._inputs].to(self._dtype)
        return rows.t() if self._is_transposed else rows


class GroupedLayer(nn.Module):
    """A linear layer whose weight is a `GroupedWeight`."""

    grouped: GroupedWeight

    @property
    def weight(self) -> Tensor:
        """The weight, computed from its groups."""
        return self.grouped.weight()


class WeightGroups(Rewrite):
    """Weights of linear layers in groups of int8. Data ranks get those of the first one."""

    name = "dtype"

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        first = TensorRanks(context.runtime.process_group_for(("data",)))
        layers = _linear_layers(context.model)
        for layer in layers.values():
            weight = layer._parameters.pop("weight")
            assert weight is not None  # it is a linear layer's
            values = weight.detach().contiguous()
            first.broadcast(values)
            become(
                layer, GroupedLayer, grouped=GroupedWeight(values, self._group_size, is_transposed=_is_conv1d(layer))
            )
        names = tuple(layers)
        return AppliedRewrite(name=self.name, modules=names, parameters=tuple(f"{name}.weight" for name in names))


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weights no other module has, by full name."""
    uses: Counter[int] = Counter()
    layers: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        uses.update(id(one) for one in part.parameters(recurse=False))
        if isinstance(part, nn.Linear) or _is_conv1d(part):
            layers[name] = part
    return {name: part for name, part in layers.items() if _is_alone(part._parameters.get("weight"), uses)}


def _is_alone(weight: Any, uses: Counter[int]) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == _MATRIX and uses[id(weight)] == 1


def _is_conv1d(part: nn.Module) -> bool:
    """Whether it is transformers' linear layer, whose weight is transposed."""
    return any(kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(part).__mro__)
