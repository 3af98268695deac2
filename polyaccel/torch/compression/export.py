"""Compressed models made plain: smaller where they were pruned, and without polyaccel.

[Note: Tied weights in exports]
A weight may belong to several layers that compute with it in different ways, such as a quantised output layer over an
embedding that is not. Each of them then gets its own parameter, and transformers' `tie_word_embeddings` is turned off.
Where all compute the same the parameter stays one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.torch.compression.fast_paths import release_calls
from polyaccel.torch.compression.finding import NORMS, weight_of
from polyaccel.torch.compression.layers import CompressedLayer, Mask, output_dim, own_class


@torch.no_grad()
def make_plain(model: nn.Module, layers: Mapping[str, CompressedLayer]) -> None:
    """Make the compressed `layers` of `model` plain. See [Note: Tied weights in exports]."""
    _end_schedule(layers)
    weights: dict[int, _SharedWeight] = {}
    cuts = [
        (layer, dim, mask.kept(layer.compression.clock.step))
        for layer in layers.values()
        for mask, dim in _cut_dims(layer)
    ]
    for layer in layers.values():
        weight, how = weight_of(layer), layer.compression
        values = how.quantized(how.masked(layer, weight))
        weights.setdefault(id(weight), _SharedWeight(weight)).users.append((layer, values))
        if (bias := layer._parameters.get("bias")) is not None:
            bias.copy_(how.masked_bias(layer, bias))
    others = {id(one) for part in model.modules() if not isinstance(part, CompressedLayer) for one in _own(part)}
    are_untied = [shared.settle(is_used_elsewhere=key in others) for key, shared in weights.items()]
    settings = getattr(model, "config", None)
    if any(are_untied) and getattr(settings, "tie_word_embeddings", False):
        settings.tie_word_embeddings = False  # type: ignore[union-attr]
    for layer, dim, kept in cuts:
        _cut(layer, dim, kept)
    for shared in weights.values():
        shared.tie_again()
    for layer in layers.values():
        _plain(layer)


def _end_schedule(layers: Mapping[str, CompressedLayer]) -> None:
    """Take a model that nothing has trained here at the end of its schedule, with masks of its present weights."""
    clock = next(iter(layers.values())).compression.clock
    if clock.is_untouched:
        clock.finish()
        for layer in layers.values():
            layer.compression.begin_masks()


def _own(part: nn.Module) -> Iterator[Tensor]:
    return (one for one in part._parameters.values() if one is not None)


@dataclass
class _SharedWeight:
    """A parameter and the compressed layers that compute with it, each with its values."""

    weight: Tensor
    users: list[tuple[CompressedLayer, Tensor]] = field(default_factory=list)
    is_tied: bool = False

    def settle(self, *, is_used_elsewhere: bool) -> bool:
        """Give the layers their values; returns whether they have separate parameters from now on."""
        first = self.users[0][1]
        is_whole = all(values is self.weight for _, values in self.users)
        self.is_tied = len(self.users) > 1 and all(torch.equal(first, values) for _, values in self.users)
        if is_whole or ((self.is_tied or len(self.users) == 1) and not is_used_elsewhere):
            if not is_whole:
                self.weight.copy_(first)
            return False
        own = nn.Parameter(first.clone(), requires_grad=self.weight.requires_grad)
        for layer, values in self.users:
            needs_own = not (self.is_tied or len(self.users) == 1)
            layer._parameters["weight"] = nn.Parameter(values.clone(), own.requires_grad) if needs_own else own
        return True

    def tie_again(self) -> None:
        """Let layers that were cut in the same way have one parameter."""
        first, *rest = (weight_of(layer) for layer, _ in self.users)
        if self.is_tied and all(first.shape == one.shape and torch.equal(first, one) for one in rest):
            for layer, _ in self.users:
                layer._parameters["weight"] = self.users[0][0]._parameters["weight"]


def _cut_dims(layer: CompressedLayer) -> Iterator[tuple[Mask, int]]:
    for mask in layer.compression.masks:
        if mask.dim is not None:
            yield mask, mask.dim
    yield from layer.compression.followed


def _cut(layer: CompressedLayer, dim: int, kept: Tensor) -> None:
    """Keep the slices `kept` along `dim` of the layer's weight, and of all that goes with them."""
    weight = weight_of(layer)
    is_output = isinstance(layer, NORMS) or dim == output_dim(layer)
    tables: list[tuple[dict[str, Any], str, int]] = [(layer._parameters, "weight", dim)]
    if is_output:
        tables.append((layer._parameters, "bias", 0))
        tables += [(layer._buffers, name, 0) for name in ("running_mean", "running_var")]
    for table, name, along in tables:
        value = table.get(name)
        if value is not None:
            chosen = value.detach().index_select(along, kept.to(weight.device)).clone()
            is_parameter = isinstance(value, nn.Parameter)
            table[name] = nn.Parameter(chosen, requires_grad=value.requires_grad) if is_parameter else chosen
    outputs = ("num_features", "out_features", "out_channels", "nf")
    for attribute in outputs if is_output else ("in_features", "in_channels", "nx"):
        if hasattr(layer, attribute):
            setattr(layer, attribute, len(kept))


def _plain(layer: CompressedLayer) -> None:
    """Give a layer its own class again, without what compression added."""
    for mask in layer.compression.masks:
        layer._buffers.pop(f"{mask.name}_mask", None)
        layer._parameters.pop(f"{mask.name}_scores", None)
    for name in ("input_range", "snip_scores", "bit_pace"):
        layer._buffers.pop(name, None)
    release_calls(layer)
    del layer.__dict__["compression"]
    layer.__class__ = own_class(layer)
