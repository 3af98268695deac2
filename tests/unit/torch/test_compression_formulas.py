"""Quantised values and masks are those of the papers' formulas, written out element by element in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.torch.compression.formulas import (
    largest,
    magnitudes,
    noise_for,
    quantized_in_range,
    quantized_tokens,
    quantized_weight,
)


def reference(row: list[float], bits: int, *, is_symmetric: bool) -> list[float]:
    """One group, by the formulas of the module's papers."""
    if bits == 1:
        mean = sum(abs(one) for one in row) / len(row)
        return [-mean if one < 0 else mean for one in row]
    if bits == 2:
        threshold = 0.7 * sum(abs(one) for one in row) / len(row)
        kept = [abs(one) for one in row if abs(one) > threshold]
        scale = sum(kept) / max(1, len(kept))
        return [math.copysign(scale, one) if abs(one) > threshold else 0.0 for one in row]
    if is_symmetric:
        top = 2 ** (bits - 1) - 1
        scale = max(abs(one) for one in row) / top
        return [round(one / scale) * scale if scale else 0.0 for one in row]
    low, high = min(row), max(row)
    scale = (high - low) / (2**bits - 1)
    return [low + round((one - low) / scale) * scale if scale else low for one in row]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 8, 12]),
    groups=st.sampled_from([1, 2, 3, 6]),
    is_symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_weight_is_quantised_group_by_group(bits: int, groups: int, is_symmetric: bool, seed: int) -> None:
    weight = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found = quantized_weight(weight, bits, groups, is_symmetric=is_symmetric, noise=None)
    rows = weight.flatten().view(groups, -1).tolist()
    wanted = [one for row in rows for one in reference(row, bits, is_symmetric=is_symmetric)]
    np.testing.assert_allclose(found.flatten().numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_few_values_are_left(is_symmetric: bool) -> None:
    weight = torch.randn(64, 64)
    for bits in (1, 2, 3, 4):
        found = quantized_weight(weight, bits, 1, is_symmetric=is_symmetric, noise=None)
        assert 1 < len(found.unique()) <= 2**bits


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_what_is_constant_stays(is_symmetric: bool) -> None:
    for value in (0.0, 0.75, -3.0):
        weight = torch.full((4, 4), value)
        found = quantized_weight(weight, 4, 2, is_symmetric=is_symmetric, noise=None)
        torch.testing.assert_close(found, weight)


def test_stochastic_rounding_has_the_right_mean_and_is_drawn_from_name_and_step() -> None:
    weight = torch.randn(8, 8, dtype=torch.float64)
    drawn = [
        quantized_weight(weight, 3, 2, is_symmetric=False, noise=noise_for("a", step, weight)) for step in range(2000)
    ]
    scale = (weight.view(2, -1).amax(1) - weight.view(2, -1).amin(1)) / 7
    error = (torch.stack(drawn).mean(0) - weight).abs().view(2, -1).amax(1)
    assert bool((error < 0.06 * scale).all())
    assert torch.equal(noise_for("a", 3, weight), noise_for("a", 3, weight))
    assert not torch.equal(noise_for("a", 3, weight), noise_for("b", 3, weight))
    assert not torch.equal(noise_for("a", 3, weight), noise_for("a", 4, weight))


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_inputs_have_a_range_for_each_token_or_one(is_symmetric: bool) -> None:
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    wanted = [reference(row, 8, is_symmetric=is_symmetric) for row in x.view(-1, 7).tolist()]
    found = quantized_tokens(x, 8, is_symmetric=is_symmetric)
    np.testing.assert_allclose(found.view(-1, 7).numpy(), wanted, rtol=1e-12, atol=1e-12)
    low, high = x.amin(), x.amax()
    whole = quantized_in_range(x, 8, low, high, is_symmetric=is_symmetric)
    np.testing.assert_allclose(
        whole.flatten().numpy(), reference(x.flatten().tolist(), 8, is_symmetric=is_symmetric), rtol=1e-12, atol=1e-12
    )
    narrow = quantized_in_range(x, 8, low / 4, high / 4, is_symmetric=is_symmetric)
    assert float(narrow.max()) <= float(torch.maximum(low.abs(), high.abs())) / 4 + 1e-12


def test_a_half_keeps_its_type() -> None:
    weight = torch.randn(4, 4).bfloat16()
    assert quantized_weight(weight, 4, 1, is_symmetric=True, noise=None).dtype is torch.bfloat16


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30, unique=True), st.floats(0.01, 1))
def test_the_largest_stay(scores: list[float], ratio: float) -> None:
    mask = largest(torch.tensor(scores, dtype=torch.float64), ratio).tolist()
    kept = sorted(one for one, stays in zip(scores, mask, strict=True) if stays)
    assert kept == sorted(scores)[len(scores) - max(1, round(ratio * len(scores))) :]


def test_magnitudes_add_up_runs_of_slices() -> None:
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    rows = magnitudes(weight, 0, 1)
    torch.testing.assert_close(rows.double(), weight.abs().sum((1, 2, 3)), rtol=1e-5, atol=1e-5)
    heads = magnitudes(weight, 1, 2)
    wanted = weight.abs().sum((0, 2, 3)).view(2, 2).sum(1)
    torch.testing.assert_close(heads.double(), wanted, rtol=1e-5, atol=1e-5)
