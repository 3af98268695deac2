"""A linear layer as a grid of smaller ones, so that stage 3 gathers one tile at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError


class TiledLinear(nn.Module):
    """`nn.Linear` in `out_splits` x `in_splits` tiles, the modules `linears[row][column]`. The last column has a bias.

    `input_is_already_split`: the input is a sequence of parts. Without `combine_out_splits` the output is a list.
    `linear_cls` makes the tiles, with the named arguments that are left. `init_linear` has the first values.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                hint = f"use 1 to {features}"
                raise WrongTiles(f"{name}_splits={splits} of {features} features", hint=hint, value=splits)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(right - left, bottom - top, bias=bias and right == in_features, **kwargs)
                for left, right in pairwise(self.in_parts)
            )
            for top, bottom in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """The layer's output, or its parts."""
        parts: Sequence[Tensor] = input_
        if not (self.input_is_already_split and self.in_splits > 1):
            parts = input_.split([right - left for left, right in pairwise(self.in_parts)], dim=-1)
        elif len(parts) != self.in_splits:
            what, hint = f"an input of {len(parts)} parts", f"pass {self.in_splits}, as in_splits says"
            raise WrongTiles(what, hint=hint, value=len(parts))
        rows = [self._add([tile(part) for tile, part in zip(row, parts, strict=True)]) for row in self._rows()]
        return self._join(rows) if self.combine_out_splits else rows

    def _rows(self) -> list[nn.ModuleList]:
        return list(self.linears)  # type: ignore[arg-type]  # of lists

    def _add(self, outputs: list[Any]) -> Any:
        """The output of a row of tiles."""
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def _join(self, rows: list[Any]) -> Any:
        """The output of all rows."""
        return torch.cat(rows, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a whole layer. Its parameters must be whole: at stage 3, inside `GatheredParameters`."""
        from polyaccel.zero import GatheredParameters

        for (top, bottom), row in zip(pairwise(self.out_parts), self._rows(), strict=True):
            for (left, right), tile in zip(pairwise(self.in_parts), row, strict=True):
                with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                    tile.get_parameter("weight").copy_(other.weight[top:bottom, left:right])
                    if tile._parameters.get("bias") is not None:
                        tile.get_parameter("bias").copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """Tiles that return (output, bias), as Megatron-LM's layers do; so does this layer."""

    def _add(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._add([output for output, _ in outputs]), (biases[-1] if biases else None)

    def _join(self, rows: list[Any]) -> Any:
        biases = [bias for _, bias in rows if bias is not None]
        return super()._join([output for output, _ in rows]), (torch.cat(biases, dim=-1) if biases else None)


class WrongTiles(PolyaccelError, RuntimeError):
    """Numbers of tiles that do not fit a layer or its input."""


def _bounds(features: int, splits: int) -> list[int]:
    """Where tiles begin, and the end: the first ones are longer where `splits` leaves a rest."""
    size, longer = divmod(features, splits)
    return [at * size + min(at, longer) for at in range(splits + 1)]
