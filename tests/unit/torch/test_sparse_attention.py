"""Attention by blocks: layouts compared with definitions, values with dense masked attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.torch.sparse_attention import BlockPattern, sparse_attention

HEADS, BLOCK = 4, 4

Sees = Callable[[int, int, int, int], bool]
"""Whether, of `n` blocks, block `i` sees block `j` in head `h`: (h, i, j, n)."""


def fixed(h: int, i: int, j: int, n: int) -> bool:
    return i // 4 == j // 4 or j % 4 in (2, 3)


def fixed_one_way(h: int, i: int, j: int, n: int) -> bool:
    return j <= i and (i // 4 == j // 4 or j % 4 == 3)


def fixed_by_head(h: int, i: int, j: int, n: int) -> bool:
    wanted = 3 - h % 3
    return i // 4 == j // 4 or j % 4 == wanted or i % 4 == wanted


def fixed_short(h: int, i: int, j: int, n: int) -> bool:
    """Ten blocks: the last window has two, and the last of them is global."""
    return i // 4 == j // 4 or j in (3, 7, 9)


def variable(h: int, i: int, j: int, n: int) -> bool:
    windows = [0, 1, 1, 1, *[2 + at // 2 for at in range(n)]]
    return windows[i] == windows[j] or j in (0, 5, 6)


def variable_one_way(h: int, i: int, j: int, n: int) -> bool:
    return j <= i and (i // 3 == j // 3 or j == 2)


def longformer(h: int, i: int, j: int, n: int) -> bool:
    return abs(i - j) <= 2 or i in (1, 4) or j in (1, 4)


def longformer_one_way(h: int, i: int, j: int, n: int) -> bool:
    return j <= i and (abs(i - j) <= 1 or j == 0)


def local(h: int, i: int, j: int, n: int) -> bool:
    return i - 1 <= j <= i


def bigbird(h: int, i: int, j: int, n: int) -> bool:
    return abs(i - j) <= 1 or i < 2 or j < 2


BY_DEFINITION: list[tuple[Sees, int, dict[str, Any]]] = [
    (lambda h, i, j, n: True, 5, {"mode": "dense"}),
    (fixed, 8, {"mode": "fixed", "num_global_blocks": 2}),
    (fixed_one_way, 12, {"mode": "fixed", "attention": "unidirectional"}),
    (
        fixed_by_head,
        8,
        {
            "mode": "fixed",
            "different_layout_per_head": True,
            "num_different_global_patterns": 3,
            "horizontal_global_attention": True,
        },
    ),
    (fixed_short, 10, {"mode": "fixed"}),
    (
        variable,
        9,
        {
            "mode": "variable",
            "local_window_blocks": (1, 3, 2),
            "global_block_indices": (0, 5),
            "global_block_end_indices": (1, 7),
        },
    ),
    (
        variable_one_way,
        7,
        {
            "mode": "variable",
            "local_window_blocks": (3,),
            "global_block_indices": (2, 40),
            "attention": "unidirectional",
        },
    ),
    (longformer, 9, {"mode": "bslongformer", "num_sliding_window_blocks": 5, "global_block_indices": (1, 4)}),
    (longformer_one_way, 6, {"mode": "bslongformer", "attention": "unidirectional"}),
    (local, 6, {"mode": "local"}),
    (bigbird, 7, {"mode": "bigbird", "num_global_blocks": 2, "num_random_blocks": 0}),
]


@pytest.mark.parametrize(("sees", "blocks", "section"), BY_DEFINITION)
def test_layouts_are_their_definitions(sees: Sees, blocks: int, section: dict[str, Any]) -> None:
    found = BlockPattern(block=BLOCK, **section).layout(HEADS, blocks * BLOCK)
    heads = [h if section.get("different_layout_per_head") else 0 for h in range(HEADS)]
    places = range(blocks)
    wanted = [[[sees(h, i, j, blocks) for j in places] for i in places] for h in heads]
    assert found.tolist() == wanted


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
def test_random_blocks_are_as_many_as_asked_for(attention: str, per_head: bool) -> None:
    options: dict[str, Any] = {"num_random_blocks": 3, "attention": attention, "different_layout_per_head": per_head}
    pattern = BlockPattern(mode="bigbird", block=BLOCK, **options)
    found = pattern.layout(HEADS, 16 * BLOCK)
    assert torch.equal(found, BlockPattern(mode="bigbird", block=BLOCK, **options).layout(HEADS, 16 * BLOCK))
    assert not torch.equal(found, BlockPattern(mode="bigbird", block=BLOCK, seed=1, **options).layout(HEADS, 64))
    assert torch.equal(found[0], found[1]) != per_head
    base = BlockPattern(mode="bigbird", block=BLOCK, **options | {"num_random_blocks": 0}).layout(HEADS, 64)
    added = (found & ~base).sum(-1)
    assert int(added.max()) in (2, 3)
    if attention == "unidirectional":
        assert torch.equal(found, found.tril())


def inputs(blocks: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    shape = (2, HEADS, blocks * BLOCK, 6)
    return [torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


def with_gradients(output: Tensor, given: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), given)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("sees", "blocks", "section"), BY_DEFINITION)
def test_values_and_gradients_are_those_of_dense_attention(
    sees: Sees, blocks: int, section: dict[str, Any], is_causal: bool
) -> None:
    layout = BlockPattern(block=BLOCK, **section).layout(HEADS, blocks * BLOCK)
    given = inputs(blocks)
    mask = layout.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[None]
    mask = mask & torch.ones_like(mask).tril() if is_causal else mask
    wanted = with_gradients(scaled_dot_product_attention(*given, attn_mask=mask), given)
    for method in ("blocks", "dense"):
        found = with_gradients(sparse_attention(*given, layout, is_causal=is_causal, method=method), given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, HEADS), (2, 1), (), (2, HEADS)])
def test_biases_are_added_to_scores(shape: tuple[int, ...]) -> None:
    blocks, draws = 8, torch.Generator().manual_seed(1)
    layout = BlockPattern(mode="bigbird", block=BLOCK).layout(HEADS, blocks * BLOCK)
    bias = torch.randn(*shape, blocks * BLOCK, blocks * BLOCK, generator=draws).double().requires_grad_()
    key_bias = torch.zeros(2, blocks * BLOCK).double()
    key_bias[1, -7:] = float("-inf")
    given = [*inputs(blocks), bias]
    options: dict[str, Any] = {"bias": bias, "key_bias": key_bias, "scale": 0.3}
    mask = layout.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[None]
    added = (bias + key_bias[:, None, None]).masked_fill(~mask, float("-inf"))
    wanted = with_gradients(scaled_dot_product_attention(*given[:3], attn_mask=added, scale=0.3), given)
    for method in ("blocks", "dense"):
        found = with_gradients(sparse_attention(*given[:3], layout, method=method, **options), given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    layout = torch.zeros(HEADS, 4, 4, dtype=torch.bool)
    layout[:, 1, 2] = True
    given = inputs(4)
    found = with_gradients(sparse_attention(*given, layout), given)
    assert not found[0][:, :, :BLOCK].any()
    assert found[0][:, :, BLOCK : 2 * BLOCK].any()
    assert all(bool(one.isfinite().all()) for one in found)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_has_the_values() -> None:
    layout = BlockPattern(mode="fixed", block=16).layout(HEADS, 128)
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(1, HEADS, 128, 16, generator=draws) for _ in range(3)]
    for is_causal in (False, True):
        found = sparse_attention(*given, layout, is_causal=is_causal, method="flex")
        torch.testing.assert_close(found, sparse_attention(*given, layout, is_causal=is_causal), rtol=1e-4, atol=1e-5)
    with pytest.raises(PolyaccelError):
        sparse_attention(*given, layout, bias=torch.zeros(128, 128), method="flex")


@pytest.mark.parametrize(
    "section",
    [
        {"mode": "spiral"},
        {"attention": "sideways"},
        {"num_local_blocks": 4, "num_global_blocks": 3},
        {"attention": "unidirectional", "horizontal_global_attention": True},
        {"num_different_global_patterns": 2},
        {"mode": "variable", "global_block_indices": (0, 2), "global_block_end_indices": (1,)},
        {"mode": "bslongformer", "global_block_indices": (2,), "global_block_end_indices": (2,)},
        {"mode": "variable", "local_window_blocks": ()},
    ],
)
def test_patterns_that_do_not_fit_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BlockPattern(**section)


def test_sequences_that_do_not_fit_are_refused() -> None:
    for length in (30, 0, 32):
        with pytest.raises(ConfigError):
            BlockPattern(mode="local", block=16).layout(1, length)
    layout = BlockPattern(mode="fixed", block=16).layout(2, 32)
    with pytest.raises(PolyaccelError):
        sparse_attention(*(torch.zeros(1, 3, 32, 2) for _ in range(3)), layout)
