"""Whether a layer treats each token by itself, found by comparison: `treats_tokens_alone`.

The classes of the modules in a layer do not decide it: a forward that adds a token's neighbour, or the mean of all,
needs no module for that. So a copy computes the tokens of two rows, and then some of them in one row.
"""

from __future__ import annotations

from logging import getLogger
from typing import Any

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
    parameters = list(layer.parameters())
    if any(getattr(one, "parallel_cuts", None) for one in layer.modules()):
        return True
    widths = dict.fromkeys(size for one in parameters if one.dim() == 2 for size in reversed(one.shape))
    with unchanged_generators(), torch.no_grad(), torch.device("cpu"):
        for width in widths:
            try:
                own = random_copy(layer, thin=sum(one.numel() for one in parameters) > _THIN)
                return _is_alone(getattr(own, method), width)
            except Exception as error:  # another width, or a layer that cannot be copied
                _log.debug("%s of width %d: %s: %s", type(layer).__name__, width, type(error).__name__, error)
    return True


def _is_alone(function: Any, width: int) -> bool:
    x = torch.randn(_ROWS, _TOKENS, width, generator=torch.Generator().manual_seed(1))
    whole: Tensor = function(x.clone())
    part: Tensor = function(x.view(1, -1, width)[:, _CHOSEN].clone())
    rows = whole.reshape(1, _ROWS * _TOKENS, *whole.shape[2:])
    return bool(((rows[:, _CHOSEN] - part).abs() <= _CLOSE * rows.abs().max()).all())
