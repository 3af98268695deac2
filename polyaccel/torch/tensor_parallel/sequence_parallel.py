"""What passes between blocks where tensor ranks share its tokens, and the exchanges at both ends of a region.

[Note: Token-sharded regions]
From the input of the first block to the output of the last each rank has some of the tokens. Where a region begins
(attention, a feed-forward layer) they are gathered, and the row layer at its end adds up what the ranks found and
leaves each its tokens. So norms, dropouts and sums between regions are computed once and not once a rank, and what
autograd keeps of them is a part. Gathered tokens are not kept: in backward they are gathered again, by the first column
layer that needs them for all that read them. (Korthikanti et al., 2022.)

Which tokens a rank has follows from the length of a pass. Blocks receive it by an argument, `token_sizes`, for they run
again in backward where their activations are recomputed, when there may have been another pass.

What a rank draws in between is its own: its numbers are those of other tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from polyaccel.errors import ShardingError
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.sharding.units import find_blocks
from polyaccel.torch.tensor_parallel.functions import gathered, part_of, shared_weight, summed_part
from polyaccel.torch.tensor_parallel.plan import CutPlan, TokenPlan
from polyaccel.torch.tensor_parallel.products import as_autocast, changeable, chosen, input_grad, product, weight_grads
from polyaccel.torch.tensor_parallel.ranks import TensorRanks, even_parts
from polyaccel.torch.tensor_parallel.regions import Regions
from polyaccel.torch.tensor_parallel.structure import CutRegion

_DIM = 1
"""Of what passes between blocks (batch, tokens, features)."""
_NAME = "hidden_states"
_KEY = "tensor_parallel.sequence_sharded"


class TokenStream:
    """What passes between the blocks of one model. `sizes` are the ranks' numbers of tokens in the present pass; None
    where all have all: outside of blocks, and in passes of fewer tokens than ranks. See
    [Note: Token-sharded regions]."""

    def __init__(self, ranks: TensorRanks, regions: Regions) -> None:
        self.sizes: tuple[int, ...] | None = None
        self._ranks = ranks
        self._regions = regions
        self._gathered: _GatheredTokens | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenStream:
        twin = memo[id(self)] = TokenStream(self._ranks, copy.deepcopy(self._regions, memo))
        return twin

    @outside_graphs
    def begin(self, x: Tensor, *, draws_apart: bool) -> Tensor:
        """This rank's tokens of what enters the first block."""
        if x.dim() != _DIM + 2:
            raise ShardingError(
                f"blocks are given a tensor of shape {tuple(x.shape)}, and not one of (batch, tokens, features)",
                hint="leave tensor_parallel.sequence_sharded out",
                value=tuple(x.shape),
            )
        length, self.sizes = x.shape[_DIM], None
        if length < self._ranks.size:
            return x
        self.sizes = even_parts(length, self._ranks.size)
        if draws_apart:
            self._regions.enter(x)
        return part_of(x, self._ranks, _DIM, self.sizes)

    @outside_graphs
    def end(self, x: Tensor) -> Tensor:
        """All tokens of what leaves the last block."""
        sizes, self.sizes = self.sizes, None
        if sizes is None:
            return x
        self._regions.leave()
        return gathered(x, self._ranks, _DIM, sizes)

    def forget(self) -> None:
        """The pass is over, even if it ended in the middle."""
        self.sizes = self._gathered = None

    @contextmanager
    def in_pass(self, sizes: tuple[int, ...] | None) -> Iterator[None]:
        """A block of a pass with these `sizes` runs."""
        before, self.sizes = self.sizes, sizes
        try:
            yield
        finally:
            self.sizes = before

    @contextmanager
    def region(self, x: Tensor) -> Iterator[Tensor]:
        """A region runs whose input is `x`: gives all tokens of it."""
        before, self._gathered = self._gathered, None
        try:
            if self.sizes is not None:
                (x,) = as_autocast(x)
                tokens = self._gathered = _GatheredTokens(x, self._ranks, self.sizes)
                x = tokens.whole
            yield x
        finally:
            self._gathered = before

    @outside_graphs
    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        """This rank's outputs of a linear layer, for all tokens."""
        tokens = self._gathered
        if tokens is None or not tokens.are(x) or not torch.is_grad_enabled():
            return product(chosen(x, weight, bias, self._ranks, transposed), x, weight, bias, transposed)
        return _ColumnOfTokens.apply(x, tokens.part, weight, bias, tokens.again, transposed)  # type: ignore[no-untyped-call, no-any-return]

    @outside_graphs
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        """The whole outputs of a linear layer for this rank's tokens, of its part `x` of the inputs for all tokens."""
        assert self.sizes is not None
        products = chosen(x, weight, None, self._ranks, transposed)
        out = summed_part(product(products, x, weight, None, transposed), self._ranks, _DIM, self.sizes)
        return out if bias is None else out + shared_weight(bias, self._ranks)


class _GatheredTokens:
    """All tokens of what enters a region, of which `part` is this rank's."""

    def __init__(self, part: Tensor, ranks: TensorRanks, sizes: tuple[int, ...]) -> None:
        self.part = part.detach()
        self.again = _Again(ranks, sizes)
        self.whole: Tensor = _Gather.apply(part, self.again)  # type: ignore[no-untyped-call]
        self._version = self.whole._version

    def are(self, x: Tensor) -> bool:
        """Return whether `x` has these tokens, and nothing was changed in place."""
        return x is self.whole and x._version == self._version


