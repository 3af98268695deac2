"""Eigenvalues of blocks are those of the dense Hessian in float64, and delay the loss of bits by DeepSpeed's rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from polyaccel.engine.policies.compression import Curvature, WeightRule
from polyaccel.torch.compression.curvature import eigenvalues, factors
from polyaccel.torch.compression.pace import BitPace


def curvature(**changes: object) -> Curvature:
    values = {"blocks": "", "count": 3, "iterations": 2000, "tolerance": 1e-12, "stability": 0.0, "every": 1}
    return Curvature(**{**values, "is_logged": False, **changes})  # type: ignore[arg-type]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x), y)


def test_the_largest_eigenvalue_is_that_of_the_dense_hessian() -> None:
    net = model()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 2
    blocks = [list(net[at].parameters()) for at in (0, 2, 4)]
    found = eigenvalues(loss_of(net, x, y), blocks, curvature(), None)
    for at, value in zip((0, 2, 4), found, strict=True):
        names = [name for name, _ in net.named_parameters() if name.startswith(f"{at}.")]
        shapes = [net.get_parameter(name).shape for name in names]

        def loss(flat: Tensor, names: list[str] = names, shapes: list[torch.Size] = shapes) -> Tensor:
            parts = flat.split([math.prod(shape) for shape in shapes])
            given = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
            return nn.functional.cross_entropy(torch.func.functional_call(net, given, (x,)), y)

        start = torch.cat([net.get_parameter(name).detach().flatten() for name in names])
        dense = torch.autograd.functional.hessian(loss, start)
        every = torch.linalg.eigvalsh(dense)
        wanted = every[every.abs().argmax()].item()
        assert value == pytest.approx(wanted, rel=1e-6)


def test_a_block_without_curvature_has_none() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    loss = net(torch.ones(1, 2)).sum()
    unused = nn.Linear(2, 2)
    found = eigenvalues(loss, [list(net[1].parameters()), list(unused.parameters())], curvature(count=2), None)
    assert found == [0.0, 0.0]


def test_gradients_and_generators_are_left_as_they_are() -> None:
    net = model()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 2
    before = torch.get_rng_state()
    loss = loss_of(net, x, y)
    eigenvalues(loss, [list(net[0].parameters())], curvature(iterations=3), None)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(one.grad is None for one in net.parameters())
    loss.backward()  # the graph is still there
    assert net[0].weight.grad is not None


def test_factors_are_deepspeeds() -> None:
    assert factors([4.0, -2.0, 1.0, 0.9, 0.0]) == [5, 3, 2, 1, 5]
    assert factors([0.0, 0.0]) == [5, 5]


def rule(period: int = 3, start: int = 8, target: int = 4, offset: int = 2) -> WeightRule:
    return WeightRule(
        key="k", modules=("*",), offset=offset, start_bits=start, target_bits=target, period=period, doubles=True,
        groups=1, is_symmetric=True, is_stochastic=False, mix_loss=None,
    )  # fmt: skip


@pytest.mark.parametrize("factor", [1, 3])
def test_bits_are_lost_as_deepspeeds_quantizer_counts(factor: int) -> None:
    """Next to its counter: where the steps reach the period, a bit less, and the period times two and the factor."""
    pace = BitPace(nn.Linear(2, 2), rule(), 0)
    bits, period = 8, 3
    for done in range(2, 200):
        if pace.is_due(done):
            pace.lose(factor)
        if bits != 4 and done - 2 >= period:
            bits, period = bits - 1, period * 2 * factor
        assert pace.bits_at(done) == bits
    assert pace.bits_at(1) == 0


def test_without_factors_bits_are_those_of_the_schedule() -> None:
    pace, by_step = BitPace(nn.Linear(2, 2), rule(), None), rule()
    for done in range(100):
        if pace.is_due(done):
            pace.lose(1)
        assert pace.bits_at(done) == by_step.bits_at(done)
