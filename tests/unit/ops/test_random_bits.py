"""The random bits of stochastic rounding: fair, unrelated from place to place and key to key, and unbiased in use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType
from polyaccel.ops import reference
from polyaccel.ops.base import CAST, StochasticRounding
from polyaccel.ops.rounding import random_bits

NUMEL = 1 << 16
TORCH = CpuAccelerator("torch")
KEYS = st.integers(0, 2**64 - 1)


def is_within_chance(found: np.ndarray, expected: float, deviation: float) -> bool:
    """Whether the mean of `found` is at most six deviations of a mean away: once in 500 million times it is not."""
    return abs(float(np.mean(found)) - expected) < 6 * deviation / found.size**0.5


@settings(max_examples=30, deadline=None)
@given(KEYS, st.integers(0, 2**33))
def test_every_bit_is_fair(key: int, start: int) -> None:
    bits = random_bits(key, start, NUMEL)
    for place in range(32):
        assert is_within_chance(bits >> np.uint32(place) & 1, 0.5, 0.5), place


@settings(max_examples=30, deadline=None)
@given(KEYS, st.integers(0, 63), st.integers(1, 1000))
def test_neighbours_and_neighbouring_keys_are_unrelated(key: int, flipped: int, distance: int) -> None:
    ours = random_bits(key, 0, NUMEL) / 2.0**32 - 0.5
    others = (random_bits(key ^ 1 << flipped, 0, NUMEL), random_bits(key, distance, NUMEL))
    for other in others:
        assert is_within_chance(ours * (other / 2.0**32 - 0.5), 0.0, 1 / 12)


@given(KEYS, st.integers(0, 2**32), st.integers(0, 200), st.integers(0, 200))
def test_an_element_s_bits_are_its_own(key: int, start: int, before: int, numel: int) -> None:
    whole = random_bits(key, start, before + numel)
    np.testing.assert_array_equal(whole[before:], random_bits(key, start + before, numel))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@settings(max_examples=40, deadline=None)
@given(value=st.floats(-60000, 60000, width=32), key=KEYS)
def test_the_mean_of_what_is_rounded_is_the_value(dtype: DType, value: float, key: int) -> None:
    source, out = TORCH.allocate(NUMEL, DType.FLOAT32), TORCH.allocate(NUMEL, dtype)
    source.fill(value)
    TORCH.kernels()[CAST](source, out, StochasticRounding(key))
    precision, smallest = (7, -133) if dtype is DType.BFLOAT16 else (10, -24)
    spacing = 2.0 ** max(np.frexp(value)[1] - 1 - precision, smallest)
    below = abs(value) // spacing * spacing
    found = np.abs(reference.to_float64(out.to_bytes(), dtype))
    assert set(found) <= {below, below + spacing}
    share = (abs(value) - below) / spacing
    assert abs(np.mean(found == below + spacing) - share) < 6 * (share * (1 - share) / NUMEL) ** 0.5 + 40 / NUMEL
    assert not np.signbit(value) or np.signbit(reference.to_float64(out.to_bytes(), dtype)).all()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@np.errstate(invalid="ignore")  # NaN that would signal
def test_what_the_type_has_stays_and_what_is_beyond_goes_to_nearest(dtype: DType) -> None:
    source, again = TORCH.allocate(1 << 16, dtype), TORCH.allocate(1 << 16, dtype)
    source.from_bytes(np.arange(1 << 16, dtype=np.uint16).tobytes())
    wide = TORCH.allocate(1 << 16, DType.FLOAT32)
    wide.copy_from(source)
    TORCH.kernels()[CAST](wide, again, StochasticRounding(12345))
    before, after = (reference.to_float64(buffer.to_bytes(), dtype) for buffer in (source, again))
    np.testing.assert_array_equal(after, before)

    most = float(before[np.isfinite(before)].max())
    unit = most - float(np.unique(before[np.isfinite(before)])[-2])
    for value, expected in ((most + unit * 0.49, most), (most + unit * 0.5, np.inf), (-most - unit * 0.51, -np.inf)):
        wide.fill(value)
        TORCH.kernels()[CAST](wide, again, StochasticRounding(6789))
        assert set(reference.to_float64(again.to_bytes(), dtype)) == {expected}
