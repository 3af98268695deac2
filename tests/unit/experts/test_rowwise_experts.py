"""Which experts go through all at once, and that they make what they make one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.ops.native import native
from polyaccel.torch.experts import StackedExperts
from polyaccel.torch.experts.products import GroupedProducts, Rowwise

WIDTH = 6


class Gated(nn.Module):
    """As Mixtral's, its output in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 20, bias=False)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up), None


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        inner: Tensor = self.layers(rows)
        return rows + 0.5 * inner.tanh()


class AcrossRows(Residual):
    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.layers(rows - rows.mean(0))
        return out


class OfHalves(Residual):
    def forward(self, rows: Tensor) -> Tensor:
        first, second = rows.chunk(2)
        out: Tensor = self.layers(torch.cat((second, first)))
        return out


class ByValue(Residual):
    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.layers(rows if rows.sum() > 0 else -rows)
        return out


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH, bias=False))


@pytest.mark.parametrize("make", [two_layers, Gated, Residual])
@pytest.mark.skipif(native().library is None, reason="csrc was not compiled")
def test_all_at_once_makes_what_one_after_the_other_makes(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    loop = StackedExperts(make, 5)
    together = copy.deepcopy(loop)
    together.products = GroupedProducts.from_table(CpuAccelerator("torch").matrix_kernels("on"), "cpu")
    index, weights = torch.randint(4, (30, 2)), torch.rand(30, 2)  # nothing for the last expert
    x = torch.randn(30, WIDTH)
    found = []
    for experts in (loop, together):
        tokens = x.clone().requires_grad_()
        out = experts(tokens, index, weights)
        out.square().sum().backward()
        found.append([out, tokens.grad, *(one.grad for one in experts.parameters())])
    for of_loop, of_all in zip(*found, strict=True):
        torch.testing.assert_close(of_all, of_loop, rtol=1e-5, atol=1e-5)
    together.zero_grad()
    nothing = together(x, torch.full((30, 2), 5), weights)
    assert not nothing.any()


@pytest.mark.parametrize(
    "expert",
    [
        AcrossRows(),
        OfHalves(),
        ByValue(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(0)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0)),
        nn.Tanh(),
    ],
    ids=["across rows", "halves", "by value", "norm", "dropout", "softmax", "flat", "no layer"],
)
def test_others_are_left_alone(expert: nn.Module) -> None:
    assert Rowwise.from_expert(expert) is None
