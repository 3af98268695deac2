"""Logits and their cross-entropy in tiles of tokens (the idea of Liger's and ALST's fused losses).

[Note: Loss gradients in forward]
The loss is the end of a model: the gradient of a tile's logits follows from the tile alone, except for one factor that
all tiles have in common. So the forward pass computes the gradients of the sum of all losses and adds them up, and no
logits outlive their tile; the backward pass multiplies by the factor. Nothing is computed twice, and the weight is not
needed for the backward pass. Three products a token are computed, as many as without tiles. The gradients are kept as
those of the *sum*, so that numbers of tokens in the denominator do not make fp16 vanish.

Ranks that have some of the words each exchange a few numbers a token (`polyaccel.torch.tensor_parallel.cross_entropy`),
and add up what each finds to be the gradient of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.losses import IGNORED
from polyaccel.torch.tensor_parallel.cross_entropy import over_ranks
from polyaccel.torch.tensor_parallel.ranks import MatrixProducts, TensorRanks
from polyaccel.torch.tiled.functions import scaled_gradients

TILE_NUMEL = 1 << 22
"""Logits of a tile where its number of tokens is not set: 16 MB in float32, of which a few are alive at a time."""
_LEAST_TOKENS = 16


class VocabShard(NamedTuple):
    """The vocabulary range of this tensor-parallel rank: as many words as its weight has rows, from `first`."""

    ranks: TensorRanks
    first: int


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    reduction: Literal["mean", "sum"] = "mean",
    tile_tokens: int | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
    products: MatrixProducts | None = None,
    words: VocabShard | None = None,
) -> Tensor:
    """`cross_entropy(transform(linear(hidden, weight, bias)), targets)` without ever having the logits of more than
    `tile_tokens` tokens (None: about 4 million logits).

    `hidden` is (..., features), `weight` (classes, features), `targets` (...), of which those that are `ignore_index`
    do not count. "mean" is over those that count. The loss is in float32, or float64 where `hidden` is; the gradient of
    a 16-bit weight is added up in float32. `transform` works on each logit alone, and has no parameters. `products`
    compute the matrix products in place of torch's. With `words` the classes are shared by ranks, and `weight` and
    `bias` are of this rank's; `hidden` and `targets` are the same on all, and so is the loss. Raises PolyaccelError for
    shapes that do not fit.
    """
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = tuple(hidden.shape), tuple(weight.shape), tuple(targets.shape)
        raise PolyaccelError(
            "hidden states of shape {}, a weight of {} and targets of {} do not fit".format(*shapes),
            hint="pass hidden (..., features), weight (classes, features) and targets (...)",
            value=shapes,
        )
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(hidden.device)
    tokens = tile_tokens or max(_LEAST_TOKENS, TILE_NUMEL // max(1, weight.shape[0]))
    wants = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (rows, weight, bias))
    total: Tensor = _TiledLoss.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, labels, ignore_index, tokens, transform, products, words, wants
    )
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


class _TiledLoss(Function):
    """The sum of the losses of all rows. See [Note: Loss gradients in forward]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignored: int, tokens: int,
        transform: Callable[[Tensor], Tensor] | None, products: MatrixProducts | None, own: VocabShard | None,
        wants: bool,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((), dtype=wide)
        of_rows, of_weight, of_bias = (wants and needed for needed in ctx.needs_input_grad[:3])
        computed = _computed_in(rows, weight, bias)
        matrix, offset = computed(weight), None if bias is None else computed(bias)
        product = _Product(products, computed(rows[:1]), matrix, offset)
        gradients: list[Tensor | None] = [rows.new_empty(rows.shape) if of_rows else None]
        gradients += [torch.zeros_like(weight, dtype=_sum_type(weight)) if of_weight else None]
        gradients += [torch.zeros_like(bias, dtype=_sum_type(bias)) if of_bias and bias is not None else None]
        for start in range(0, len(rows), tokens):
            end = min(start + tokens, len(rows))
            tile, words = computed(rows[start:end]), labels[start:end]
            logits = product.output(tile, matrix, offset)
            loss, of_logits = _loss_and_gradient(logits, words, ignored, wide, transform, own, wants)
            del logits
            total += loss
            if of_logits is None:
                continue
            of_logits = of_logits.to(tile.dtype)
            if gradients[0] is not None:
                gradients[0][start:end] = product.input_grad(of_logits, matrix)
            if gradients[1] is not None:
                product.add_weight_grad(gradients[1], of_logits, tile)
            if gradients[2] is not None:
                gradients[2] += of_logits.sum(0, dtype=gradients[2].dtype)
        if own is not None and gradients[0] is not None:
            own.ranks.sum(gradients[0])
        ctx.save_for_backward(*gradients)
        ctx.has_no_targets = (labels == ignored).all()
        ctx.types = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A mean over no targets is 0/0, and torch gives no gradient to tokens that it ignores.
        grad = grad.masked_fill(ctx.has_no_targets, 0)
        return (*scaled_gradients(ctx, grad), *(None,) * 7)


