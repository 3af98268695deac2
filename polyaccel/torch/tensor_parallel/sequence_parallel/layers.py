"""The classes that blocks and regions get where tensor ranks share the tokens between them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyaccel.errors import ShardingError
from polyaccel.torch.tensor_parallel.sequence_parallel.stream import TokenStream

_NAME = "hidden_states"


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
