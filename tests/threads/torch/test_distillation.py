"""The loss of a student next to its formula in float64, and its training at every stage next to plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity_models import ParityModel, assert_close, drawn_from, make_config, train_on_threads, train_plainly
from torch import Tensor

import polyaccel
from polyaccel.errors import PolyaccelError


def config(**distillation: Any) -> dict[str, Any]:
    reduction = {"enabled": True, "teacher_layer": [1, 3], "distillation": distillation}
    return {"compression_training": {"layer_reduction": reduction}}


def outputs(seed: int, layers: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    hidden = tuple(torch.randn(2, 3, 4, generator=draw) for _ in range(layers + 1))
    return SimpleNamespace(logits=torch.randn(2, 3, 5, generator=draw), hidden_states=hidden, loss=torch.tensor(1.5))


def kl(student: Tensor, teacher: Tensor, temperature: float) -> list[float]:
    """One row after the other, in float64."""
    found = []
    for mine, theirs in zip(student.double().view(-1, 5), teacher.double().view(-1, 5), strict=True):
        p, q = ((one / temperature).exp() / (one / temperature).exp().sum() for one in (theirs, mine))
        found.append(float((p * (p / q).log()).sum()))
    return found


@pytest.mark.parametrize("has_mask", [False, True])
def test_the_loss_is_its_formula(has_mask: bool) -> None:
    mine, theirs = outputs(0, 2), outputs(1, 4)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    rows = kl(mine.logits, theirs.logits, 3.0)
    counted = [row for row, is_in in zip(rows, mask.flatten().tolist(), strict=True) if is_in or not has_mask]
    pairs = [(0, 0), (1, 2), (2, 4)]
    squares = [
        float((mine.hidden_states[one].double() - theirs.hidden_states[two].double()).square().mean())
        for one, two in pairs
    ]
    wanted = 0.6 * 1.5 + 0.4 * 9.0 * sum(counted) / len(counted) + 0.7 * sum(squares)
    section = config(weight=0.4, temperature=3.0, hidden_weight=0.7)
    found = polyaccel.distillation_loss(mine, theirs, section, mask=mask if has_mask else None)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


class Student(ParityModel):
    """The parity model, whose loss has the distance from fixed logits."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        found: list[Tensor] = []
        with self.head.register_forward_hook(lambda *given: found.append(given[-1])):
            loss = super().forward(tokens, targets)
        fixed = torch.sin(torch.arange(found[0].numel()).float()).view_as(found[0])
        return polyaccel.distillation_loss(found[0], fixed, config(weight=0.3, temperature=2.0), loss=loss)


def student() -> Student:
    with drawn_from(0):
        return Student()


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (2, 2), (3, 2)])
def test_a_student_trains_as_in_plain_torch(stage: int, world: int) -> None:
    plain = train_plainly(world, 3, build=student)
    run = train_on_threads(world, make_config(stage), 3, build=student)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_close(run.params, plain.params, 2e-5)


WRONG: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "off": (outputs(0, 2), outputs(1, 4), {}),
    "no logits": (SimpleNamespace(), outputs(1, 4), config()),
    "another batch": (outputs(0, 2).logits[:1], outputs(1, 4), config(weight=1.0)),
    "no loss": (outputs(0, 2).logits, outputs(1, 4), config()),
    "no hidden states": (outputs(0, 2), outputs(1, 4).logits, config(hidden_weight=1.0)),
    "other layers": (outputs(0, 3), outputs(1, 4), config(hidden_weight=1.0)),
}


@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 3, 1)])
def test_masks_that_would_be_repeated_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PolyaccelError):
        polyaccel.distillation_loss(outputs(0, 2), outputs(1, 4), config(), mask=torch.ones(shape))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_missing_is_said(name: str) -> None:
    found, wanted, section = WRONG[name]
    with pytest.raises(PolyaccelError):
        polyaccel.distillation_loss(found, wanted, section)
