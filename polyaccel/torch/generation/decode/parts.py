"""Layers as functions of rows (tokens, features): compiled where they are plain, else the module itself.

Weights are the memory of the module's own parameters: nothing is copied, and an update of them is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.ops.base import KernelTable
from polyaccel.ops.decode import DECODE_GROUPED, DECODE_LINEAR, PackedWeight
from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.tensor_parallel.layers import (
    ColumnLayer,
    FeatureEmbedding,
    RowLayer,
    ShardSpec,
    VocabularyEmbedding,
)
from polyaccel.torch.tensor_parallel.ranks import TensorRanks
from polyaccel.torch.weight_groups import GroupedLayer, has_weights

Rowwise = Callable[[Tensor], Tensor]


def values(parameter: Any) -> Any:
    """Return the memory of a parameter, which is not marked as handed out for that."""
    return None if parameter is None else Tensor.data.__get__(parameter)  # type: ignore[attr-defined]


def is_plain(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    """Whether a module is of that class, by type or name, and computes as its class does."""
    named = type(module).__name__ == kind if isinstance(kind, str) else type(module) is kind
    return named and has_forward_of_class(module)


def has_forward_of_class(module: nn.Module) -> bool:
    """Whether no `forward` stands on the module itself, except this package's."""
    own = module.__dict__.get("forward")
    return own is None or type(own).__module__.startswith("polyaccel")


def _is_plain_grouped(module: nn.Module) -> bool:
    """Whether a layer of grouped weights is otherwise one that `is_plain` knows."""
    first, *others = type(module).__bases__
    is_known = len(others) == 1 and (others[0] is nn.Linear or others[0].__name__ == "Conv1D")
    return first is GroupedLayer and is_known and has_forward_of_class(module)


def weights_of(module: nn.Module) -> tuple[Any, Any] | None:
    """Return weight (outputs, inputs), which may be packed, and bias of a linear layer; None for one with adapters."""
    if isinstance(module, GroupedLayer):
        return (module.grouped.packed, values(module.bias)) if _is_plain_grouped(module) else None
    if is_plain(module, nn.Linear):
        return values(module.weight), values(module.bias)
    return (values(module.weight).t(), values(module.bias)) if is_plain(module, "Conv1D") else None


@dataclass(frozen=True)
class SharedLinear:
    """A linear layer that tensor ranks share, as this rank computes it. The bias of rows comes after their sum."""

    weight: Any
    bias: Tensor | None
    ranks: TensorRanks
    adds_up: bool
    """Whether the outputs of all ranks are added up."""
    sizes: tuple[int, ...] | None
    """Each rank's outputs, where they are gathered; its inputs, where this rank takes its part of them."""


def shared_linear(module: nn.Module) -> SharedLinear | None:
    """Return what a rank computes of a shared layer; None for another layer, and where its outputs are apart."""
    if not isinstance(module, (ColumnLayer, RowLayer)) or not has_forward_of_class(module):
        return None
    own = next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("polyaccel."))
    if own is not nn.Linear and own.__name__ != "Conv1D":
        return None
    layer: Any = module
    share, bias = layer.share, values(layer.bias)
    is_packed = isinstance(layer, GroupedLayer)
    weight = layer.grouped.packed if is_packed else values(layer.weight)
    weight = weight.t() if share.is_transposed and not is_packed else weight
    if share.rows is not None:
        if is_packed or len(share.rows) > 1:
            return None
        ((first, count),) = share.rows
        weight, bias = weight.narrow(0, first, count), None if bias is None else bias.narrow(0, first, count)
    return SharedLinear(weight, bias, share.ranks, isinstance(module, RowLayer), share.sizes)


def ranks_of(model: nn.Module) -> TensorRanks | None:
    """Return the ranks that compute a model together; None for a whole one."""
    shares = (getattr(part, "share", None) for part in model.modules())
    return next((share.ranks for share in shares if isinstance(share, ShardSpec)), None)


def width_of(module: nn.Module) -> int:
    """Return the features of an embedding, of which a rank may have a part."""
    share = getattr(module, "share", None)
    own: int = values(module.weight).shape[1]
    return own if share is None or share.sizes is None else sum(share.sizes)


