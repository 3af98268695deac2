"""Operands in 8 and 4 bits are those of the published formats, written out number by number in float64."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
import torch

from polyaccel.torch.low_precision.formats import float8_scale, in_blocks, in_float8, to_float4
from polyaccel.torch.low_precision.products import LowPrecision

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """Every number from 0 to `largest` of a format with subnormals, in order: even indices have even mantissas."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    found = [step / steps * 2.0 ** (1 - bias) for step in range(steps)]
    exponent = 1 - bias
    while True:
        for step in range(steps):
            value = (1 + step / steps) * 2.0**exponent
            if value > largest:
                return found
            found.append(value)
        exponent += 1


GRIDS = {E4M3: numbers(4, 3, 448.0), E5M2: numbers(5, 2, 57344.0), "e2m1": numbers(2, 1, 6.0)}


def nearest(value: float, grid: list[float]) -> float:
    """The number of `grid` that is nearest to `value`, of two the one with an even mantissa."""
    size = min(abs(value), grid[-1])
    above = bisect_left(grid, size)
    low, high = max(above - 1, 0), above
    if size - grid[low] == grid[high] - size:
        chosen = low if low % 2 == 0 else high
    else:
        chosen = low if size - grid[low] < grid[high] - size else high
    return math.copysign(grid[chosen], value)


def drawn(*shape: int, spread: float = 6.0) -> torch.Tensor:
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * torch.exp(spread * torch.randn(*shape, generator=generator))


def test_the_grids_are_those_of_the_formats() -> None:
    assert GRIDS["e2m1"] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert len(GRIDS[E4M3]) == 127  # NaN is the last code
    assert len(GRIDS[E5M2]) == 124  # infinity and NaN are four


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("is_power", [False, True])
def test_float8_is_the_nearest_number(dtype: torch.dtype, is_power: bool) -> None:
    values = drawn(40, 30)
    largest = torch.finfo(dtype).max
    scale = largest / values.abs().max().double().item()
    scale = 2.0 ** math.floor(math.log2(scale)) if is_power else torch.tensor(scale).float().item()
    found = float8_scale(values.abs().amax(), dtype, is_power=is_power)
    assert found.item() == scale
    scaled = (values * found).tolist()  # in float32, as the format is defined for what reaches it
    wanted = [[nearest(one, GRIDS[dtype]) for one in row] for row in scaled]
    found_values = in_float8(values, found, dtype)
    assert torch.equal(found_values, torch.tensor(wanted, dtype=torch.float64).float() / found)


def test_float4_is_the_nearest_number() -> None:
    values = torch.cat([drawn(500, spread=1.0), torch.arange(-64, 65) / 8.0])
    wanted = [nearest(one, GRIDS["e2m1"]) for one in values.tolist()]
    assert to_float4(values).tolist() == wanted


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("shape", "dim"), [((3, 64), 1), ((70, 4), 0), ((5, 33), 1)])
def test_blocks_are_those_of_the_specification(bits: int, shape: tuple[int, int], dim: int) -> None:
    values = drawn(*shape, spread=3.0)
    values[0, 0] = 0.0
    grid, top = (GRIDS[E4M3], 8) if bits == 8 else (GRIDS["e2m1"], 2)
    rows = values.double().movedim(dim, -1).tolist()
    wanted = []
    for row in rows:
        found = []
        for first in range(0, len(row), 32):
            block = row[first : first + 32]
            scale = 2.0 ** (math.floor(math.log2(max(abs(one) for one in block))) - top)
            found += [nearest(one / scale, grid) * scale for one in block]
        wanted.append(found)
    assert torch.equal(
        in_blocks(values, dim, bits).double(), torch.tensor(wanted, dtype=torch.float64).movedim(-1, dim)
    )


def test_blocks_of_zeros_and_of_extreme_values() -> None:
    assert torch.equal(in_blocks(torch.zeros(2, 40), 1, 8), torch.zeros(2, 40))
    small = torch.full((1, 32), 2.0**-126)
    assert torch.equal(in_blocks(small, 1, 8), small)
    large = torch.full((1, 32), 3.0e38)
    assert in_blocks(large, 1, 4).isfinite().all()
    for bad in (math.inf, math.nan):
        values = torch.ones(1, 64)
        values[0, 3] = bad
        found = in_blocks(values, 1, 8)
        assert found[0, :32].isnan().all()
        assert torch.equal(found[0, 32:], torch.ones(32))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_overflow_is_seen(recipe: str) -> None:
    """An infinite element is no finite one afterwards: loss scales and alarms look for it."""
    values = torch.ones(4, 8)
    values[1, 2] = math.inf
    found = LowPrecision(recipe).rounded(values, 1, "grad", "input_grad")
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8", "mxfp4"])
def test_the_products_are_those_of_rounded_operands(recipe: str) -> None:
    """Output and both gradients, with all sums in float64."""
    x, weight, grad = drawn(3, 5, 40, spread=0.5), drawn(24, 40, spread=0.5), drawn(3, 5, 24, spread=0.5)
    bias = drawn(24, spread=0.5)
    leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
    out = LowPrecision(recipe).apply(*leaves)
    out.backward(grad)
    rows, grads = x.view(-1, 40), grad.view(-1, 24)
    q = lambda values, dim, role="input": reference(recipe, values, dim, role)  # noqa: E731
    wanted = q(rows, 1) @ q(weight, 1).t() + bias.double()
    torch.testing.assert_close(out.double().view(-1, 24), wanted, rtol=2e-5, atol=1e-5)
    of_x = q(grads, 1, "grad") @ q(weight, 0)
    of_weight = q(grads, 0, "grad").t() @ q(rows, 0)
    for leaf, found in zip(leaves, (of_x.view_as(x), of_weight, grads.double().sum(0)), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), found, rtol=2e-5, atol=1e-5)


def reference(recipe: str, values: torch.Tensor, dim: int, role: str) -> torch.Tensor:
    """The operand in float64, by the grids above."""
    if recipe.startswith("mx"):
        grid, top = (GRIDS[E4M3], 8) if recipe == "mxfp8" else (GRIDS["e2m1"], 2)
        rows = values.movedim(dim, -1)
        parts = list(rows.split(32, -1))
        scales = [2.0 ** (torch.floor(torch.log2(one.double().abs().amax(-1, keepdim=True))) - top) for one in parts]
        done = [
            torch.tensor([[nearest(v, grid) for v in row] for row in (p / s).tolist()])
            for p, s in zip(parts, scales, strict=True)
        ]
        return torch.cat([d.double() * s for d, s in zip(done, scales, strict=True)], -1).movedim(-1, dim)
    dtype = E5M2 if recipe == "tensorwise" and role == "grad" else E4M3
    amax = values.abs().amax() if recipe == "tensorwise" else values.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / amax.double()
    scale = scale.float() if recipe == "tensorwise" else 2.0 ** torch.floor(torch.log2(scale))
    rounded = [[nearest(one, GRIDS[dtype]) for one in row] for row in (values * scale.float()).tolist()]
    return torch.tensor(rounded, dtype=torch.float64) / scale.double()
