"""Blocks in 8 bits of the dynamic code: its values, the meaning in float64, repeated encoding, what is not finite."""

from __future__ import annotations

import numpy as np
import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import CODE_BLOCK, DType
from polyaccel.errors import ShardingError
from polyaccel.ops.block_codes import DECODE_BLOCKS, ENCODE_BLOCKS, blocks_in
from polyaccel.ops.dynamic_code import dynamic_code

ACCELERATORS = [CpuAccelerator("torch"), CpuAccelerator("numpy")]


def encoded(accelerator, values, *, signed):
    source = accelerator.allocate(values.size, DType.FLOAT32)
    source.from_bytes(values.astype(np.float32).tobytes())
    codes = accelerator.allocate(values.size, DType.UINT8)
    scales = accelerator.allocate(blocks_in(values.size), DType.FLOAT32)
    accelerator.kernels()[ENCODE_BLOCKS](source, codes, scales, signed=signed)
    return codes, scales


def decoded(accelerator, codes, scales, *, signed):
    out = accelerator.allocate(codes.numel, DType.FLOAT32)
    accelerator.kernels()[DECODE_BLOCKS](out, codes, scales, signed=signed)
    return np.frombuffer(out.to_bytes(), np.float32)


def drawn(numel, *, signed):
    values = np.random.default_rng(numel).normal(size=numel) * 10.0 ** np.linspace(-8, 3, numel)
    return (values if signed else values**2).astype(np.float32)


def test_the_code_has_bitsandbytes_values():
    """Spot values of `create_dynamic_map`, as bitsandbytes 0.50.2 and torchao 0.18.0 print them."""
    signed, unsigned = dynamic_code(signed=True), dynamic_code(signed=False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    np.testing.assert_allclose(
        signed[[0, 1, 126, 127, 128, 129, 255]], [-0.99296875, -0.97890625, -5.5e-07, 0, 5.5e-07, 3.25e-06, 1]
    )
    np.testing.assert_allclose(
        unsigned[[0, 1, 2, 3, 254, 255]], [0, 3.25e-07, 7.75e-07, 2.125e-06, 0.99648437, 1], rtol=1e-6
    )


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, CODE_BLOCK, 3 * CODE_BLOCK + 17])
def test_codes_are_the_nearest_in_float64_and_torch_has_numpy_s_bits(numel, signed):
    values = drawn(numel, signed=signed)
    both = []
    for accelerator in ACCELERATORS:
        codes, scales = encoded(accelerator, values, signed=signed)
        found = decoded(accelerator, codes, scales, signed=signed)
        both.append((codes.to_bytes(), scales.to_bytes(), found.tobytes()))
        code = dynamic_code(signed=signed).astype(np.float64)
        for start in range(0, numel, CODE_BLOCK):
            block = values[start : start + CODE_BLOCK].astype(np.float64)
            scale = block[np.argmax(np.abs(block))]
            nearest = np.abs(block[:, None] / scale - code).min(axis=1)
            ours = np.abs(block / scale - found[start : start + CODE_BLOCK] / scale)
            np.testing.assert_allclose(ours, nearest, atol=1e-7)
    assert both[0] == both[1]


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=["torch", "numpy"])
@pytest.mark.parametrize("signed", [True, False])
def test_decoded_numbers_have_the_codes_that_they_are_from(accelerator, signed):
    codes, scales = encoded(accelerator, drawn(1000, signed=signed), signed=signed)
    again = encoded(accelerator, decoded(accelerator, codes, scales, signed=signed), signed=signed)
    assert (codes.to_bytes(), scales.to_bytes()) == tuple(each.to_bytes() for each in again)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=["torch", "numpy"])
def test_what_is_not_finite_stays_in_its_block(accelerator):
    values = np.ones(3 * CODE_BLOCK, np.float32)
    values[5], values[2 * CODE_BLOCK + 7] = np.nan, -np.inf
    found = decoded(accelerator, *encoded(accelerator, values, signed=True), signed=True).reshape(3, -1)
    assert np.isnan(found[[0, 2]]).all()
    assert (found[1] == 1).all()
    zeros = decoded(accelerator, *encoded(accelerator, np.zeros(300), signed=False), signed=False)
    assert not zeros.any()


def test_sizes_that_do_not_fit_are_refused():
    accelerator = ACCELERATORS[0]
    source, codes = accelerator.allocate(10, DType.FLOAT32), accelerator.allocate(10, DType.UINT8)
    for wrong in ((accelerator.allocate(9, DType.UINT8), accelerator.allocate(1, DType.FLOAT32)), (codes, source)):
        with pytest.raises(ShardingError) as caught:
            accelerator.kernels()[ENCODE_BLOCKS](source, *wrong, signed=True)
        assert caught.value.value in (9, 10)
