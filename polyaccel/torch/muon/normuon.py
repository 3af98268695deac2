"""The scale of rows that NorMuon adds to Muon (Li et al. 2025, arXiv 2510.05491).

Rows of an orthogonalised matrix are neurons, and their sizes differ. Each row is divided by the root of an average of
its mean square. Then the matrix gets the size that it had.
"""

from __future__ import annotations

from torch import Tensor

_EPS = 1e-8


def scale_rows(change: Tensor, averages: Tensor, beta: float) -> Tensor:
    """Return `change`, matrices, with scaled rows. `averages` has each row's number in all elements, and moves."""
    averages.lerp_(change.square().mean(-1, keepdim=True).to(averages).expand_as(averages), 1 - beta)
    scaled = change / (averages[..., :1].to(change).sqrt() + _EPS)
    size = change.norm(dim=(-2, -1), keepdim=True)
    return scaled.mul_(size / (scaled.norm(dim=(-2, -1), keepdim=True) + _EPS))
