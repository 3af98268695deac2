"""What a layer gives to the next is the same in one stage and in several, by every schedule, or is refused by name."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from pipeline_models import MICRO_BATCHES, pipeline_config
from torch import nn
from value_models import VALUES, WIDTH, ChangesInPlace, State, in_place_layers, value_layers

import polyaccel
from polyaccel.pipeline.table import PipelineError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline import PipelineModule
from polyaccel.torch.pipeline.values import StageValue, UnsendableValue, take_apart, unflatten

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
STEPS = 2


def data(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(MICRO_BATCHES, 2, 4, WIDTH, generator=generator)
    return [(one[0], one[1]) for one in drawn]


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.expand_as(labels), labels)


def call(layer: Any, value: Any) -> Any:
    return layer(*value) if isinstance(value, tuple) else layer(value)


def plain_losses(layers: list[nn.Module]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the weights of plain torch."""
    layers = deepcopy(layers)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.02)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for inputs, labels in data(step):
            value: Any = inputs
            for layer in layers:
                value = call(layer, value)
            loss = loss_fn(value, labels) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    names = {f"{at}.{name}": value for at, layer in enumerate(layers) for name, value in layer.state_dict().items()}
    return losses, names


def pipeline_losses(layers: list[nn.Module], stages: int, schedule: str, **changes: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.02}},
        "pipeline": {"schedule": schedule},
    }

    def run(communicator: Any) -> Any:
        model = PipelineModule(
            deepcopy(layers), stages, loss_fn=loss_fn, partition_method="uniform", schedule=schedule, **changes
        )
        engine, *_ = polyaccel.initialize(model=model, config=config)
        losses = [float(engine.train_batch(iter(data(step)))) for step in range(STEPS)]
        states = engine.module_state_dict()
        evaluated = float(engine.eval_batch(iter(data(STEPS))))
        engine.destroy()
        return losses, states, evaluated

    return run_threads(stages, run)


@cache
def values_of(kind: str) -> Any:
    return plain_losses(value_layers(kind))


def assert_same(found: Any, expected: Any) -> None:
    for losses, states, evaluated in found:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, value in expected[1].items():
            torch.testing.assert_close(states[name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert evaluated == found[0][2]


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_value_is_the_same_in_one_stage_and_in_several(kind, stages):
    assert_same(pipeline_losses(value_layers(kind), stages, "1f1b"), values_of(kind))


@pytest.mark.parametrize("kind", ["dict", "flag", "object", "shared", "shapes", "complex"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_passes_values_on(kind, schedule):
    """Two stages: with two chunks each, values pass between chunks of one stage too."""
    assert_same(pipeline_losses(value_layers(kind), 2, schedule), values_of(kind))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("interval", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_a_stage_may_begin_with_a_layer_that_changes_its_input(schedule, stages, interval):
    if stages == 4 and schedule in ("interleaved", "zb-v", "dualpipe-v"):
        stages = 2  # there are four layers
    layers = in_place_layers()
    found = pipeline_losses(layers, stages, schedule, activation_checkpoint_interval=interval)
    assert_same(found, plain_losses(layers))


def test_a_change_that_autograd_refuses_is_refused_between_chunks_too():
    """Tanh needs its output in backward, which the next chunk, on the same stage, writes over."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), ChangesInPlace(lambda x: x.mul_(2)), nn.Linear(WIDTH, WIDTH)]
    with pytest.raises(RuntimeError) as caught:
        plain_losses(layers)
    assert "inplace" in str(caught.value)
    with pytest.raises(RuntimeError) as caught:
        pipeline_losses(layers, 2, "zb-v")
    assert "inplace" in str(caught.value)


class Opaque:
    pass


def _local() -> Any:
    class Local(dict[str, Any]):
        pass

    return Local()


REFUSED = {
    "function": lambda: print,
    "generator": lambda: (one for one in "ab"),
    "object": Opaque,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.ones(2).as_subclass(type("Marked", (torch.Tensor,), {})),
    "factory": lambda: defaultdict(list),
    "local": _local,
    "type": lambda: torch.ones(2).to(torch.float8_e4m3fn),
}


class GivesBeside(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(WIDTH, WIDTH), make

    def forward(self, x: torch.Tensor) -> Any:
        return [self.layer(x), self.make()]


class TakesFirst(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x[0]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_sent_is_refused_with_the_layer(kind):
    layers = [nn.Identity(), GivesBeside(REFUSED[kind]), TakesFirst(), nn.Identity()]
    assert_same(pipeline_losses(layers, 1, "1f1b"), plain_losses(layers))
    with pytest.raises(PipelineError) as refused:
        pipeline_losses(layers, 2, "1f1b")
    assert refused.value.value.at == 1
    assert refused.value.value.name == "GivesBeside"


def test_a_value_that_contains_itself_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsendableValue):
        take_apart(endless, torch.device("cpu"))


def test_a_class_that_the_next_stage_has_not_imported_is_refused():
    structure, tensors = take_apart(State(torch.ones(1), 1), torch.device("cpu"))
    with pytest.raises(UnsendableValue) as refused:
        unflatten(StageValue(structure.replace(b"value_models", b"other_models"), tensors))
    assert refused.value.value == "other_models.State"


class Alternates(nn.Module):
    """Gives a tensor, a list or a dict, by the parity of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.passes += self.training
        h = self.layer(x)
        return (h, [h, 2 * h], {"h": h, "passes": self.passes})[self.passes % 3]


class TakesAny(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        if isinstance(x, dict):
            return x["h"] * x["passes"]
        return x if isinstance(x, torch.Tensor) else x[1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kind_of_value_may_change_with_each_micro_batch(schedule):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers = [Alternates(), TakesAny(), Alternates(), TakesAny()]
    assert_same(pipeline_losses(layers, 2, schedule), plain_losses(layers))


class Float32Inside(nn.Module):
    """Gives a tensor in float32 whatever its weights are in, and checks what comes."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(WIDTH, WIDTH), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            return self.layer(x).float() / 3
        assert x.dtype is torch.float32
        return self.layer(x.to(self.layer.weight.dtype)).float()


def test_a_stage_gets_the_type_that_the_layer_before_gave():
    """`fp16.auto_cast` casts what users give, and no value between stages."""
    config = pipeline_config(1, fp16={"enabled": True, "auto_cast": True, "loss_scale": 1.0})

    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [Float32Inside(first=True), Float32Inside(first=False)]

    def run(communicator: Any) -> list[float]:
        stages = communicator.world_size
        model = PipelineModule(deepcopy(layers), stages, loss_fn=loss_fn, partition_method="uniform")
        engine, *_ = polyaccel.initialize(model=model, config=config)
        losses = [float(engine.train_batch(iter(data(step)))) for step in range(STEPS)]
        engine.destroy()
        return losses

    (expected,) = run_threads(1, run)
    assert run_threads(2, run) == [expected] * 2
