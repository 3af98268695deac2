"""Attention over ranks, Ulysses and ring, against the textbook in float64: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
from pairwise import combinations
from sequence_rows import MARKS, gradients_of, marks_of, own_tokens, random_inputs, textbook, visible, whole_of

from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import ShardingError
from polyaccel.torch.context_parallel.block_mask import AttentionRule, DocumentMask
from polyaccel.torch.context_parallel.kernels import FLASH_CPU, PRODUCTS
from polyaccel.torch.context_parallel.local import local_attention
from polyaccel.torch.context_parallel.ring import ring_attention
from polyaccel.torch.context_parallel.shares import TokenShares
from polyaccel.torch.context_parallel.ulysses import DistributedAttention, ulysses_attention

ROWS = 2
RULES = {"all": AttentionRule(causal=False), "causal": AttentionRule(), "window": AttentionRule(window=5)}
HEADS = {"as many": (4, 4), "grouped": (6, 2), "uneven": (7, 7), "one key head": (3, 1), "few heads": (2, 2)}


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-11) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@combinations(
    kernel=[pytest.param(FLASH_CPU, id="flash"), pytest.param(PRODUCTS, id="products")],
    rule=list(RULES),
    marks=MARKS,
    heads=list(HEADS),
    rows=[1, 3],
    widths=[(8, 8), (8, 4), (4, 8)],
)
def test_local_attention_is_that_of_the_textbook(kernel, rule, marks, heads, rows, widths):
    length = 37
    *inputs, grad = random_inputs(rows, length, *HEADS[heads], *widths)
    known = marks_of(marks, rows, length)
    mask = visible(known, RULES[rule], rows)
    expected = gradients_of(lambda q, k, v: textbook(q, k, v, mask, 0.3), inputs, grad)
    found = gradients_of(
        lambda q, k, v: local_attention(q, k, v, rule=RULES[rule], marks=known, scale=0.3, kernel=kernel), inputs, grad
    )
    assert_equal(found, expected)


@combinations(
    way=["ulysses", "ring", "ring in order"],
    world=[1, 2, 3, 4],
    rule=list(RULES),
    marks=MARKS,
    heads=list(HEADS),
    length=[24, 29],
)
def test_attention_over_ranks_is_that_of_one(way, world, rule, marks, heads, length):
    *inputs, grad = random_inputs(ROWS, length, *HEADS[heads], 8, 8)
    known = marks_of(marks, ROWS, length)
    mask = visible(known, RULES[rule], ROWS)
    expected = gradients_of(lambda q, k, v: textbook(q, k, v, mask), inputs, grad)
    shares = (TokenShares.balanced if way == "ring" else TokenShares.contiguous)(length, world)
    attention = ulysses_attention if way == "ulysses" else ring_attention

    def run(communicator):
        rank = communicator.rank

        def compute(q, k, v):
            return attention(q, k, v, communicator, rule=RULES[rule], marks=known, shares=shares)

        return gradients_of(compute, [own_tokens(one, shares, rank) for one in inputs], own_tokens(grad, shares, rank))

    ranks = run_threads(world, run)
    assert_equal([whole_of(list(parts), shares) for parts in zip(*ranks, strict=True)], expected)


@pytest.mark.parametrize("attention", [ulysses_attention, ring_attention], ids=["ulysses", "ring"])
def test_lengths_of_any_kind(attention):
    """Ranks may have very different numbers of tokens, one among them."""
    lengths = [11, 1, 6]
    shares, known = TokenShares.of_lengths(lengths), DocumentMask.of_boundaries([0, 3, 12, 18])
    *inputs, grad = random_inputs(1, 18, 4, 2, 8, 8)
    mask = visible(known, AttentionRule(), 1)
    expected = gradients_of(lambda q, k, v: textbook(q, k, v, mask), inputs, grad)

    def run(communicator):
        def compute(q, k, v):
            return attention(q, k, v, communicator, rule=AttentionRule(), marks=known, shares=shares)

        rank = communicator.rank
        return gradients_of(compute, [own_tokens(one, shares, rank) for one in inputs], own_tokens(grad, shares, rank))

    ranks = run_threads(3, run)
    assert_equal([whole_of(list(parts), shares) for parts in zip(*ranks, strict=True)], expected)


@pytest.mark.parametrize("attention", [ulysses_attention, ring_attention], ids=["ulysses", "ring"])
def test_bfloat16_is_as_near_as_torch_is(attention):
    """The distance from float64 is not that of several roundings: parts are merged in float32."""
    length, shares = 64, TokenShares.contiguous(64, 4)
    *inputs, grad = random_inputs(1, length, 4, 2, 16, 16, torch.bfloat16)
    known = DocumentMask(length)
    exact = gradients_of(
        lambda q, k, v: textbook(q, k, v, visible(known, AttentionRule(), 1)),
        [one.double() for one in inputs],
        grad.double(),
    )
    plain = gradients_of(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        inputs,
        grad,
    )

    def run(communicator):
        def compute(q, k, v):
            return attention(q, k, v, communicator, rule=AttentionRule(), marks=known, shares=shares)

        rank = communicator.rank
        return gradients_of(compute, [own_tokens(one, shares, rank) for one in inputs], own_tokens(grad, shares, rank))

    ranks = run_threads(4, run)
    found = [whole_of(list(parts), shares) for parts in zip(*ranks, strict=True)]
    for one, other, true in zip(found, plain, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - true).norm() < 1.5 * (other.double() - true).norm()


@pytest.mark.parametrize(("scatter", "gather"), [(2, 0), (2, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("heads", ["as many", "uneven", "one key head", "few heads"])
def test_distributed_attention_serves_any_order_of_dims(scatter, gather, heads):
    """(tokens, rows, heads, width), (rows, tokens, heads, width), and so on; arguments go through."""
    length, world = 15, 3
    *inputs, grad = random_inputs(ROWS, length, *HEADS[heads], 4, 4)
    shares = TokenShares.contiguous(length, world)
    mask = visible(DocumentMask(length), AttentionRule(), ROWS)
    order = [0, 0, 0, 3]
    order[scatter], order[gather] = 1, 2
    expected = gradients_of(lambda q, k, v: textbook(q, k, v, mask, 0.5), inputs, grad)
    seen = []

    def local(q, k, v, given, scale):
        seen.append(q.shape[gather])
        q, k, v = (one.permute(*torch.tensor(order).argsort().tolist()) for one in (q, k, v))
        return textbook(q, k, v, given, scale).permute(order)

    def run(communicator):
        attention = DistributedAttention(local, communicator, scatter, gather)

        def compute(q, k, v):
            out = attention(*(one.permute(order) for one in (q, k, v)), mask, scale=0.5)
            return out.permute(*torch.tensor(order).argsort().tolist())

        rank = communicator.rank
        return gradients_of(compute, [own_tokens(one, shares, rank) for one in inputs], own_tokens(grad, shares, rank))

    ranks = run_threads(world, run)
    assert_equal([whole_of(list(parts), shares) for parts in zip(*ranks, strict=True)], expected)
    assert set(seen) == {length}
    assert len(seen) == min(world, HEADS[heads][0])


def test_what_ulysses_gives_may_be_changed_in_place():
    def run(communicator):
        q, k, v = (torch.ones(1, 2, 3, 4, requires_grad=True) for _ in range(3))
        shares = TokenShares.contiguous(6, 2)
        out = ulysses_attention(q, k, v, communicator, rule=AttentionRule(), marks=DocumentMask(6), shares=shares)
        out.mul_(2.0).sum().backward()
        return v.grad.sum().item()

    assert sum(run_threads(2, run)) == pytest.approx(2.0 * 2 * 6 * 4)


def test_what_does_not_fit_is_refused():
    def run(communicator):
        q, shares = torch.zeros(1, 2, 3, 4), TokenShares.contiguous(6, 2)
        with pytest.raises(ShardingError) as caught:
            ring_attention(q, q, q, communicator, rule=AttentionRule(), marks=DocumentMask(7), shares=shares)
        assert caught.value.value == (3, 3)
        balanced = TokenShares.balanced(6, 2)
        with pytest.raises(ShardingError) as caught:
            ulysses_attention(q, q, q, communicator, rule=AttentionRule(), marks=DocumentMask(6), shares=balanced)
        assert "TokenShares.contiguous" in str(caught.value)
        with pytest.raises(ShardingError) as caught:
            DistributedAttention(textbook, communicator, 1, 2)(q, torch.zeros(1, 3, 3, 4), torch.zeros(1, 3, 3, 4))
        assert caught.value.value == (2, 3)
        with pytest.raises(ShardingError) as caught:
            DistributedAttention(textbook, communicator, 1, 2)(q, q, q, lengths=[4, 4])
        assert caught.value.value == (4, 4)

    run_threads(2, run)
    with pytest.raises(ShardingError) as caught:
        DistributedAttention(textbook, None, 2, 2)
    assert caught.value.value == (2, 2)
    with pytest.raises(ShardingError) as caught:
        AttentionRule(causal=False, window=3)
    assert caught.value.value == 3
    three, two = torch.zeros(3, 2, 4, 4), DocumentMask(4, torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]))
    with pytest.raises(ShardingError) as caught:
        local_attention(three, three, three, rule=AttentionRule(), marks=two)
    assert caught.value.value == 2
    with pytest.raises(ShardingError) as caught:
        DocumentMask.of_boundaries([0, 3, 3])
    assert caught.value.value == [0, 3, 3]