class _Again:
    """Gathers tokens in backward, once for all that read them."""

    def __init__(self, ranks: TensorRanks, sizes: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.sizes = sizes
        self._whole: Tensor | None = None

    def whole(self, part: Tensor) -> Tensor:
        if self._whole is None:
            self._whole = self.ranks.gathered(part, _DIM, self.sizes)
        return self._whole

    def forget(self) -> None:
        """All that read them have had their backward."""
        self._whole = None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, again: _Again) -> Tensor:
        ctx.again = again
        return again.ranks.gathered(part, _DIM, again.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        again: _Again = ctx.again
        again.forget()
        return summed_part(grad, again.ranks, _DIM, again.sizes), None


class _ColumnOfTokens(Function):
    """A linear layer that keeps this rank's tokens for its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, again: _Again, transposed: bool
    ) -> Tensor:
        ctx.again, ctx.transposed = again, transposed
        ctx.products = chosen(x, weight, bias, again.ranks, transposed)
        ctx.save_for_backward(part if ctx.needs_input_grad[2] else None, weight)
        return changeable(product(ctx.products, x, weight, bias, transposed))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        of_x = input_grad(ctx, grad, weight, None) if ctx.needs_input_grad[0] else None
        x = None if part is None else ctx.again.whole(part)
        return of_x, None, *weight_grads(ctx, grad, x, of_bias=ctx.needs_input_grad[3]), None, None


class TokenBlock(nn.Module):
    """A block, which runs on this rank's tokens. The first one is given all, and the last one gives all."""

    tokens: TokenStream
    is_first: bool
    is_last: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block gives. What it is called with is kept where it is recomputed: tokens are cut before."""
        if self.is_first:
            part = self.tokens.begin(_input_of(self, args, kwargs), draws_apart=self.training)
            args, kwargs = _with_input(part, args, kwargs)
        out = super().__call__(*args, token_sizes=self.tokens.sizes, **kwargs)
        if not self.is_last:
            return out
        return (self.tokens.end(out[0]), *out[1:]) if isinstance(out, tuple) else self.tokens.end(out)

    def forward(self, *args: Any, token_sizes: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        """The block's own, on tokens of a pass with `token_sizes`."""
        with self.tokens.in_pass(token_sizes):
            return super().forward(*args, **kwargs)


class TokenRegion(nn.Module):
    """A module that works on all tokens: attention, or a feed-forward layer. What it gives is this rank's tokens."""

    tokens: TokenStream

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        with self.tokens.region(_input_of(self, args, kwargs)) as whole:
            args, kwargs = _with_input(whole, args, kwargs)
            return super().forward(*args, **kwargs)


def _input_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the module works on. Raises ShardingError where that is not found."""
    found = args[0] if args else kwargs.get(_NAME)
    if isinstance(found, Tensor):
        return found
    kind = type(module).__name__
    raise ShardingError(
        f"a {kind} is called without tokens: neither is its first argument a tensor, nor has it one named {_NAME}",
        hint="leave tensor_parallel.sequence_sharded out",
        value=kind,
    )


def _with_input(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with `x` in place of what the module works on."""
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, _NAME: x})


def with_shared_tokens(plan: CutPlan, model: nn.Module, regions: Iterable[CutRegion]) -> CutPlan:
    """Return `plan` with tokens shared between `regions`. Raises ShardingError for other layers there."""
    modules = dict(model.named_modules())
    inside = {region.name: region for region in regions}
    blocks = tuple(find_blocks(model))
    lists = {name.rpartition(".")[0] for name in blocks}
    kind = type(model).__name__
    if len(lists) != 1 or not inside:
        raise _refused(kind, f"it has {len(lists)} lists of blocks, and not one")
    for name, region in inside.items():
        _check_region(region, blocks, plan, modules)
        if not any(name.startswith(f"{block}.") for block in blocks):
            raise _refused(name, "it is not a module inside of a block")
    weights = {}
    for block in blocks:
        if not any(name.startswith(f"{block}.") for name in inside):
            raise _refused(block, "nothing of it is cut")
        for name, module in modules[block].named_modules(prefix=block):
            own = dict(module.named_parameters(recurse=False))
            if not own or any(name == region or name.startswith(f"{region}.") for region in inside):
                continue
            if any(parameter.dim() != 1 for parameter in own.values()):
                raise _refused(name, "it stands between regions that are cut, and is not a norm")
            weights[name] = tuple(own)
    return replace(plan, tokens=TokenPlan(blocks, tuple(inside), weights))


def _check_region(region: CutRegion, blocks: Iterable[str], plan: CutPlan, modules: Mapping[str, nn.Module]) -> None:
    """Raise ShardingError for a region that needs more than its tokens gathered before and its outputs added up."""
    by_name = {each.name: each for each in plan.modules}
    if region.name in blocks:
        raise _refused(region.name, "its layers stand in the block itself, and not in a separate module")
    for layer in region.layers:
        if not layer.startswith(f"{region.name}."):
            raise _refused(region.name, f"{layer} stands outside of it")
    rows = [each for each in region.modules if each.how == "row"]
    if len(rows) != 1:
        raise _refused(region.name, "it has experts, or ends in no layer that is cut by its inputs")
    for name, module in modules[region.name].named_modules(prefix=region.name):
        own = [each for each, _ in module.named_parameters(recurse=False)]
        cut = by_name.get(name)
        if own and (cut is None or cut.sizes is not None or cut.how not in ("column", "row", "shared weights")):
            raise _refused(name, "its weights are whole, and all ranks compute the same with them")


def _refused(name: str, why: str) -> ShardingError:
    return ShardingError(
        f"{_KEY}: tensor ranks cannot share the tokens of {name}: {why}",
        hint=f"leave {_KEY} out, or share sequences by sequence_parallel_size",
        value=name,
    )
