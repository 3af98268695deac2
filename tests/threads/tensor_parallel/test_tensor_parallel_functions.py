"""Functions between replicated and cut tensors: values and gradients are those of one rank that has everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.tensor_parallel.cross_entropy import vocabulary_cross_entropy
from polyaccel.torch.tensor_parallel.functions import (
    gathered,
    gathered_shared,
    part_of,
    shared_weight,
    summed,
    summed_,
    summed_part,
    to_shared,
)
from polyaccel.torch.tensor_parallel.products import column_product, row_product
from polyaccel.torch.tensor_parallel.ranks import TensorRanks, even_parts

LENGTH = 7  # what is cut: uneven for every number of ranks
SIZES = [1, 2, 3, 4]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def on_ranks(size: int, body: Callable[[TensorRanks], Any]) -> list[Any]:
    return run_threads(size, lambda communicator: body(TensorRanks(communicator)))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_parts_differ_by_one_at_most():
    assert even_parts(7, 3) == (3, 2, 2)
    assert even_parts(2, 4) == (1, 1, 0, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_are_gathered_and_their_gradients_are_parts(size: int, dim: int) -> None:
    sizes = even_parts(LENGTH, size)
    shape = [2, 3, 2]
    shape[dim] = LENGTH
    whole, upstream = draw(0, *shape), draw(1, *shape)

    def body(ranks: TensorRanks) -> None:
        part = leaf(ranks.part(whole, dim, sizes))
        out = gathered(part, ranks, dim, sizes)
        assert torch.equal(out, whole)
        (found,) = torch.autograd.grad((out * upstream).sum(), part)
        assert torch.equal(found, ranks.part(upstream, dim, sizes))
        # And the other way: a replicated tensor is cut, its gradient is gathered.
        x = leaf(whole)
        (found,) = torch.autograd.grad((part_of(x, ranks, dim, sizes) * ranks.part(upstream, dim, sizes)).sum(), x)
        assert torch.equal(found, upstream)

    on_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_every_rank_uses_is_summed_in_parts(size: int, dim: int) -> None:
    """Along the sequence: what each rank makes of the whole, added up, and each rank's part of it."""
    sizes = even_parts(LENGTH, size)
    shape = [3, 3, 2]
    shape[dim] = LENGTH
    whole, upstream = draw(0, *shape), draw(1, *shape)
    factors = [draw(10 + rank, *shape) for rank in range(size)]
    x = leaf(whole)
    wanted = sum((x * factor).sin() for factor in factors)
    (wanted_grad,) = torch.autograd.grad((wanted * upstream).sum(), x)

    def body(ranks: TensorRanks) -> None:
        part = leaf(ranks.part(whole, dim, sizes))
        out = summed_part((gathered_shared(part, ranks, dim, sizes) * factors[ranks.rank]).sin(), ranks, dim, sizes)
        close(out, ranks.part(wanted, dim, sizes))
        (found,) = torch.autograd.grad((out * ranks.part(upstream, dim, sizes)).sum(), part)
        close(found, ranks.part(wanted_grad, dim, sizes))

    on_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_shared_regions_and_the_gradients_of_their_gradients(size: int) -> None:
    whole, weights = draw(0, 4, 3), [draw(10 + rank, 4, 3) for rank in range(size)]
    x = leaf(whole)
    first = torch.autograd.grad(sum((x.pow(3) * weight) for weight in weights).square().sum(), x, create_graph=True)[0]
    (second,) = torch.autograd.grad(first.square().sum(), x)

    def body(ranks: TensorRanks) -> None:
        mine = leaf(whole)
        loss = summed(to_shared(mine, ranks).pow(3) * weights[ranks.rank], ranks).square().sum()
        (found,) = torch.autograd.grad(loss, mine, create_graph=True)
        close(found, first)
        close(torch.autograd.grad(found.square().sum(), mine)[0], second)
        again = leaf(whole)
        in_place = summed_(to_shared(again, ranks).pow(3) * weights[ranks.rank], ranks).square().sum()
        close(torch.autograd.grad(in_place, again)[0], first)

    on_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_a_shared_weights_gradients_is_their_sum(size: int) -> None:
    weight, inputs = draw(0, 5), [draw(10 + rank, 5) for rank in range(size)]

    def body(ranks: TensorRanks) -> Tensor:
        mine = leaf(weight)
        return torch.autograd.grad((shared_weight(mine, ranks) * inputs[ranks.rank]).sum(), mine)[0]

    close(torch.stack(on_ranks(size, body)).mean(0), torch.stack(inputs).sum(0))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_two_columns_and_a_row_are_a_gated_layer(size: int, has_bias: bool, transposed: bool) -> None:
    names = ("gate", "up", "down")
    x, upstream = draw(0, 2, 3, 4), draw(1, 2, 3, 5)
    weights = {"gate": draw(2, LENGTH, 4), "up": draw(3, LENGTH, 4), "down": draw(4, 5, LENGTH)}
    biases = {"gate": draw(5, LENGTH), "up": draw(6, LENGTH), "down": draw(7, 5)}
    sizes = even_parts(LENGTH, size)

    def layer(x: Tensor, w: dict[str, Tensor], b: dict[str, Tensor | None]) -> Tensor:
        gate = functional.linear(x, w["gate"], b["gate"]).tanh()
        return functional.linear(gate * functional.linear(x, w["up"], b["up"]), w["down"], b["down"])

    def second(found: tuple[Tensor, ...]) -> Tensor:
        return sum((each.pow(3)).sum() for each in found)  # type: ignore[return-value]

    def leaves(cut: Callable[[str, Tensor, int], Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        w = {name: leaf(cut(name, weights[name], 1 if name == "down" else 0)) for name in names}
        b = {name: leaf(biases[name] if name == "down" else cut(name, biases[name], 0)) for name in names}
        return w, b if has_bias else dict.fromkeys(names)

    def gradients(out: Tensor, x: Tensor, w: Any, b: Any) -> tuple[Tensor, ...]:
        inputs = [x, *w.values(), *(each for each in b.values() if each is not None)]
        return torch.autograd.grad((out * upstream).sum(), inputs, create_graph=True)

    w, b = leaves(lambda name, tensor, dim: tensor)
    mine = leaf(x)
    wanted_out = layer(mine, w, b)
    wanted = gradients(wanted_out, mine, w, b)
    (wanted_second,) = torch.autograd.grad(wanted[0].pow(3).sum(), mine)

    def body(ranks: TensorRanks) -> None:
        w, b = leaves(lambda name, tensor, dim: ranks.part(tensor, dim, sizes))
        mine = leaf(x)
        turned = {name: each.t() if transposed else each for name, each in w.items()}
        gate, passed = column_product(mine, turned["gate"], b["gate"], ranks, transposed=transposed)
        up = functional.linear(passed, w["up"], b["up"])
        out = row_product(gate.tanh() * up, turned["down"], b["down"], ranks, transposed=transposed)
        close(out, wanted_out)
        dims = [None, 0, 0, 1] + ([0, 0, None] if has_bias else [])
        plain = torch.autograd.grad((out * upstream).sum(), [mine, *w.values()], retain_graph=True)
        found = gradients(out, mine, w, b)
        for each, dim, whole in zip(found, dims, wanted, strict=True):
            close(each, whole if dim is None else ranks.part(whole, dim, sizes))
        for each, same in zip(plain, found, strict=False):
            close(each, same)
        close(torch.autograd.grad(found[0].pow(3).sum(), mine)[0], wanted_second)

    on_ranks(size, body)


@pytest.mark.parametrize("used", ["output", "input"])
def test_an_input_that_is_given_on_or_not_has_its_gradient(used: str) -> None:
    x, weight = draw(0, 3, 4), draw(1, 4, 4)

    def body(ranks: TensorRanks) -> Tensor:
        mine, own = leaf(x), leaf(ranks.part(weight, 0, (2, 2)))
        out, passed = column_product(mine, own, None, ranks)
        loss = out.sum() if used == "output" else (passed * (ranks.rank + 1)).sum()
        found, of_weight = torch.autograd.grad(loss, [mine, own], allow_unused=True)
        assert (of_weight is None) == (used == "input")
        return found

    wanted = weight.sum(0).expand(3, 4) if used == "output" else torch.full((3, 4), 3.0, dtype=torch.float64)
    for found in on_ranks(2, body):
        close(found, wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_cross_entropy_over_a_cut_vocabulary_is_torchs(size: int, reduction: Any, smoothing: float) -> None:
    logits, upstream = draw(0, 2, 5, LENGTH) * 30, draw(1, 2, 5)
    targets = torch.arange(10).view(2, 5) % LENGTH
    targets[0, 1] = targets[1, 4] = -100
    sizes = even_parts(LENGTH, size)

    def loss_and_gradient(losses: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        weighted = (losses * upstream).sum() if reduction == "none" else losses * 3
        return losses.detach(), torch.autograd.grad(weighted, x)[0]

    x = leaf(logits)
    plain = functional.cross_entropy(
        x.view(-1, LENGTH), targets.view(-1), reduction=reduction, label_smoothing=smoothing
    )
    loss, grad = loss_and_gradient(plain.view(targets.shape) if reduction == "none" else plain, x)

    def body(ranks: TensorRanks) -> None:
        mine = leaf(ranks.part(logits, -1, sizes))
        found = vocabulary_cross_entropy(mine, targets, ranks, sizes, reduction=reduction, label_smoothing=smoothing)
        mine_loss, mine_grad = loss_and_gradient(found, mine)
        close(mine_loss, loss)
        close(mine_grad, ranks.part(grad, -1, sizes))

    on_ranks(size, body)


def test_the_loss_of_half_precision_logits_is_a_float32() -> None:
    logits = (draw(0, 5, 6) * 20).bfloat16()
    targets = torch.arange(5)
    wanted = functional.cross_entropy(logits.float(), targets)

    def body(ranks: TensorRanks) -> tuple[Tensor, torch.dtype]:
        mine = leaf(ranks.part(logits, -1, (3, 3)))
        loss = vocabulary_cross_entropy(mine, targets, ranks, (3, 3))
        loss.backward()
        return loss.detach(), mine.grad.dtype

    for loss, dtype in on_ranks(2, body):
        assert loss.dtype is torch.float32
        assert dtype is torch.bfloat16
        torch.testing.assert_close(loss, wanted)


def test_parts_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    def body(ranks: TensorRanks) -> str:
        with pytest.raises(ShardingError) as caught:
            gathered(torch.zeros(3, 2), ranks, 0, (2, 2))
        assert caught.value.value == (3, 2)
        with pytest.raises(ShardingError) as refused:
            vocabulary_cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), ranks, (3, 3))
        assert refused.value.value == (2, 3)
        return caught.value.hint

    assert on_ranks(2, body) == ["the parts are those of the whole tensor, one a rank"] * 2
