"""A token of each sequence as one call: a structure whose parts are all known, over memory that stays.

[Note: One call a token]
Of a small model's token a third of the time goes to Python and torch's dispatch. So the operations of all layers are
listed once, with their memory, and csrc/decode runs the list. Activations and norms are recognised by trying them:
they have to give what the listed ones give. An unknown part, such as a layer with adapters, leaves the model to single
calls.

[Note: Exchanges in a token]
Of a model that tensor ranks share each rank lists the operations of its own parts. Where the module's ranks add up or
gather outputs the list is cut: a token is a call of csrc/decode, an exchange by the ranks' communicator, the next call.
Halves of a block that are computed side by side are added up first, so that one exchange serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.ops.base import KernelTable
from polyaccel.ops.decode import (
    DECODE_STEPS,
    AttentionStep,
    DecodeStep,
    LayerPages,
    LinearStep,
    PackedWeight,
    RowwiseStep,
)
from polyaccel.torch.generation.decode import parts
from polyaccel.torch.generation.decode.cache import PagedCache
from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.generation.decode.structure import Layer, Structure
from polyaccel.torch.tensor_parallel.ranks import TensorRanks

MOST_ROWS = 48
"""Sequences of a call; for more of them torch's products are faster."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_IS_RMS: dict[tuple[type, torch.dtype], bool] = {}
"""Whether the classes of norms that were tried compute as `rms_norm` does."""


