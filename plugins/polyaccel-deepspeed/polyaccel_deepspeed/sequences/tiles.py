"""Computation in tiles by DeepSpeed's names (ALST). `shards` there are tiles here; `compute_params` are the parameters
that a function uses in addition to those of the module that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.tiled import tiled_map, tiled_sum


class _Applied:
    """What is an autograd function of torch's in DeepSpeed, of which `apply` is called and no instance made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = type(self).__name__
        raise PolyaccelError(f"{kind} was made an instance of", hint=f"call {kind}.apply(...)", value=kind)


class TiledMLP(_Applied):
    """`TiledMLP.apply(function, module, x, shards, compute_params)`: `function(module, x)` in tiles of tokens."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor, shards: int, compute_params: Iterable[Tensor] | None
    ) -> Tensor:
        """The output for all of `x` (..., tokens, features); a tile is (1, tokens, features)."""
        tokens = _tokens(x.numel() // x.shape[-1], shards)
        return tiled_map(
            lambda tile: fn(self, tile), x, tile_tokens=tokens, parameters=_parameters(self, compute_params)
        )


class TiledFusedLogitsLoss(_Applied):
    """`TiledFusedLogitsLoss.apply(function, module, x, y, mask, shards, compute_params, output_reduction)`: the mean or
    the sum of the losses `function(module, x, y[, mask])` of tiles of tokens, whose gradients are computed at once."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Iterable[Tensor] | None,
        output_reduction: Literal["mean", "sum"],
    ) -> Tensor:
        """`x` is (rows, tokens, features), `y` and `mask` (rows, tokens); a tile has tokens as its first dim."""
        _require_reduction(output_reduction, ("mean", "sum"))
        if x.dim() < 2 or x.shape[:2] != y.shape[:2] or (mask is not None and mask.shape != x.shape[:2]):
            shapes = [tuple(each.shape) for each in (x, y, mask) if each is not None]
            raise PolyaccelError(
                f"hidden states, targets and mask of the shapes {shapes} do not fit",
                hint="pass (rows, tokens, features), (rows, tokens) and (rows, tokens)",
                value=shapes,
            )
        count = x.shape[0] * x.shape[1]
        tokens = _tokens(count, shards)
        others = (y,) if mask is None else (y, mask)
        total = tiled_sum(
            lambda tile, *rest: fn(self, tile[0], *(each[0] for each in rest)),
            x,
            *others,
            tile_tokens=tokens,
            parameters=_parameters(self, compute_params),
        )
        return total if output_reduction == "sum" else total / -(-count // tokens)


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Literal["mean", "sum"] | None = "mean",
) -> Tensor:
    """`fn(**kwargs_to_shard, **kwargs_to_pass)` for parts of the tokens, which are dim 1 of what is cut.

    `output_unshard_dimension` 0: `fn` gives a loss, whose gradients are computed at once; else outputs with tokens in
    dim 1. Only `kwargs_to_shard[grad_requiring_tensor_key]` and parameters get gradients.
    """
    _require_reduction(output_reduction, ("mean", "sum") if output_unshard_dimension == 0 else ("mean", "sum", None))
    x = kwargs_to_shard[grad_requiring_tensor_key]
    names = [name for name in kwargs_to_shard if name != grad_requiring_tensor_key]
    rows, step = x.shape[0], _tokens(seqlen, shards)

    def whole(tile: Tensor) -> Tensor:
        """(1, tokens * rows, ...) as (rows, tokens, ...)."""
        return tile.view(-1, rows, *tile.shape[2:]).transpose(0, 1)

    def run(tile: Tensor, *others: Tensor) -> Tensor:
        cut = dict(zip((grad_requiring_tensor_key, *names), map(whole, (tile, *others)), strict=True))
        out = fn(**cut, **kwargs_to_pass)
        return out if output_unshard_dimension == 0 else out.transpose(0, 1).flatten(0, 1).unsqueeze(0)

    tokens_first = [one.transpose(0, 1) for one in (x, *(kwargs_to_shard[name] for name in names))]
    if output_unshard_dimension == 0:
        total = tiled_sum(run, *tokens_first, tile_tokens=step * rows, parameters=compute_params)
        return total if output_reduction == "sum" else total / -(-seqlen // step)
    out = tiled_map(run, *tokens_first, tile_tokens=step * rows, parameters=compute_params).transpose(0, 1)
    if output_reduction is None:
        return out
    return out.mean() if output_reduction == "mean" else out.sum()


class SequenceTiledCompute(_Applied):
    """What `sequence_tiled_compute` calls in DeepSpeed, with its arguments by position."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: list[str],
        keys_to_pass: list[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: Literal["mean", "sum"] | None,
        *args: Any,
    ) -> Tensor:
        """The values of `keys_to_shard`, then those of `keys_to_pass`, are `args`."""
        cut = dict(zip(keys_to_shard, args[: len(keys_to_shard)], strict=True))
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        key, dim, reduction = grad_requiring_tensor_key, output_unshard_dimension, output_reduction
        return sequence_tiled_compute(fn, seqlen, shards, cut, passed, key, compute_params, dim, reduction)


def _tokens(count: int, shards: int) -> int:
    return max(1, -(-count // shards))


def _parameters(module: Any, given: Iterable[Tensor] | None) -> list[Tensor] | None:
    """None: they are found by the graph."""
    own = list(module.parameters()) if isinstance(module, nn.Module) else []
    return None if given is None and not own else [*own, *(given or ())]


def _require_reduction(given: Any, allowed: tuple[Any, ...]) -> None:
    if given not in allowed:
        names = ", ".join(repr(one) for one in allowed)
        raise PolyaccelError(f"output_reduction is {given!r}", hint=f"use one of {names}", value=given)
