"""Losses of sequences over ranks: weighted by tokens, with gradients whose mean over ranks is that of one rank."""

from __future__ import annotations

import pytest
import torch

from polyaccel.comm.init.threads import run_threads
from polyaccel.torch.context_parallel.losses import cross_entropy_over_ranks, mean_of_ranks, targets_of_next_tokens

CLASSES = 5


@pytest.mark.parametrize("targets_of", [(4, 0, 7), (0, 0, 1), (3, 3, 3)], ids=str)
def test_each_token_has_the_same_weight_on_whatever_rank_it_is(targets_of):
    torch.manual_seed(3)
    weight = torch.randn(CLASSES, 8, dtype=torch.float64)
    inputs = [torch.randn(8, 8, dtype=torch.float64) for _ in targets_of]
    targets = [torch.randint(CLASSES, (8,)).masked_fill(torch.arange(8) >= count, -100) for count in targets_of]
    whole = weight.clone().requires_grad_(True)
    expected = torch.nn.functional.cross_entropy(torch.cat(inputs) @ whole.T, torch.cat(targets))
    expected.backward()

    def run(communicator):
        own = weight.clone().requires_grad_(True)
        loss = cross_entropy_over_ranks(inputs[communicator.rank] @ own.T, targets[communicator.rank], communicator)
        loss.backward()
        return loss.detach(), own.grad

    found = run_threads(len(targets_of), run)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(sum(gradient for _, gradient in found) / len(found), whole.grad)


def test_no_targets_on_any_rank_are_what_they_are_in_torch():
    whole = torch.zeros(4, CLASSES, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(whole, torch.full((4,), -100))
    expected.backward()
    assert bool(expected.isnan())
    assert not whole.grad.any()

    def run(communicator):
        logits = torch.zeros(4, CLASSES, requires_grad=True)
        loss = cross_entropy_over_ranks(logits, torch.full((4,), -100), communicator)
        loss.backward()
        return bool(loss.isnan()), float(logits.grad.abs().max())

    assert run_threads(2, run) == [(True, 0.0)] * 2


def test_the_mean_of_ranks_is_seen_and_the_own_gradient_kept():
    def run(communicator):
        own = torch.tensor(float(communicator.rank), requires_grad=True)
        loss = mean_of_ranks(own * 3.0, communicator)
        loss.backward()
        return float(loss.detach()), float(own.grad)

    assert run_threads(3, run) == [(3.0, 3.0)] * 3


def test_the_last_token_of_a_rank_foretells_the_first_of_the_next():
    labels = torch.arange(6)[None]
    assert targets_of_next_tokens(labels).tolist() == [[1, 2, 3, 4, 5, -100]]
