"""The Newton-Schulz iteration of Muon, on one matrix or on a batch of equal shape.

It replaces the singular values of a matrix by numbers near 1 (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/): X <- aX + b(XX')X + c(XX')(XX')X, begun at the matrix divided by its norm.

[Note: Gram iteration]
All factors of X are polynomials of XX', which is small where X is wide. So the iteration can run on XX' alone, and X is
multiplied once with the product of all factors. A singular value s is s*s in XX', which loses small ones to rounding.
So X is multiplied after two steps too, where small ones have grown twelvefold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyaccel.engine.policies.muon import RESTART_STEP, gains_by_gram

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the quintic: of all that keep singular values near 1, those with the largest slope at 0."""
_EPS = 1e-7


def orthogonalize(matrices: Tensor, steps: int, dtype: torch.dtype, method: str = "gram") -> Tensor:
    """Return the orthogonal factor of matrices, nearly, computed in `dtype`. The first dimensions count them.

    With `method` "gram", wide and tall matrices have the iteration that takes fewer products.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(dtype)
    x = x.mT if is_tall else x
    shape = x.shape
    x = x.reshape(-1, *shape[-2:]) if x.dim() != 2 else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _EPS)
    by_gram = method == "gram" and gains_by_gram(x.size(-1) / max(1, x.size(-2)), steps)
    x = _by_gram(x, steps) if by_gram else _standard(x, steps)
    x = x.reshape(shape)
    return x.mT if is_tall else x


def _standard(x: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = _product(x, _product(gram, gram, gram, b, c), x, a)
    return x


def _by_gram(x: Tensor, steps: int) -> Tensor:
    """See [Note: Gram iteration]."""
    a, b, c = COEFFICIENTS
    gram, factor = x @ x.mT, None
    for step in range(steps):
        if step == RESTART_STEP and factor is not None:
            x = factor @ x
            gram, factor = x @ x.mT, None
        change = _product(gram, gram, gram, b, c)
        if factor is None:
            factor = change.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = _product(factor, change, factor, a)
        if step + 1 not in (RESTART_STEP, steps):
            half = _product(gram, change, gram, a)
            gram = _product(half, change, half, a)
    return x if factor is None else factor @ x


def _product(added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """`beta * added + alpha * left @ right`."""
    if added.dim() == 2:
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)


def update_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the iteration: float64 for float64, else float32 on the CPU and bfloat16 elsewhere."""
    if dtype is torch.float64:
        return dtype
    return torch.float32 if device.type == "cpu" else torch.bfloat16
