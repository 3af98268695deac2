"""Batches that grow with the samples seen, next to plain torch with as many micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_models import batch, make_config, on_threads, parity_model

import polyaccel
from polyaccel.engine.batch_ramp import BatchRamp
from polyaccel.errors import ConfigError

RAMP = [4, 4, 24]
SIZES = [4, 4, 4, 8, 8, 12, 12]
"""Two increments, one for each 12 samples, as Megatron-LM counts: 0, 4, 8, 12, 20, 28 samples were seen before."""


def of_megatron(seen: int, start: int, increment: int, samples: int, target: int) -> int:
    """Megatron-LM's own words: samples of an increment as a float, and its whole multiples."""
    if seen > samples:
        return target
    each = samples / ((target - start) // increment)
    return min(start + int(seen / each) * increment, target)


@pytest.mark.parametrize(
    ("start", "increment", "samples", "target"), [(4, 4, 24, 12), (16, 16, 300, 96), (8, 8, 7, 64)]
)
def test_sizes_are_those_of_megatron(start: int, increment: int, samples: int, target: int) -> None:
    ramp = BatchRamp(start, increment, samples, target)
    found = [ramp.at(seen) for seen in range(2 * samples)]
    assert found == [of_megatron(seen, start, increment, samples, target) for seen in range(2 * samples)]


def plain_losses() -> list[list[float]]:
    """The losses of each step, of both ranks, where a step has the mean gradient of its micro-batches."""
    model = parity_model()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, weight_decay=0.01)
    found = []
    for step, size in enumerate(SIZES):
        optimizer.zero_grad()
        losses = [model(*batch(step, micro, rank)) for micro in range(size // 4) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


def begin(model: Any) -> Any:
    config = make_config(1, train_batch_size=12, train_micro_batch_size_per_gpu=2, rampup_batch_size=RAMP)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    config.pop("gradient_accumulation_steps", None)
    return polyaccel.initialize(model=model, config=config)[0]


def test_a_step_has_its_samples_and_a_checkpoint_continues_on_the_way(tmp_path: Any) -> None:
    def run(communicator: Any, model: Any, first: int, last: int) -> Any:
        engine = begin(model)
        if first:
            engine.load_checkpoint(str(tmp_path))
        sizes, found = [], []
        for step in range(first, last):
            sizes.append(engine.train_batch_size())
            for micro in range(engine.gradient_accumulation_steps()):
                loss = engine(*batch(step, micro, communicator.rank))
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        engine.save_checkpoint(str(tmp_path))
        return sizes, found, engine.global_samples

    before = on_threads(2, run, parity_model, 0, 4)
    after = on_threads(2, run, parity_model, 4, len(SIZES))
    wanted = plain_losses()
    for rank, ((sizes, found, _), (more_sizes, more, seen)) in enumerate(zip(before, after, strict=True)):
        assert sizes + more_sizes == SIZES
        assert seen == sum(SIZES)
        assert found + more == pytest.approx([one for step in wanted for one in step[rank::2]], rel=1e-5)


@pytest.mark.parametrize("numbers", [[3, 4, 24], [4, 5, 24], [16, 4, 24]])
def test_steps_that_are_no_whole_micro_batches_are_refused(numbers: list[int]) -> None:
    config = make_config(0, train_batch_size=12, train_micro_batch_size_per_gpu=4, rampup_batch_size=numbers)
    config.pop("gradient_accumulation_steps", None)
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=parity_model(), config=config)
    assert {problem.key for problem in caught.value.problems} == {"rampup_batch_size"}
