"""Any function of tokens in tiles: computed again in the backward pass (`tiled_map`), or with gradients that are there
after the forward pass (`tiled_sum`).

Both add the gradients of 16-bit parameters up in float32, and give each parameter one gradient, whatever the number of
tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from polyaccel.errors import PolyaccelError
from polyaccel.torch.activation_checkpointing.state import RegionState
from polyaccel.torch.sharding.hooks import apart_from_passes

OfTile = Callable[..., Tensor]


def tiled_map(
    function: OfTile, x: Tensor, *others: Tensor, tile_tokens: int, parameters: Iterable[Tensor] | None = None
) -> Tensor:
    """`function(x, *others)`, computed for `tile_tokens` tokens at a time and once more in the backward pass, so that
    nothing but `x` is kept and what is inside of `function` is there for one tile.

    `x` is (..., tokens, features), `others` have a number or a vector for each token of `x` and get no gradient; a tile
    is (1, tokens, ...). `function` treats each token by itself and gives (1, tokens, ...). `parameters` are those that
    it uses: None asks a module for its own, and finds those of another function by computing one tile more. The same
    random numbers are drawn both times, but not as without tiles. Raises PolyaccelError for `others` that do not fit.
    """
    tiles = _Tiles(function, x, others, tile_tokens)
    if not torch.is_grad_enabled():
        return _mapped(tiles, x)
    used = _parameters_of(tiles, x, parameters)
    out: Tensor = _Map.apply(tiles, x, *used)  # type: ignore[no-untyped-call]
    return out


def tiled_sum(
    function: OfTile, x: Tensor, *others: Tensor, tile_tokens: int, parameters: Iterable[Tensor] | None = None
) -> Tensor:
    """The sum of `function(x, *others)`, scalars, over tiles as in `tiled_map`: for losses, whose gradients are
    computed tile by tile in the forward pass, so that neither is done twice."""
    tiles = _Tiles(function, x, others, tile_tokens)
    used = _parameters_of(tiles, x, parameters) if torch.is_grad_enabled() else ()
    wants = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *used))
    out: Tensor = _Sum.apply(tiles, wants, x, *used)  # type: ignore[no-untyped-call]
    return out


class _Tiles:
    """A function, and the tokens that it is called with."""

    def __init__(self, function: OfTile, x: Tensor, others: Sequence[Tensor], tile_tokens: int) -> None:
        shape = x.shape[:-1]
        for other in others:
            if other.shape[: len(shape)] != shape:
                raise PolyaccelError(
                    f"a tensor of shape {tuple(other.shape)} with tokens of shape {tuple(x.shape)}",
                    hint="pass tensors with a number or a vector for each token",
                    value=tuple(other.shape),
                )
        self.function = function
        self.shape = shape
        self._others = [other.detach().reshape(1, -1, *other.shape[len(shape) :]) for other in others]
        self._tokens = tile_tokens
        self._count = x.numel() // max(1, x.shape[-1])
        self.random = _RngReplay(x.device, function)
        """For a second run of all tiles, in the same order."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each tile; one that is empty where there are no tokens."""
        starts = range(0, self._count, self._tokens) or [0]
        return [(start, min(start + self._tokens, self._count)) for start in starts]

    def run(self, x: Tensor, span: tuple[int, int]) -> Tensor:
        """The function of the tile `x`."""
        return self.function(x, *(other[:, span[0] : span[1]] for other in self._others))


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(1, -1, x.shape[-1])


def _mapped(tiles: _Tiles, x: Tensor) -> Tensor:
    whole: Tensor | None = None
    rows = _flat(x)
    for start, end in tiles.spans:
        part = tiles.run(rows[:, start:end], (start, end))
        if whole is None:  # not a view, which autograd would not let a model change in place (Llama 4)
            whole = part.new_empty((*tiles.shape, *part.shape[2:]))
            parts = whole.view(rows.shape[1], *part.shape[2:])
        parts[start:end] = part[0]
    assert whole is not None  # there is a span, be it empty
    return whole


