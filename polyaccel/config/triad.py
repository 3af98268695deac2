"""The batch triad: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.errors import Problem


@dataclass(frozen=True, slots=True)
class Triad:
    """Samples of an optimizer step, samples of a forward pass on one rank, forward passes of a step."""

    train: int
    micro: int
    gas: int


def solve_triad(train: int | None, micro: int | None, gas: int | None, *, world_size: int) -> Triad | Problem:
    """The triad with its unknown members (None) found, or why there is none.

    With `train` or `micro` alone there is one micro-batch a step. `gas` alone determines nothing.
    """
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
    }
    seen = ", ".join(f"{name} = {value}" for name, value in given.items() if value is not None)
    context = f"({seen or 'none of the three is given'}, world size {world_size})"
    if train is None:
        if micro is not None:
            return Triad(micro * (gas or 1) * world_size, micro, gas or 1)
        cure = "give train_batch_size or train_micro_batch_size_per_gpu"
        return Problem("train_batch_size", None, f"cannot be determined {context}", cure)
    if micro is not None and gas is not None:
        if train == micro * gas * world_size:
            return Triad(train, micro, gas)
        expected = f"should be {micro} * {gas} * {world_size} = {micro * gas * world_size} {context}"
        return Problem("train_batch_size", train, expected, "leave one of the three out")
    divisor = (micro or gas or 1) * world_size
    if train % divisor:
        factor = "train_micro_batch_size_per_gpu" if micro else "gradient_accumulation_steps" if gas else ""
        product = f"{factor} * world size" if factor else "the world size"
        near = max(divisor, round(train / divisor) * divisor)
        expected = f"should be a multiple of {product} = {divisor} {context}"
        return Problem("train_batch_size", train, expected, f"use {near}, for example")
    rest = train // divisor
    return Triad(train, micro, rest) if micro is not None else Triad(train, rest, gas or 1)
