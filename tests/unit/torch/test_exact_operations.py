"""Operations of exact forward passes: the same bits in any batch, and torch's numbers within rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.ops.base import GROUPED_LINEAR
from polyaccel.torch.exact.forward import ExactForward
from polyaccel.torch.exact.mode import ExactMode
from polyaccel.torch.exact.operations import ExactOperations
from polyaccel.torch.exact.pointwise import is_in_place, padded_numel

WIDTH = 21
TYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = {
    "linear": lambda x: functional.linear(x, drawn(13, WIDTH), drawn(13)),
    "matmul": lambda x: x @ drawn(WIDTH, 5),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: (x * x).sum(-1),
    "layer_norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x: functional.rms_norm(x, (WIDTH,)),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu of a part": lambda x: functional.gelu(x[..., 3:10]),
    "tanh in place": lambda x: x.clone().tanh_(),
    "power": lambda x: x.abs() ** 1.7,
    "weighted sum": lambda x: torch.add(x, x * 3, alpha=0.7),
}


AUTOCAST = ("linear", "matmul")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def operations() -> ExactOperations:
    return ExactOperations(CpuAccelerator("torch").matrix_kernels("auto")[GROUPED_LINEAR])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(operations: ExactOperations, name: str, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32), ExactMode(operations):
            found: Tensor = FUNCTIONS[name](x if name in AUTOCAST else x.to(dtype))
        return found

    rows = drawn(40, WIDTH)
    whole = function(rows)
    assert torch.equal(function(rows[:1]), whole[:1])
    assert torch.equal(torch.cat([function(part) for part in rows.split([3, 1, 17, 19])]), whole)
    assert torch.equal(function(rows.view(2, 4, 5, WIDTH)).flatten(0, 2), whole)
    assert torch.equal(function(torch.stack([rows, rows], 1)[:, 1]), whole)  # with steps between rows
    reference = FUNCTIONS[name](rows)
    tolerance = 2e-6 if dtype is torch.float32 else 0.05
    assert torch.allclose(whole.float(), reference, rtol=tolerance, atol=tolerance)


@given(
    keys=st.integers(1, 40),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
    first=st.integers(0, 39),
    heads=st.sampled_from([1, 2]),
)
def test_padded_keys_and_other_queries_change_no_bit(
    keys: int, before: int, after: int, first: int, heads: int
) -> None:
    operations = ExactOperations(CpuAccelerator("torch").matrix_kernels("auto")[GROUPED_LINEAR])
    query, key, value = drawn(1, 2, keys, 6), drawn(1, heads, keys, 6, seed=1), drawn(1, heads, keys, 6, seed=2)
    whole, sums = operations.attention(query, key, value, is_causal=True)
    at = min(first, keys - 1)
    padded = [functional.pad(one[:, :, : at + 1], (0, 0, before, after), value=3.0) for one in (key, value)]
    seen = functional.pad(torch.ones(1, 1, 1, at + 1, dtype=torch.bool), (before, after))
    for mask in (seen, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)):
        alone, of_alone = operations.attention(query[:, :, at : at + 1], *padded, attn_mask=mask)
        assert torch.equal(alone, whole[:, :, at : at + 1])
        assert torch.equal(of_alone, sums[:, :, at : at + 1])


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("mask", ["causal", "bool", "float", "none"])
def test_attention_has_torchs_numbers_and_gradients(operations: ExactOperations, heads: int, mask: str) -> None:
    def run(is_exact: bool) -> list[Tensor]:
        inputs = [drawn(2, count, 9, 5, seed=count).requires_grad_() for count in (4, heads, heads)]
        seen = drawn(2, 1, 9, 9) > 0
        seen[1, 0, 2] = False  # nothing at all
        masks = {"bool": seen, "float": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)}
        named = {"is_causal": mask == "causal", "attn_mask": masks.get(mask), "enable_gqa": heads != 4}
        if is_exact:
            with ExactMode(operations):
                out = functional.scaled_dot_product_attention(*inputs, **named)
        else:
            out = functional.scaled_dot_product_attention(*inputs, **named)
        out.square().sum().backward()
        return [out, *(one.grad for one in inputs if one.grad is not None)]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_groups_of_rows(operations: ExactOperations) -> None:
    rows, weights, ends = drawn(8, 4), drawn(3, 4, 8), torch.tensor([2, 2, 7], dtype=torch.int32)
    found = operations.grouped_mm(rows, weights, ends)
    assert torch.equal(found[:2], operations.mm(rows[:2], weights[0]))
    assert torch.equal(found[6:7], operations.mm(rows[6:7], weights[2]))
    assert not found[7:].any()


@given(numel=st.integers(1, 200_000), threads=st.integers(1, 9))
def test_every_thread_has_whole_blocks(numel: int, threads: int) -> None:
    padded, grain = padded_numel(numel, threads), 32768
    assert numel <= padded < numel + 64 * threads
    parts = min(threads, -(-padded // grain)) if padded > grain else 1
    assert padded % (64 * parts) == 0


def test_what_is_not_known_to_be_exact_is_refused(operations: ExactOperations) -> None:
    with ExactMode(operations), pytest.raises(PolyaccelError) as caught:
        functional.conv1d(drawn(1, 2, 9), drawn(3, 2, 3))
    assert caught.value.value == "aten::convolution"
    with ExactMode(operations), pytest.raises(PolyaccelError):
        drawn(3, 3).double() @ drawn(3, 3).double()
    with ExactMode(operations):
        assert torch.equal(torch.arange(6).view(2, 3).sum(1), torch.tensor([3, 12]))  # whole numbers are exact anyway


def test_an_accelerator_without_such_a_product_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        ExactForward(torch.nn.Linear(2, 2), CpuAccelerator("numpy"))
    assert [problem.key for problem in caught.value.problems] == ["generation.exact"]


def test_operations_that_write_to_their_first_argument_are_known() -> None:
    aten = torch.ops.aten
    assert all(map(is_in_place, (aten.add_.Tensor, aten.tanh_.default, aten.__ixor__.Tensor)))
    assert not any(map(is_in_place, (aten.add.Tensor, aten.add.out, aten.__xor__.Tensor, aten.rand.default)))
