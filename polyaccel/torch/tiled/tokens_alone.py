"""Whether a layer treats each token by itself, and all by the same modules, found by comparison.

The classes of the modules in a layer do not decide it: a forward that adds a token's neighbour, or the mean of all,
needs no module for that. So a copy computes the tokens of two rows, and then some of them in one row.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger

import torch
from torch import Tensor, nn

from polyaccel.torch.random_copy import random_copy, unchanged_generators

_ROWS, _TOKENS = 2, 5
_CHOSEN = slice(3, 6)
"""Of both rows."""
_CLOSE = 1e-3
"""Tokens that interact differ by about 1 of their size; rounding by 1e-6."""
_THIN = 1 << 20
"""Elements of a layer from which on its copy is thin."""
_log = getLogger(__name__)


def treats_tokens_alone(layer: nn.Module, method: str = "forward") -> bool:
    """Return whether a `method` of one argument gives each token what it gives it among others.

    True where that cannot be computed: a layer that is cut over ranks, or takes no (rows, tokens, features).
    """
    found = _computed(layer, method, _is_alone)
    return found is None or found


def chooses_modules(layer: nn.Module, method: str = "forward") -> bool:
    """Return whether tokens take different ways through the modules in a layer, as among experts."""
    return bool(_computed(layer, method, _has_ways))


def _computed(layer: nn.Module, method: str, of: Callable[[nn.Module, str, Tensor], bool]) -> bool | None:
    """Return `of` a copy of a layer, its method and tokens; None where that cannot be computed."""
    parameters = list(layer.parameters())
    if any(getattr(one, "parallel_cuts", None) for one in layer.modules()):
        return None
    widths = dict.fromkeys(size for one in parameters if one.dim() == 2 for size in reversed(one.shape))
    with unchanged_generators(), torch.no_grad(), torch.device("cpu"):
        for width in widths:
            x = torch.randn(_ROWS, _TOKENS, width, generator=torch.Generator().manual_seed(1))
            try:
                return of(random_copy(layer, thin=sum(one.numel() for one in parameters) > _THIN), method, x)
            except Exception as error:  # another width, or a layer that cannot be copied
                _log.debug("%s of width %d: %s: %s", type(layer).__name__, width, type(error).__name__, error)
    return None


def _is_alone(own: nn.Module, method: str, x: Tensor) -> bool:
    function = getattr(own, method)
    whole: Tensor = function(x.clone())
    part: Tensor = function(x.view(1, -1, x.shape[-1])[:, _CHOSEN].clone())
    rows = whole.reshape(1, _ROWS * _TOKENS, *whole.shape[2:])
    return bool(((rows[:, _CHOSEN] - part).abs() <= _CLOSE * rows.abs().max()).all())


def _has_ways(own: nn.Module, method: str, x: Tensor) -> bool:
    ways = set()
    called: list[nn.Module] = []
    for one in own.modules():
        one.register_forward_pre_hook(lambda module, _: called.append(module))
    for token in x.view(-1, 1, 1, x.shape[-1]):
        called.clear()
        getattr(own, method)(token.clone())
        ways.add(frozenset(called))
    return len(ways) > 1
