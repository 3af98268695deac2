"""The Newton-Schulz iteration of Muon, on one matrix or on a batch of equal shape.

It replaces the singular values of a matrix by numbers near 1 (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/): X <- aX + b(XX')X + c(XX')(XX')X, begun at the matrix divided by its norm.

[Note: Gram iteration]
All factors of X are polynomials of XX', which is small where X is wide. So the iteration can run on XX' alone, and X is
multiplied once with the product of all factors. A singular value s is s*s in XX', which loses small ones to rounding:
in float32 the result is within 1e-4 of its norm, where singular values span four decades and there are five steps. In
bfloat16 it is not (0.16, and 0.09 by the usual iteration), so that type has the usual iteration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyaccel.engine.policies.muon import gains_by_gram
from polyaccel.ops.torch.symmetric import symmetric_product

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the quintic: of all that keep singular values near 1, those with the largest slope at 0."""
_EPS = 1e-7
_MOST_SIZE = 1e9
"""Norm of a matrix whose product with itself has room in float32."""


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
    if _is_by_gram(x, steps, method):
        factor = _gram_factor(symmetric_product(None, x, x.mT), steps)
        x = x if factor is None else factor @ x
    else:
        x = _standard(x, steps)
    x = x.reshape(shape)
    return x.mT if is_tall else x


def add_orthogonalized(target: Tensor, matrix: Tensor, rate: float, steps: int, method: str = "gram") -> bool:
    """Add `rate` times the orthogonal factor of a matrix to `target`, without tensors of their size; return whether
    that was possible: by the Gram iteration, in the type of both."""
    is_tall = matrix.size(-2) > matrix.size(-1)
    x, into = (matrix.mT, target.mT) if is_tall else (matrix, target)
    size = x.norm().item() + _EPS
    if target.dtype is not x.dtype or not _is_by_gram(x, steps, method) or size > _MOST_SIZE:
        return False
    factor = _gram_factor(symmetric_product(None, x, x.mT, alpha=size**-2), steps)
    if factor is None:
        into.add_(x, alpha=rate / size)
    else:
        into.addmm_(factor, x, alpha=rate / size)
    return True


def _is_by_gram(x: Tensor, steps: int, method: str) -> bool:
    is_exact = x.dtype in (torch.float32, torch.float64)
    return method == "gram" and is_exact and gains_by_gram(x.size(-1) / max(1, x.size(-2)), steps)


def _standard(x: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = symmetric_product(None, x, x.mT)
        x = _product(x, symmetric_product(gram, gram, gram, b, c), x, a)
    return x


def _gram_factor(gram: Tensor, steps: int) -> Tensor | None:
    """The product of all factors, by XX'; None without steps. See [Note: Gram iteration]."""
    a, b, c = COEFFICIENTS
    factor = None
    for step in range(steps):
        change = symmetric_product(gram, gram, gram, b, c)
        if factor is None:
            factor = change.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = symmetric_product(factor, change, factor, a)
        if step + 1 < steps:
            half = symmetric_product(gram, change, gram, a)
            gram = symmetric_product(half, change, half, a)
    return factor


def _product(added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """`beta * added + alpha * left @ right`."""
    if added.dim() == 2:
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)


def update_dtype(device: torch.device, dtype: torch.dtype, chosen: str | None) -> torch.dtype:
    """Return the type of the iteration: float64 for float64, else the `chosen` one. None is float32 on the CPU and
    bfloat16 elsewhere."""
    if dtype is torch.float64:
        return dtype
    if chosen is not None:
        return torch.bfloat16 if chosen == "bfloat16" else torch.float32
    return torch.float32 if device.type == "cpu" else torch.bfloat16
