"""Weights of linear layers as int8 or int4 with a scale for each group of a row.

[Note: Weights in groups]
A row has one scale for every `group_size` inputs: the step of [Note: Integers in groups] in integer_groups. The layer
keeps its class and its forward, which finds the weight of a product under the old name, computed again in each pass.
Groups are plain attributes: the engine neither shards nor saves them. A weight that another module has too stays as it
is. The bytes lie as the decoder's kernel reads them, which [Note: Packed groups] in csrc/decode/grouped.h describes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.ops.decode import PackedWeight
from polyaccel.torch.integer_groups import in_groups, integers, magnitudes, steps_of
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.tensor_parallel.layers import become
from polyaccel.torch.tensor_parallel.ranks import TensorRanks

_PACKED = 16
_IN_UNIT = 4
_MATRIX = 2


class GroupedWeight:
    """A matrix as integers and scales. `is_transposed`: its first dimension are the inputs. See [Note: Weights in
    groups]."""

    def __init__(self, weight: Tensor, group_size: int, *, bits: int = 8, is_transposed: bool = False) -> None:
        rows = (weight.detach().t() if is_transposed else weight.detach()).float()
        self._is_transposed, self._dtype = is_transposed, weight.dtype
        outputs, inputs = rows.shape
        size = min(group_size, inputs)
        groups = in_groups(functional.pad(rows, (0, 0, 0, -outputs % _PACKED)), size)
        largest = magnitudes(groups)
        by_block = steps_of(largest, bits).view(-1, _PACKED, groups.shape[1]).transpose(1, 2).contiguous()
        codes = _packed(integers(groups, largest, bits), bits)
        self.packed = PackedWeight(codes, by_block, outputs, inputs, size, bits)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return int(self.packed.codes.nbytes + self.packed.scales.nbytes)

    @property
    def values(self) -> Tensor:
        """The integers (outputs, groups, inputs of a group) as int8."""
        found = self.packed
        return _unpacked(found.codes, found.bits)[: found.outputs, :, : found.group_size]

    @property
    def scales(self) -> Tensor:
        """The scales (outputs, groups, 1)."""
        found: Tensor = self.packed.scales.transpose(1, 2).flatten(0, 1)
        return found[: self.packed.outputs, :, None]

    def weight(self) -> Tensor:
        """The matrix in its own type."""
        rows = (self.values * self.scales).flatten(1)[:, : self.packed.inputs].to(self._dtype)
        return rows.t() if self._is_transposed else rows


def _packed(values: Tensor, bits: int) -> Tensor:
    """Integers (outputs, groups, inputs of a group), outputs in sixteens, as bytes (blocks, groups, bytes)."""
    values = functional.pad(values, (0, -values.shape[2] % _IN_UNIT))
    _, groups, size = values.shape
    pairs = values.view(-1, _PACKED, groups, size // 2, 2).permute(0, 2, 3, 1, 4)
    if bits == 4:
        pairs = pairs + 8
        pairs = pairs[:, :, ::2] + 16 * pairs[:, :, 1::2]
    return pairs.contiguous().view(torch.uint8).view(pairs.shape[0], groups, -1)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `_packed`, whose groups are filled up."""
    blocks, groups, _ = codes.shape
    if bits == 4:
        both = codes.view(blocks, groups, -1, 1, _PACKED * 2)
        codes = torch.cat((both & 15, both >> 4), dim=3) - 8
    pairs = codes.view(torch.int16).view(blocks, groups, -1, _PACKED).permute(0, 3, 1, 2)
    return pairs.reshape(blocks * _PACKED, groups, -1).contiguous().view(torch.int8)


class GroupedLayer(nn.Module):
    """A linear layer whose weight is a `GroupedWeight`."""

    grouped: GroupedWeight

    @property
    def weight(self) -> Tensor:
        """The weight, computed from its groups."""
        return self.grouped.weight()


def has_weights(module: nn.Module) -> bool:
    """Whether a module or a part of it has parameters or grouped weights."""
    return any(
        isinstance(part, GroupedLayer) or any(one is not None for one in part._parameters.values())
        for part in module.modules()
    )


class WeightGroups(Rewrite):
    """Weights of linear layers in groups of integers. Data ranks get those of the first one."""

    name = "dtype"

    def __init__(self, group_size: int, bits: int) -> None:
        self._group_size = group_size
        self._bits = bits

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
            grouped = GroupedWeight(values, self._group_size, bits=self._bits, is_transposed=_is_conv1d(layer))
            become(layer, GroupedLayer, grouped=grouped)
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