class WholeStep:
    """The steps of `structure` for at most `rows` sequences. Raises Unsupported if a part is not known.

    Args:
        structure: The model.
        kernels: Kernels of `DECODE_OPS`.
        cache: Pages of keys and values.
        turns: Tables of rotary positions.
        rows: Sequences at most.
    """

    def __init__(
        self,
        structure: Structure,
        kernels: KernelTable,
        cache: PagedCache,
        turns: tuple[Tensor, Tensor] | None,
        rows: int,
    ) -> None:
        self._like = parts.values(structure.embedding.weight)
        if DECODE_STEPS not in kernels or self._like.dtype not in _CLOSE:
            raise Unsupported("no kernels of steps")
        self._structure, self._turns, self._steps = structure, turns, list[DecodeStep]()
        self._kernel, self._runs = kernels[DECODE_STEPS], list[Callable[[int], Any]]()
        self._slots, self._positions = (torch.zeros(rows, dtype=torch.int64) for _ in "sp")
        self._rows = rows
        self._summed_together: tuple[nn.Module, ...] = ()
        """Layers whose outputs are added up over ranks later, all at once."""
        self._x = self._memory(parts.width_of(structure.embedding))
        for index, layer in enumerate(structure.layers):
            self._add_layer(layer, cache.layer(index))
        x = self._x if structure.final_norm is None else self._normed(structure.final_norm, self._x)
        self._out = self._linear(structure.head, x)
        self._end_run()

    def __call__(self, x: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Return logits of embedded tokens (sequences, width)."""
        rows = len(x)
        self._x[:rows], self._slots[:rows], self._positions[:rows] = x, slots, positions
        for run in self._runs:
            run(rows)
        found: Tensor = self._out[:rows].clone()
        return found

    def _memory(self, width: int) -> Tensor:
        found: Tensor = self._like.new_zeros(self._rows, width)
        return found

    def _add_layer(self, layer: Layer, pages: LayerPages) -> None:
        choice, x = self._structure.choice, self._x
        if choice.is_parallel:
            normed = self._normed(layer.first_norm, x)
            other = normed if layer.second_norm is None else self._normed(layer.second_norm, x)
            self._summed_together = _summed_together(layer)
            both = self._attended(layer, pages, normed)
            fed = self._fed(layer, other)
            self._steps.append(RowwiseStep("add", both, both, fed))
            shared = [found for one in self._summed_together if (found := parts.shared_linear(one)) is not None]
            self._summed_together = ()
            if shared:
                self._sum(shared[0].ranks, both, [one.bias for one in shared])
            self._steps.append(RowwiseStep("add", both, x, x))
            return
        assert layer.second_norm is not None  # or the choice would be parallel
        attended = self._attended(layer, pages, self._normed(layer.first_norm, x) if choice.norms_first else x)
        self._steps.append(RowwiseStep("add", attended, x, x))
        if not choice.norms_first:
            self._normed(layer.first_norm, x, x)
        fed = self._fed(layer, self._normed(layer.second_norm, x) if choice.norms_first else x)
        self._steps.append(RowwiseStep("add", fed, x, x))
        if not choice.norms_first:
            self._normed(layer.second_norm, x, x)

    def _attended(self, layer: Layer, pages: LayerPages, x: Tensor) -> Tensor:
        found = self._structure
        head, heads, key_heads = found.head_numel, found.heads, found.key_heads
        projected = [self._linear(one, x) for one in layer.inputs]
        if layer.head_norms is not None:
            if len(projected) == 1:
                raise Unsupported("norms of heads of a fused product")
            for norm, one in zip(layer.head_norms, projected, strict=False):
                self._normed(norm, one, one, one.shape[1] // head)
        if len(projected) == 1 and found.choice.heads_together:
            q, k, v = projected[0].view(self._rows, heads, 3 * head).chunk(3, dim=-1)
        elif len(projected) == 1:
            sizes = [heads * head, key_heads * head, key_heads * head]
            q, k, v = (one.view(self._rows, -1, head) for one in torch.split(projected[0], sizes, dim=-1))
        else:
            q, k, v = (one.view(self._rows, -1, head) for one in projected)
        out = self._memory(heads * head)
        fixed = (pages, self._turns, heads, layer.scale)
        self._steps.append(AttentionStep(*fixed, q, k, v, out, self._slots, self._positions))
        return self._linear(layer.output, out)

    def _fed(self, layer: Layer, x: Tensor) -> Tensor:
        if layer.fc is not None:
            first, activation, second = layer.fc
            return self._linear(second, self._activated(activation, self._linear(first, x)))
        roles = parts.mlp_roles(layer.mlp)
        if roles is None:
            raise Unsupported("a feed-forward part of another form")
        activation, inputs, down = roles
        projected = [self._linear(one, x) for one in inputs]
        if getattr(layer.mlp, "gate_up_proj", None) is not None:
            projected = list(projected[0].chunk(2, dim=-1))
        return self._linear(down, self._activated(activation, *projected))

    def _activated(self, activation: Any, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = self._memory(x.shape[1])
        self._steps.append(RowwiseStep(_activation_kind(activation), x, y, other))
        return y

    def _end_run(self) -> None:
        """Let the operations so far be a call."""
        if self._steps:
            self._runs.append(self._kernel(self._steps))
            self._steps = []

    def _linear(self, module: nn.Module, x: Tensor) -> Tensor:
        shared = parts.shared_linear(module)
        if shared is not None:
            return self._shared(shared, x, is_summed=not any(module is one for one in self._summed_together))
        found = parts.weights_of(module)
        if found is None:
            raise Unsupported(f"a layer of {type(module).__name__}")
        return self._product(*found, x)

    def _shared(self, layer: parts.SharedLinear, x: Tensor, *, is_summed: bool) -> Tensor:
        """See [Note: Exchanges in a token]."""
        ranks, sizes = layer.ranks, layer.sizes
        if not layer.adds_up:
            own = self._product(layer.weight, layer.bias, x)
            if sizes is None:
                return own
            whole = self._memory(sum(sizes))
            self._end_run()
            self._runs.append(lambda rows: whole[:rows].copy_(ranks.gathered(own[:rows], 1, sizes)))
            return whole
        y = self._product(layer.weight, None, x if sizes is None else ranks.part(x, 1, sizes))
        if is_summed:
            self._sum(ranks, y, [layer.bias])
        return y

    def _sum(self, ranks: TensorRanks, y: Tensor, biases: list[Tensor | None]) -> None:
        self._end_run()
        self._runs.append(lambda rows: ranks.sum(y[:rows]))
        self._steps += [RowwiseStep("add", y, y, one.expand(self._rows, -1)) for one in biases if one is not None]

    def _product(self, weight: Any, bias: Any, x: Tensor) -> Tensor:
        is_packed = isinstance(weight, PackedWeight)
        if not is_packed and (weight.dtype is not x.dtype or 1 not in weight.stride()):
            raise Unsupported(f"a weight of {weight.dtype}")
        if bias is not None and (bias.dtype is not x.dtype or not bias.is_contiguous()):
            raise Unsupported(f"a bias of {bias.dtype}")
        y = self._memory(weight.outputs if is_packed else weight.shape[0])
        self._steps.append(LinearStep(weight, bias, x, y))
        return y

    def _normed(self, module: nn.Module, x: Tensor, y: Tensor | None = None, per_row: int = 1) -> Tensor:
        y = self._memory(x.shape[1]) if y is None else y
        kind, weight, bias, eps = _norm(module, x.dtype, x.shape[1] // per_row)
        self._steps.append(RowwiseStep(kind, x, y, None, weight, bias, eps, per_row))
        return y


def _summed_together(layer: Layer) -> tuple[nn.Module, ...]:
    """The last layers of both halves, if the outputs of each are added up over the same ranks."""
    roles = layer.fc if layer.fc is not None else parts.mlp_roles(layer.mlp)
    if roles is None:
        return ()
    ends = layer.output, roles[2]
    shared = [parts.shared_linear(one) for one in ends]
    first, second = shared
    if first is None or second is None or first.ranks is not second.ranks:
        return ()
    return ends if first.adds_up and second.adds_up else ()


def _activation_kind(activation: Any) -> str:
    x = torch.linspace(-9, 9, 257)
    if not isinstance(activation, nn.Module) or next(activation.parameters(), None) is None:
        found = activation(x.clone())
        for name, known in _ACTIVATIONS.items():
            if found.shape == x.shape and torch.allclose(found, known(x), rtol=1e-5, atol=1e-6):
                return name
    raise Unsupported(f"an activation of {type(activation).__name__}")


def _norm(module: nn.Module, dtype: torch.dtype, width: int) -> tuple[str, Tensor, Tensor | None, float]:
    weight, bias = (parts.values(getattr(module, name, None)) for name in ("weight", "bias"))
    if weight is None or any(
        one is not None and (one.dtype is not dtype or one.shape != (width,)) for one in (weight, bias)
    ):
        raise Unsupported(f"a norm of {type(module).__name__}")
    if parts.is_plain(module, nn.LayerNorm):
        return "layer_norm", weight, bias, float(getattr(module, "eps", 0.0))
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if bias is not None or not isinstance(eps, float) or not parts.has_forward_of_class(module):
        raise Unsupported(f"a norm of {type(module).__name__}")
    known = type(module), dtype
    if known not in _IS_RMS:
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(5)).to(dtype)
        wanted = weight * (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()).to(dtype)
        _IS_RMS[known] = torch.allclose(module(x), wanted, rtol=_CLOSE[dtype], atol=_CLOSE[dtype])
    if not _IS_RMS[known]:
        raise Unsupported(f"a norm of {type(module).__name__}")
    return "rms_norm", weight, None, eps