class _Map(Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.tiles, ctx.parameters = tiles, parameters
        ctx.save_for_backward(x)
        tiles.random.note()
        version = x._version
        out = _mapped(tiles, x)
        tiles.random.end()
        if x._version != version:
            name = type(tiles.function).__name__ if isinstance(tiles.function, nn.Module) else repr(tiles.function)
            raise PolyaccelError(
                f"cannot be computed in tiles: {name} changes its input in place",
                hint="compute a new tensor there (x = x * 2 for x *= 2), or leave this layer out of tiled_compute.mlps",
                value=name,
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tiles: _Tiles = ctx.tiles
        (x,) = ctx.saved_tensors
        rows, grads = _flat(x), grad.reshape(1, -1, *grad.shape[len(tiles.shape) :])
        sums = _Sums(rows if ctx.needs_input_grad[1] else None, ctx.parameters, ctx.needs_input_grad[2:])
        with tiles.random.again():
            for start, end in tiles.spans:
                tile = rows[:, start:end].detach().requires_grad_(sums.wants_rows)
                with torch.enable_grad():
                    out = tiles.run(tile, (start, end))
                sums.add(out, grads[:, start:end], tile, start)
        return (None, *sums.found(x))


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, wants: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        rows, total = _flat(x), None
        needed = [wants and one for one in ctx.needs_input_grad[2:]]
        sums = _Sums(rows if needed[0] else None, parameters, needed[1:])
        for start, end in tiles.spans:
            tile = rows[:, start:end].detach().requires_grad_(sums.wants_rows)
            with apart_from_passes():
                with torch.set_grad_enabled(wants):
                    loss = tiles.run(tile, (start, end))
                if wants:
                    sums.add(loss, torch.ones_like(loss), tile, start)
            total = loss.detach().clone() if total is None else total + loss.detach()
        assert total is not None  # there is a span, be it empty
        ctx.save_for_backward(*sums.found(x, narrow=False))
        ctx.types = [each.dtype for each in (x, *parameters)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *scaled_gradients(ctx, grad))


def scaled_gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Multiply the gradients that a forward pass saved in `ctx` by `grad`, each in its type of `ctx.types`."""
    return [
        None if each is None else (each * grad.to(each.dtype)).to(dtype)
        for each, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
    ]


class _Sums:
    """Gradients of tiles: of the tokens (`rows`, None where none is needed) side by side, of parameters added up."""

    def __init__(self, rows: Tensor | None, parameters: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._of_rows = None if rows is None else torch.zeros_like(rows)
        self._wanted = [one for one, is_needed in zip(parameters, needed, strict=True) if is_needed]
        self._needed = tuple(needed)
        self._of: list[Tensor | None] = [None] * len(self._wanted)

    @property
    def wants_rows(self) -> bool:
        return self._of_rows is not None

    def add(self, out: Tensor, grad: Tensor, tile: Tensor, start: int) -> None:
        """Add the gradients of `out`, computed from `tile`, whose first token is `start`."""
        leaves = ([tile] if self.wants_rows else []) + self._wanted
        if not out.requires_grad or not leaves:
            return
        grads: list[Tensor | None] = list(torch.autograd.grad(out, leaves, grad, allow_unused=True))
        if self._of_rows is not None and (of_tile := grads.pop(0)) is not None:
            self._of_rows[:, start : start + tile.shape[1]] = of_tile
        for index, each in enumerate(grads):
            if each is None:
                continue
            total = self._of[index]
            if total is None:
                self._of[index] = each.to(torch.promote_types(each.dtype, torch.float32), copy=True)
            else:
                total += each

    def found(self, x: Tensor, *, narrow: bool = True) -> list[Tensor | None]:
        """For `x` and each parameter its gradient, in its own type where `narrow`."""
        sums = iter(zip(self._wanted, self._of, strict=True))
        rows = None if self._of_rows is None else self._of_rows.reshape(x.shape)
        found: list[Tensor | None] = [rows]
        for is_needed in self._needed:
            parameter, total = next(sums) if is_needed else (None, None)
            found.append(total.to(parameter.dtype) if narrow and total is not None and parameter is not None else total)
        return found


class _RngReplay:
    """Makes a second run of `function` draw the random numbers of the first, see the state that the first saw, and
    compute in the types of its autocast."""

    def __init__(self, device: torch.device, function: OfTile) -> None:
        self._device, self._function = device, function
        self._state: RegionState | None = None
        self._devices = [] if device.type == "cpu" else [device]
        self._random: Any = None

    def note(self) -> None:
        """The first run begins."""
        kind = self._device.type
        of_device = [getattr(torch, kind).get_rng_state(each) for each in self._devices]
        self._random = torch.get_rng_state(), of_device
        self._state = RegionState((self._function,))
        kinds = dict.fromkeys((kind, "cpu"))
        self._autocast = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in kinds]

    def end(self) -> None:
        """The first run has ended."""
        if self._state is not None:
            self._state.end_first_run()

    def again(self) -> AbstractContextManager[Any]:
        """Around the second run; afterwards random numbers and state continue where they were."""
        stack, kind = ExitStack(), self._device.type
        stack.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
        if self._state is not None:
            stack.enter_context(self._state.rerun())
        of_host, of_device = self._random
        torch.set_rng_state(of_host)
        for device, state in zip(self._devices, of_device, strict=True):
            getattr(torch, kind).set_rng_state(state, device)
        for each, is_on, dtype in self._autocast:
            stack.enter_context(torch.autocast(each, dtype=dtype, enabled=is_on))
        return stack


def _parameters_of(tiles: _Tiles, x: Tensor, given: Iterable[Tensor] | None) -> tuple[Tensor, ...]:
    if given is not None:
        found = list(given)
    elif isinstance(tiles.function, nn.Module):
        found = list(tiles.function.parameters())
    else:
        tiles.random.note()
        with tiles.random.again(), torch.enable_grad():
            found = leaves_of(tiles.run(_flat(x)[:, : tiles.spans[0][1]], tiles.spans[0]))
    return tuple({id(one): one for one in found if one.requires_grad}.values())


def leaves_of(out: Tensor) -> list[Tensor]:
    """The leaves that a gradient of `out` would reach."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found