def _loss_and_gradient(
    logits: Tensor, words: Tensor, ignored: int, wide: torch.dtype, transform: Callable[[Tensor], Tensor] | None,
    own: VocabShard | None, wants: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The sum of the losses of a tile, and its gradient in `logits`, which are overwritten."""
    leaf = final = logits
    if transform is not None:
        leaf = logits.detach().requires_grad_(wants)
        with torch.set_grad_enabled(wants):
            final = transform(leaf)
    numbers = final.detach().to(wide, copy=transform is not None)
    counts = is_here = words != ignored
    if own is not None:
        words = words - own.first
        is_here = counts & (words >= 0) & (words < numbers.shape[-1])
    place = words.masked_fill(~is_here, 0).unsqueeze(-1)
    log_sums, chosen = torch.logsumexp(numbers, -1), numbers.gather(-1, place).squeeze(-1)
    if own is not None:
        log_sums, chosen = over_ranks(own.ranks, log_sums, chosen.masked_fill_(~is_here, 0))
    loss = (log_sums - chosen).masked_fill_(~counts, 0).sum()
    if not wants:
        return loss, None
    found = numbers.sub_(log_sums.unsqueeze(-1)).exp_()
    found.scatter_add_(-1, place, is_here.to(found.dtype).neg_().unsqueeze(-1))
    found.masked_fill_(~counts.unsqueeze(-1), 0)
    if transform is None:
        return loss, found
    (found,) = torch.autograd.grad(final, leaf, found.to(final.dtype))
    return loss, found


class _Product:
    """The three products of the head: by `products` where those suit tiles like the first, else by torch."""

    def __init__(self, products: MatrixProducts | None, first: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._given = products if products is not None and weight.is_contiguous() else None
        self._suits: dict[int, bool] = {}

    def _of(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> MatrixProducts | None:
        if self._given is None:
            return None
        if len(x) not in self._suits:
            self._suits[len(x)] = self._given.suits(x.detach(), weight.detach(), bias)
        return self._given if self._suits[len(x)] else None

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits of a tile."""
        given = self._of(x, weight, bias)
        return functional.linear(x, weight, bias) if given is None else given.apply(x, weight, bias)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """The gradient of a tile's hidden states."""
        is_given = self._given is not None and self._suits.get(len(grad))
        return self._given.input_grad(grad, weight) if is_given and self._given is not None else grad @ weight

    def add_weight_grad(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add a tile's part of the weight's gradient to `total`."""
        if self._suits.get(len(grad)) and self._given is not None:
            total += self._given.weight_grad(grad, x)
        elif total.dtype is grad.dtype:
            total.addmm_(grad.t(), x)
        else:
            total += grad.t() @ x


def _sum_type(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _computed_in(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """What brings a tensor into the type of the products: autocast's, where that is on."""
    device = rows.device.type
    is_on = torch.is_autocast_enabled(device) and rows.dtype is not torch.float64
    dtype = torch.get_autocast_dtype(device) if is_on else rows.dtype
    return lambda tensor: tensor.detach().to(dtype)
