"""Muon as its paper has it, in float64 and without a product of matrices, for whole models in plain torch."""

from __future__ import annotations

from typing import Any

import torch

SETTINGS = {"lr": 0.02, "adam_lr": 0.004, "momentum": 0.9, "weight_decay": 0.1}
"""Arguments of the config's Muon, equal to those of `PaperMuon`."""


def by_singular_values(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The update of a matrix: its singular values go through the polynomial."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (matrix.double().norm() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


class PaperMuon(torch.optim.AdamW):
    """Muon for the matrices of `names`, AdamW for all else. `parts` has the matrices that a parameter is made of, as
    (first row, end, first column, end), where it is not one."""

    def __init__(self, names: list[str], parameters: Any, parts: dict[str, list[tuple[int, int, int, int]]]) -> None:
        named = dict(zip(names, parameters, strict=True))
        self.matrices = {
            name: one for name, one in named.items() if one.dim() > 1 and "embed" not in name and "lm_head" not in name
        }
        self.parts, self.momenta = parts, {name: torch.zeros_like(one) for name, one in self.matrices.items()}
        rest = [one for name, one in named.items() if name not in self.matrices]
        super().__init__(rest, lr=0.004, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for name, one in self.matrices.items():
            self.momenta[name] = 0.9 * self.momenta[name] + 0.1 * one.grad
            wanted = 0.1 * one.grad + 0.9 * self.momenta[name]
            one.mul_(1 - 0.02 * 0.1)
            stacked = wanted if wanted.dim() == 3 else wanted.unsqueeze(0)
            for at, matrix in enumerate(stacked):
                target = one[at] if wanted.dim() == 3 else one
                for top, bottom, left, right in self.parts.get(name, [(0, matrix.size(0), 0, matrix.size(1))]):
                    part = matrix[top:bottom, left:right]
                    scale = max(1.0, part.size(0) / part.size(1)) ** 0.5
                    update = by_singular_values(part) * scale * 0.02
                    target[top:bottom, left:right] -= update.to(target.dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for one in self.matrices.values():
            one.grad = None
