"""What scripts do to gradients, in any order and at any time of a training, ends where plain torch ends.

`make test` draws a few sequences, `make test-ownership` 2,000.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gradient_statements import STATEMENTS, drop_one
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_models import (
    SMALL_BUCKET,
    Params,
    ParityModel,
    Statement,
    assert_bitwise,
    assert_close,
    grouped,
    grouped_engine,
    make_config,
    on_threads,
    parity_loss,
    parity_model,
    snapshot,
)

from polyaccel.comm.base import Communicator

VARIABLE = "TESTS_OWNERSHIP"
EXAMPLES = int(os.environ.get(VARIABLE, "12"))
OPTIMIZERS = {
    "AdamW": ({"lr": 1e-2}, torch.optim.AdamW),
    "SGD": ({"lr": 5e-2, "momentum": 0.9}, torch.optim.SGD),  # to which the size of a gradient matters
}


def add_a_hook(model: ParityModel) -> None:
    model.wide.weight.register_hook(lambda gradient: gradient * 0.5)


def freeze(model: ParityModel) -> None:
    model.twice.requires_grad_(False)


def train_all(model: ParityModel) -> None:
    model.twice.requires_grad_(True)


def forget_all(model: ParityModel) -> None:
    """What `model.zero_grad()` does, without its look at gradients that are not reduced yet."""
    for parameter in model.parameters():
        parameter.grad = None


@dataclass(frozen=True)
class Step:
    """The statements of one optimizer step: before its first forward pass, after every backward pass but the last, and
    after that. `by_closure`: all of it happens in a closure that the optimizer calls, where one pass makes a step."""

    before: Sequence[Statement]
    between: Sequence[Statement]
    last: Sequence[Statement]
    by_closure: bool


def some(statements: Sequence[Statement], most: int) -> st.SearchStrategy[list[Statement]]:
    return st.lists(st.sampled_from(statements), max_size=most)


STEPS = st.builds(
    Step,
    before=some([add_a_hook, freeze, train_all], 1),
    between=some([drop_one, forget_all], 1),
    last=some(list(STATEMENTS.values()), 3),
    by_closure=st.booleans(),
)


def run(model: Any, statements: Sequence[Statement]) -> None:
    for statement in statements:
        statement(model)


def train(communicator: Communicator, model: ParityModel, config: dict[str, Any], script: Sequence[Step]) -> Params:
    engine = grouped_engine(model, config)
    passes = engine.gradient_accumulation_steps()
    for at, step in enumerate(script):

        def closure(at: int = at, step: Step = step) -> torch.Tensor:
            engine.optimizer.zero_grad()
            run(model, step.before)
            loss = parity_loss(engine, at, 0, communicator.rank)
            engine.backward(loss)
            run(model, step.last)
            return loss

        if step.by_closure and passes == 1:
            engine.optimizer.step(closure)
            continue
        run(model, step.before)
        for micro in range(passes):
            engine.backward(parity_loss(engine, at, micro, communicator.rank))
            run(model, step.last if micro == passes - 1 else step.between)
            engine.step()
    engine.destroy()
    return snapshot(model)


def train_plainly(world: int, script: Sequence[Step], accumulation: int, optimizer: str) -> Params:
    model = parity_model()
    numbers, kind = OPTIMIZERS[optimizer]
    update = kind(grouped(model), **numbers)
    for at, step in enumerate(script):
        update.zero_grad()
        run(model, step.before)
        for micro in range(accumulation):
            for rank in range(world):
                (parity_loss(model, at, micro, rank) / (accumulation * world)).backward()  # type: ignore[no-untyped-call]
            run(model, step.last if micro == accumulation - 1 else step.between)
        update.step()
    return snapshot(model)


@pytest.mark.timeout(300 + 3 * EXAMPLES)
@settings(max_examples=EXAMPLES, derandomize=VARIABLE not in os.environ, deadline=None)
@given(
    script=st.lists(STEPS, min_size=1, max_size=3),
    stage=st.integers(0, 3),
    offload=st.booleans(),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    world=st.integers(1, 3),
    accumulation=st.integers(1, 2),
)
def test_any_sequence_of_statements_on_gradients_counts(script, stage, offload, optimizer, world, accumulation):
    zero = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 20}
    if offload and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu"}
    section = {"type": optimizer, "params": OPTIMIZERS[optimizer][0]}
    config = make_config(stage, accumulation=accumulation, zero=zero, optimizer=section)
    runs = on_threads(world, train, parity_model, config, script)
    for params in runs:
        assert_bitwise(params, runs[0])
    assert_close(runs[0], train_plainly(world, script, accumulation, optimizer), 1e-5)
