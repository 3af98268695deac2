"""Codes and scales of frozen weights, next to a reference in float64 and the published table."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch

from polyaccel.errors import PolyaccelError
from polyaccel.torch.quantized.codes import DTYPES, LEVELS, CodeFormat
from polyaccel.torch.weight_groups import GroupedWeight

OFFSET = 0.9677083
"""The largest probability of NF4: the mean of 1 - 1/30 and 1 - 1/32."""


def matrix(rows: int = 5, columns: int = 45) -> torch.Tensor:
    """With a group of zeros, and magnitudes that differ by rows."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(4))
    drawn *= torch.tensor([1.0, 1e-3, 40.0, 0.2, 3.0])[:rows, None]
    drawn[0, :8] = 0
    return drawn


def levels_of(dtype: str) -> np.ndarray:
    most = {"int8": 127, "int4": 7}.get(dtype)
    return np.array(LEVELS) if most is None else np.arange(-most, most + 1) / most


def codes_of(form: CodeFormat, stored: torch.Tensor) -> np.ndarray:
    """Places among the levels."""
    if form.dtype == "int8":
        return stored.numpy().astype(int) + 127
    pairs = np.stack([stored.numpy() >> 4, stored.numpy() & 15], -1)
    return pairs.reshape(form.rows, -1)[:, : form.columns].astype(int)


def test_nf4_has_the_quantiles_of_a_normal_distribution() -> None:
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(OFFSET, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(OFFSET, 0.5, 8)[:-1]]
    wanted = np.array(sorted([*above, *below, 0.0])) / max(above)
    np.testing.assert_allclose(LEVELS, wanted, atol=1e-6)


@pytest.mark.parametrize("size", [1, 8, 16, 64])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_the_reference(dtype: str, double: bool, size: int) -> None:
    weight = matrix()
    form = CodeFormat(dtype, size, double, *weight.shape)
    stored = form.encode(weight)
    exact, levels = weight.numpy().astype(np.float64), levels_of(dtype)
    scales, codes = form.scales(stored[1:]).numpy().astype(np.float64), codes_of(form, stored[0])
    found = form.decode(stored, torch.float64).numpy()
    width = min(size, 45)
    for row in range(weight.shape[0]):
        largest = [np.abs(exact[row, at : at + width]).max() for at in range(0, 45, width)]
        if double:  # a span has at most 256 scales: a row's are one
            step = (max(largest) - min(largest)) / 255
            np.testing.assert_allclose(scales[row], largest, atol=step * 0.5001 + 1e-12, rtol=1e-6)
        else:
            assert scales[row].tolist() == largest
        for column in range(45):
            scale = scales[row, column // width]
            unit = exact[row, column] / (scale or 1.0)
            distances = np.abs(levels - unit)
            assert distances[codes[row, column]] <= distances.min() + 1e-6
            assert found[row, column] == pytest.approx(levels[codes[row, column]] * scale, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_training_and_inference_have_the_same_integers(dtype: str, bits: int) -> None:
    weight = matrix()
    form = CodeFormat(dtype, 16, False, *weight.shape)
    decoded = form.decode(form.encode(weight), torch.float32)
    assert torch.equal(GroupedWeight(weight, 16, bits=bits).weight(), decoded)


def test_what_is_stored_is_small_and_of_integers() -> None:
    """At 64 inputs a group: 4 bits and a half a weight, and 4.13 under double quantisation."""
    weight = torch.randn(4, 16384)
    for double, bits in ((False, 4.5), (True, 4.129)):
        stored = CodeFormat("nf4", 64, double, *weight.shape).encode(weight)
        assert not any(one.is_floating_point() for one in stored)
        assert sum(one.nbytes for one in stored) * 8 / weight.numel() == pytest.approx(bits, abs=2e-3)


def test_unknown_formats_are_refused() -> None:
    for dtype, size in (("fp6", 64), ("nf4", 0)):
        with pytest.raises(PolyaccelError) as caught:
            CodeFormat(dtype, size, False, 2, 2)
        assert caught.value.value in (dtype, size)