def linear(module: nn.Module, kernels: KernelTable) -> Rowwise:
    """Return a linear layer as a function; with adapters or without kernels for its weights, it is the module."""
    found = weights_of(module)
    if found is None:
        return module
    if isinstance(found[0], PackedWeight):
        return kernels[DECODE_GROUPED](*found) if DECODE_GROUPED in kernels else module
    return kernels[DECODE_LINEAR](*found) if DECODE_LINEAR in kernels else partial(_linear, *found)


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


def norm(module: nn.Module) -> Rowwise:
    """Return a norm as a function of rows."""
    if not is_plain(module, nn.LayerNorm):
        return module
    assert isinstance(module, nn.LayerNorm)
    shape, weight, bias, eps = list(module.normalized_shape), values(module.weight), values(module.bias), module.eps
    return lambda x: functional.layer_norm(x, shape, weight, bias, eps)


def embedding(module: nn.Module) -> Rowwise:
    """Return an embedding as a function of indices."""
    if not isinstance(module, nn.Embedding):
        raise Unsupported(f"embedding of {type(module).__name__}")
    if type(module) in (VocabularyEmbedding, FeatureEmbedding):
        return module
    if "forward" in type(module).__dict__ and type(module) is not nn.Embedding and not hasattr(module, "offset"):
        raise Unsupported(f"embedding of {type(module).__name__}")
    weight = values(module.weight)
    return lambda indices: functional.embedding(indices, weight)


def mlp_roles(module: Any) -> tuple[Any, tuple[nn.Module, ...], nn.Module] | None:
    """Return activation, first layers and last layer of a feed-forward part; None for another form."""
    children = {name for name, child in module.named_children() if has_weights(child)}
    activation = _activation(module)
    if activation is None:
        return None
    for *first, last in (
        ("gate_proj", "up_proj", "down_proj"),
        ("gate_up_proj", "down_proj"),
        *(("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h")),
    ):
        if children == {*first, last}:
            return activation, tuple(getattr(module, name) for name in first), getattr(module, last)
    return None


def mlp(module: Any, kernels: KernelTable) -> Rowwise:
    """Return a feed-forward part as a function of rows; what is not a known form is the module."""
    roles = mlp_roles(module)
    if roles is None:
        return partial(_as_sequence, module)
    activation, first, last = roles
    down = linear(last, kernels)
    if len(first) > 1:
        gate, up = (linear(one, kernels) for one in first)
        return lambda x: down(activation(gate(x)).mul_(up(x)))
    if first[0] is getattr(module, "gate_up_proj", None):
        both = linear(first[0], kernels)
        return lambda x: _gated(down, activation, both(x))
    return two_layers(first[0], activation, last, kernels)


def two_layers(first: nn.Module, activation: Rowwise, second: nn.Module, kernels: KernelTable) -> Rowwise:
    """Return two linear layers with an activation between."""
    inner, outer = linear(first, kernels), linear(second, kernels)
    return lambda x: outer(activation(inner(x)))


def _gated(down: Rowwise, activation: Rowwise, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return down(activation(gate) * up)


def _activation(module: nn.Module) -> Rowwise | None:
    found = next((getattr(module, name) for name in ("act_fn", "activation_fn", "act") if hasattr(module, name)), None)
    if found is not None and type(found).__name__ == "NewGELUActivation":
        return partial(functional.gelu, approximate="tanh")
    return found


def _as_sequence(module: nn.Module, x: Tensor) -> Tensor:
    found = module(x[None])
    rows: Tensor = found[0] if isinstance(found, tuple) else found
    return rows.view_as(x)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return heads (tokens, heads, head) turned by rotary positions; the rest of a head is kept."""
    rotated = cosines.shape[-1]
    first, rest = x[..., :rotated], x[..., rotated:]
    half = rotated // 2
    other = torch.cat((-first[..., half:], first[..., :half]), dim=-1)
    found = first * cosines[:, None] + other * sines[:, None]
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found
