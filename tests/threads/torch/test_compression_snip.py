"""Blocks that are removed by their importance, next to plain torch at every stage and world."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from pairwise import combinations
from parity_models import assert_close, batch, make_config, on_threads, parity_model, train_on_threads, train_plainly
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import ConfigError

STEPS, BEGIN, LAST, STRIDE, RATIO, BLOCK = 6, 1, 5, 2, 0.3, 3
SMALL = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}
LAYERS = ("wide", "narrow", "twice")
SHARED = {
    "enabled": True,
    "method": "snip_momentum",
    "schedule_offset": BEGIN,
    "schedule_offset_end": LAST,
    "schedule_offset_stride": STRIDE,
    "dense_ratio": RATIO,
    "block_pattern": f"{BLOCK}x1",
    "excluded_modules": ["head", "embed"],
}
SECTION: dict[str, Any] = {"sparse_pruning": {"shared_parameters": SHARED, "different_groups": {}}}


class PlainRemoval:
    """The same rule, written out: every block of all layers in one list."""

    def __init__(self) -> None:
        self.steps = 0
        self.scores: dict[str, Tensor] = {}
        self.masks: dict[str, Tensor] = {}

    def attach(self, model: nn.Module) -> nn.Module:
        for name in LAYERS:
            layer: Any = getattr(model, name)
            layer.forward = types.MethodType(lambda module, x, name=name: self.forward(name, module, x), layer)
        return model

    def forward(self, name: str, layer: Any, x: Tensor) -> Tensor:
        mask = self.masks.get(name)
        weight = layer.weight if mask is None else layer.weight * mask.repeat_interleave(BLOCK, 0)
        return nn.functional.linear(x, weight, layer.bias)

    @torch.no_grad()
    def before_update(self, masters: nn.Module) -> None:
        for name in LAYERS:
            weight = masters.get_parameter(f"{name}.weight")
            assert weight.grad is not None
            found = torch.stack([part.sum(0) for part in torch.split((weight * weight.grad).abs(), BLOCK)])
            self.scores[name] = 0.9 * self.scores[name] + found if name in self.scores else found
        self.steps += 1
        if BEGIN <= self.steps <= LAST and (self.steps - BEGIN) % STRIDE == 0:
            self.remove(RATIO ** (((self.steps - BEGIN) // STRIDE) / ((LAST - BEGIN) // STRIDE)))

    def remove(self, share: float) -> None:
        rows = []
        for name in LAYERS:
            flat = self.scores[name].flatten().tolist()
            mask = self.masks[name].flatten().tolist() if name in self.masks else [1.0] * len(flat)
            order = sorted(range(len(flat)), key=flat.__getitem__, reverse=True)
            first = set(order[: -(-len(flat) // 50)])
            for index, (score, there) in enumerate(zip(flat, mask, strict=True)):
                rows.append((-1.0 if not there else float("inf") if index in first else score, name, index))
        kept = sorted(rows, reverse=True)[: round(share * len(rows))]
        self.masks = {name: torch.zeros_like(self.scores[name]) for name in LAYERS}
        for score, name, index in kept:
            if score >= 0:
                self.masks[name].view(-1)[index] = 1.0


@combinations(stage=[0, 1, 2, 3], world=[1, 2, 3], accumulation=[1, 2])
def test_training_is_that_of_plain_torch(stage: int, world: int, accumulation: int) -> None:
    how = PlainRemoval()
    plain = train_plainly(
        world,
        STEPS,
        accumulation=accumulation,
        build=lambda: how.attach(parity_model()),
        before_update=how.before_update,
    )
    config = make_config(stage, accumulation=accumulation, compression_training=SECTION, zero=SMALL if stage else {})
    run = train_on_threads(world, config, STEPS)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_close(run.params, plain.params, 2e-5)
    total, kept = (sum(int(f(one)) for one in how.masks.values()) for f in (Tensor.numel, Tensor.sum))
    assert kept == round(RATIO * total)


def test_a_restart_removes_the_same_blocks(tmp_path: Any) -> None:
    """Saved between two removals at stage 2, and loaded by another number of ranks at stage 3."""

    def steps(engine: Any, first: int, last: int) -> None:
        for step in range(first, last):
            engine.backward(engine(*batch(step, 0, 0)))  # the same on every rank
            engine.step()

    def run(communicator: Any, model: nn.Module, stage: int, first: int, last: int) -> dict[str, Tensor]:
        config = make_config(stage, compression_training=SECTION, zero=SMALL)
        engine = polyaccel.initialize(model=model, config=config)[0]
        if first:
            engine.load_checkpoint(str(tmp_path))
        steps(engine, first, last)
        if last < STEPS:
            engine.save_checkpoint(str(tmp_path))
        return {name: one for name, one in model.named_buffers() if name.endswith("_mask")}

    wanted = on_threads(1, run, parity_model, 0, 0, STEPS)[0]
    on_threads(2, run, parity_model, 2, 0, 4)
    for found in on_threads(3, run, parity_model, 3, 4, STEPS):
        assert all(torch.equal(found[name], one) for name, one in wanted.items())


WRONG: dict[str, dict[str, Any]] = {
    "keys of another method": {"method": "l1"},
    "an end before the beginning": {"schedule_offset_end": 0},
    "no gradient yet": {"schedule_offset": 0, "schedule_offset_end": 0},
    "blocks of no layer": {"block_pattern": "4x1"},
    "no pattern": {"block_pattern": "4by1"},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused(name: str) -> None:
    section = {"sparse_pruning": {"shared_parameters": {**SHARED, **WRONG[name]}}}
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=parity_model(), config=make_config(0, compression_training=section))
    assert all("sparse_pruning" in problem.key for problem in caught.value.problems)
