"""However gradients appear, the update is that of plain torch: unused, late, several passes, activation checkpointing.

Each test runs at every stage, with buckets so small that parameters do not share them.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from parity_models import (
    SMALL,
    assert_bitwise,
    assert_close,
    batch,
    drawn_from,
    grouped_engine,
    make_config,
    on_threads,
    parity_loss,
    parity_model,
    snapshot,
    train_on_threads,
    train_plainly,
)
from stage_cases import both_backwards, stages
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyaccel

STEPS = 3


class Branches(nn.Module):
    """Runs the branches whose numbers it is given, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.branches = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, inputs, order):
        hidden = self.first(inputs)
        for index in order:
            hidden = hidden + torch.tanh(self.branches[index](hidden))
        return hidden.square().mean()


def branches() -> Branches:
    with drawn_from(1):
        return Branches()


def inputs(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


ORDERS = {
    "a branch that is never used": lambda step, micro, rank: (0, 1, 2),
    "branches that come and go": lambda step, micro, rank: [(0, 1, 2), (0, 3), (3, 2, 0)][step],
    "branches on some ranks only": lambda step, micro, rank: [(0,), (0, 1), (0, 1, 3)][(rank + step) % 3],
    "a branch that is late after the first step": lambda step, micro, rank: (0, 1, 2) if step == 0 else (0, 1, 2, 3),
    "another order in every step": lambda step, micro, rank: [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)][step],
    "another order on every rank": lambda step, micro, rank: [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)][rank],
    "a branch that runs more often later": lambda step, micro, rank: (0, 1, 2, 3) + (1,) * (step + rank),
    "another branch in every micro-batch": lambda step, micro, rank: (micro, 3) if rank else (3,),
}


