"""Losses and layers in tiles of tokens against the same without tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.errors import PolyaccelError
from polyaccel.torch.tiled import tiled_cross_entropy, tiled_map, tiled_sum

FEATURES, WORDS = 12, 37


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(True)


def some_targets(*shape: int) -> Tensor:
    targets = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(3))
    targets.view(-1)[::3] = -100
    return targets


def soft_cap(logits: Tensor) -> Tensor:
    return 2.0 * torch.tanh(logits / 2.0)


@pytest.mark.parametrize("tokens", [1, 4, 7, 100, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("transform", [None, soft_cap])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_loss_and_all_gradients_are_those_of_whole_logits(tokens, reduction, transform, has_bias):
    def inputs() -> tuple[Tensor, Tensor, Tensor | None]:
        return leaf(2, 9, FEATURES), leaf(WORDS, FEATURES), leaf(WORDS) if has_bias else None

    targets = some_targets(2, 9)
    hidden, weight, bias = inputs()
    logits = functional.linear(hidden, weight, bias)
    logits = logits if transform is None else transform(logits)
    plain = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    (3.0 * plain).backward()
    given = inputs()
    loss = tiled_cross_entropy(
        *given[:2], targets, given[2], reduction=reduction, tile_tokens=tokens, transform=transform
    )
    (3.0 * loss).backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for mine, theirs in zip(given, (hidden, weight, bias), strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weights_gradient_of_sixteen_bits_is_added_up_in_float32(dtype):
    hidden, weight, targets = leaf(512, FEATURES), leaf(WORDS, FEATURES), some_targets(512)
    exact = functional.cross_entropy(hidden.to(dtype).double() @ weight.to(dtype).double().t(), targets)
    (wanted,) = torch.autograd.grad(exact, weight)
    narrow = weight.detach().to(dtype).requires_grad_(True)
    loss = tiled_cross_entropy(hidden.detach().to(dtype), narrow, targets, tile_tokens=4)
    assert loss.dtype is torch.float32
    (1024.0 * loss).backward()
    assert narrow.grad is not None
    assert narrow.grad.dtype is dtype
    error = (narrow.grad.double() / 1024 - wanted).norm() / wanted.norm()
    assert error < 4 * torch.finfo(dtype).eps


def test_without_targets_the_sum_is_zero_and_without_gradients_none_is_kept():
    hidden, weight = leaf(5, FEATURES), leaf(WORDS, FEATURES)
    loss = tiled_cross_entropy(hidden, weight, torch.full((5,), -100), reduction="sum", tile_tokens=2)
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()
    with torch.no_grad():
        assert tiled_cross_entropy(hidden, weight, some_targets(5)).grad_fn is None
    with pytest.raises(PolyaccelError) as caught:
        tiled_cross_entropy(hidden, weight, some_targets(4))
    assert caught.value.value == ((5, 12), (37, 12), (4,))


def test_no_logits_are_there_for_more_tokens_than_a_tile_has():
    seen: list[int] = []

    def look(logits: Tensor) -> Tensor:
        seen.append(len(logits))
        return logits

    tiled_cross_entropy(leaf(10, FEATURES), leaf(WORDS, FEATURES), some_targets(10), tile_tokens=4, transform=look)
    assert seen == [4, 4, 2]


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Linear(FEATURES, 20, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(20, FEATURES, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(functional.gelu(self.up(x))))


@pytest.mark.parametrize("tokens", [1, 5, 18, 50])
def test_a_map_in_tiles_has_the_outputs_and_gradients_of_the_whole(tokens):
    plain, tiled = Mlp(), Mlp()
    x, y = leaf(2, 9, FEATURES), leaf(2, 9, FEATURES)
    out = plain(x)
    out.square().sum().backward()
    mine = tiled_map(tiled, y, tile_tokens=tokens)
    mine.square().sum().backward()
    torch.testing.assert_close(mine, out)
    torch.testing.assert_close(y.grad, x.grad)
    for one, other in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_the_output_may_be_changed_in_place_and_the_input_may_not():
    layer, x = nn.Linear(4, 4), torch.randn(2, 5, 4, requires_grad=True)
    (layer(x) * 3).sum().backward()
    wanted, x.grad = x.grad, None
    tiled_map(layer, x, tile_tokens=3).mul_(3).sum().backward()
    torch.testing.assert_close(x.grad, wanted)
    for given in (x * 1, torch.randn(2, 5, 4)):
        with pytest.raises(PolyaccelError) as caught:
            tiled_map(lambda tile: layer(tile.mul_(2)), given, tile_tokens=3, parameters=layer.parameters())
        assert "lambda" in caught.value.value


def test_parameters_of_a_function_are_found_and_each_gets_one_gradient():
    mlp, scale = Mlp(), leaf(FEATURES)
    calls: list[str] = []
    for name, parameter in [*mlp.named_parameters(), ("scale", scale)]:
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    x = leaf(3, 7, FEATURES)
    tiled_map(lambda tile, weights: mlp(tile) * scale * weights, x, torch.ones(3, 7, 1), tile_tokens=4).sum().backward()
    assert sorted(calls) == ["down.weight", "scale", "up.bias", "up.weight"]
    assert x.grad is not None


def test_random_numbers_are_drawn_alike_both_times_and_go_on_afterwards():
    mlp = Mlp(dropout=0.5)
    torch.manual_seed(1)
    x = leaf(1, 16, FEATURES)
    out = tiled_map(mlp, x, tile_tokens=4)
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(1)
    y = leaf(1, 16, FEATURES)
    parts = torch.cat([mlp(part) for part in y.split(4, 1)], 1)
    assert torch.equal(parts, out)
    parts.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_second_run_computes_in_the_types_of_autocast():
    seen: list[torch.dtype] = []
    mlp = Mlp()
    mlp.up.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tiled_map(mlp, leaf(1, 8, FEATURES), tile_tokens=4)
    out.float().sum().backward()
    assert seen == [torch.bfloat16] * 4


def test_a_sum_over_tiles_has_its_gradients_before_the_backward_pass():
    layer, calls = nn.Linear(FEATURES, WORDS), []
    targets = some_targets(2, 9)

    def loss_of(x: Tensor, words: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return functional.cross_entropy(layer(x).flatten(0, 1), words.flatten(), reduction="sum")

    x = leaf(2, 9, FEATURES)
    total = tiled_sum(loss_of, x, targets, tile_tokens=7, parameters=layer.parameters())
    (0.5 * total).backward()
    assert calls == [7, 7, 4]
    found: list[Any] = [x.grad, *(one.grad for one in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    (0.5 * loss_of(x, targets)).backward()
    for mine, theirs in zip(found, [x.grad, *(one.grad for one in layer.parameters())], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_what_has_no_number_for_each_token_is_refused():
    with pytest.raises(PolyaccelError) as caught:
        tiled_map(lambda x, other: x, leaf(2, 9, FEATURES), torch.ones(2, 8), tile_tokens=3)
    assert caught.value.value == (2, 8)