@stages
@pytest.mark.parametrize(("world", "accumulation"), [(1, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_branches_that_change(order, world, accumulation, stage):
    """A parameter without a gradient on any rank is left alone, also by weight decay; elsewhere zeros stand in."""

    def loss_fn(model, step, micro, rank):
        return model(inputs(step, micro, rank), order(step, micro, rank))

    config = make_config(stage, accumulation=accumulation, zero=SMALL, gradient_clipping=0.1)
    plain = train_plainly(world, STEPS, accumulation=accumulation, clip=0.1, build=branches, loss_fn=loss_fn)
    run = train_on_threads(world, config, STEPS, build=branches, loss_fn=loss_fn)
    assert_close(run.params, plain.params)
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)


@stages
@pytest.mark.parametrize("accumulation", [1, 3])
def test_plain_backward_equals_the_engine_s(stage, accumulation):
    def plainly(communicator, model, config):
        engine = grouped_engine(model, config)
        for step in range(STEPS):
            for micro in range(accumulation):
                engine(*batch(step, micro, communicator.rank)).backward()
                engine.step()
        return snapshot(engine.module)

    config = make_config(stage, accumulation=accumulation, zero=SMALL)
    ours = train_on_threads(2, config, STEPS).params
    for theirs in on_threads(2, plainly, parity_model, config):
        if accumulation == 1:
            assert_bitwise(theirs, ours)
        else:  # the loss or the gradient is divided
            assert_close(theirs, ours)


@stages
@both_backwards
def test_several_backward_passes_before_a_step(stage, own_backward):
    """Two losses, one of them over a shared graph twice: their gradients add up."""

    def twice(communicator, model, config):
        engine = grouped_engine(model, config)
        for step in range(STEPS):
            first, second = (engine(*batch(step, micro, communicator.rank)) for micro in range(2))
            if own_backward:
                engine.backward(first, retain_graph=True)
                engine.backward(second)
                engine.backward(first)
            else:
                first.backward(retain_graph=True)
                second.backward()
                first.backward()
            engine.step()
        assert engine.global_steps == STEPS
        return snapshot(engine.module)

    def loss_fn(model, step, micro, rank):
        return 2 * model(*batch(step, 0, rank)) + model(*batch(step, 1, rank))

    plain = train_plainly(2, STEPS, loss_fn=loss_fn)
    for params in on_threads(2, twice, parity_model, make_config(stage, zero=SMALL)):
        assert_close(params, plain.params)


class Recomputing(nn.Module):
    """Blocks under activation checkpointing; one block runs twice inside one, and one stands outside."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, values):
        hidden = self.first(values)
        for block in self.blocks:
            if self.reentrant is None:
                hidden = self._run(block, hidden)
            else:
                hidden = checkpoint(self._run, block, hidden, use_reentrant=self.reentrant)
        return self.last(hidden).square().mean()

    def _run(self, block, hidden):
        return torch.tanh(block(torch.tanh(block(hidden)))) + self.blocks[0](hidden)


@stages
@both_backwards
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_activation_checkpointing(stage, own_backward, reentrant, accumulation):
    def build(kind=reentrant):
        with drawn_from(2):
            return Recomputing(kind)

    def recomputing(communicator, model, config):
        engine = grouped_engine(model, config)
        for step in range(STEPS):
            for micro in range(accumulation):
                loss = engine(inputs(step, micro, communicator.rank))
                engine.backward(loss) if own_backward else loss.backward()
                engine.step()
        return snapshot(engine.module)

    def loss_fn(model, step, micro, rank):
        return model(inputs(step, micro, rank))

    plain = train_plainly(2, STEPS, accumulation=accumulation, build=lambda: build(None), loss_fn=loss_fn)
    for params in on_threads(2, recomputing, build, make_config(stage, accumulation=accumulation, zero=SMALL)):
        assert_close(params, plain.params)


@stages
def test_zero_grad_forgets_what_has_accumulated(stage):
    def forgetful(communicator, model, config):
        engine = grouped_engine(model, config)
        for step in range(STEPS):
            for forget in (True, False):
                for micro in range(2):
                    engine.backward(engine(*batch(step + 50 * forget, micro, communicator.rank)))
                    if forget:
                        engine.zero_grad()
                    else:
                        engine.step()
        return snapshot(engine.module)

    plain = train_plainly(2, STEPS, accumulation=2)
    for params in on_threads(2, forgetful, parity_model, make_config(stage, accumulation=2, zero=SMALL)):
        assert_close(params, plain.params)


@stages
def test_zero_grad_forgets_passes_without_sync(stage):
    def forgetful(communicator, model, config):
        engine = grouped_engine(model, config)
        for step in range(STEPS):
            with engine.no_sync():
                engine.backward(engine(*batch(50 + step, 0, communicator.rank)))
            engine.zero_grad()
            engine.backward(engine(*batch(step, 0, communicator.rank)))
            engine.step()
        return snapshot(engine.module)

    plain = train_plainly(2, STEPS)
    for params in on_threads(2, forgetful, parity_model, make_config(stage, zero=SMALL)):
        assert_close(params, plain.params)


@stages
@both_backwards
def test_no_sync_and_then_a_step_without_another_backward(stage, own_backward):
    """Nothing but passes without sync: the update reduces what they left, also on ranks that used other parameters."""

    def unsynchronised(communicator, model, config):
        engine = grouped_engine(model, config)
        for step in range(STEPS):
            for micro in range(2):
                with engine.no_sync():
                    order = (0, 1) if (communicator.rank + micro) % 2 else (0, 2)
                    loss = engine(inputs(step, micro, communicator.rank), order)
                    engine.backward(loss) if own_backward else loss.backward()
                engine.step()
        return snapshot(engine.module)

    def loss_fn(model, step, micro, rank):
        return model(inputs(step, micro, rank), (0, 1) if (rank + micro) % 2 else (0, 2))

    plain = train_plainly(2, STEPS, accumulation=2, build=branches, loss_fn=loss_fn)
    for params in on_threads(2, unsynchronised, branches, make_config(stage, accumulation=2, zero=SMALL)):
        assert_close(params, plain.params)


@stages
@pytest.mark.parametrize("synchronised", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_boundaries_set_by_hand(stage, synchronised):
    """Two backward passes and one step, each pass with or without sync, and the engine told where the boundary is."""

    def user_grad_edits(communicator, model, config):
        engine = grouped_engine(model, config)
        for step in range(STEPS):
            for micro in range(2):
                engine.set_gradient_accumulation_boundary(micro == 1)
                assert engine.is_gradient_accumulation_boundary() == (micro == 1)
                with nullcontext() if synchronised[micro] else engine.no_sync():
                    engine.backward(parity_loss(engine, step, micro, communicator.rank) / 2)
                engine.step()
                assert engine.was_step_applied() == (micro == 1)
        engine.set_gradient_accumulation_boundary(None)
        assert engine.is_gradient_accumulation_boundary()
        assert (engine.global_steps, engine.micro_steps) == (STEPS, 2 * STEPS)
        return snapshot(engine.module)

    plain = train_plainly(2, STEPS, accumulation=2)
    for params in on_threads(2, user_grad_edits, parity_model, make_config(stage, zero=SMALL)):
        assert_close(params, plain.params)


@stages
def test_backward_through_a_graph_from_before_the_step_is_an_error(stage):
    """Parameters change in place; autograd must say so instead of mixing old activations with new weights."""

    def stale(communicator, model, config):
        engine = grouped_engine(model, config)
        old = parity_loss(engine, 0, 0, communicator.rank)
        engine.backward(parity_loss(engine, 1, 0, communicator.rank))
        engine.step()
        with pytest.raises(RuntimeError) as caught:
            engine.backward(old)
        assert "inplace" in str(caught.value)
        engine.zero_grad()
        engine.backward(parity_loss(engine, 2, 0, communicator.rank))  # and the engine goes on
        engine.step()

    on_threads(1, stale, parity_model, make_config(stage, zero=SMALL))


@stages
def test_sparse_gradients_train_what_dense_ones_train(stage):
    tokens = [torch.tensor([1, 2, 2]), torch.tensor([5, 2, 7])]
    embedding = nn.Embedding(9, 3, sparse=True)
    plain = nn.Embedding(9, 3)
    plain.load_state_dict(embedding.state_dict())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([plain(each).square().mean() for each in tokens]).mean().backward()
        optimizer.step()

    def sparse(communicator, model):
        config = make_config(stage, optimizer={"type": "Adam", "params": {"lr": 0.1}})
        engine, *_ = polyaccel.initialize(model=model, config=config)
        for _ in range(3):
            engine.backward(engine(tokens[communicator.rank]).square().mean())
            engine.step()
        weight = polyaccel.utils.safe_get_full_fp32_param(model.weight)
        torch.testing.assert_close(weight, plain.weight, rtol=1e-6, atol=1e-7)

    on_threads(2, sparse, lambda: copy.deepcopy(embedding))
