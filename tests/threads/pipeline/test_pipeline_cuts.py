"""How a model is cut into stages by its blocks, and what of it is refused, by name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from block_models import Gates, gates
from hf_models import tiny
from pipeline_models import pipeline_config
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.pipeline.table import PipelineError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline.blocks import find_block_lists
from polyaccel.torch.pipeline.stage_module import StageModule
from polyaccel.torch.pipeline.trace import trace_model

CONFIG = pipeline_config(1, pipeline={"stages": 2})


class Skips(Gates):
    """Block 2 is given what block 0 gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [(x, 0)]
        for index, gate in enumerate(self.gates):
            states.append(gate(states[index if index != 2 else 1][0], self.scale, states[index]))
        return self.norm(states[-1][0])


class Drops(Gates):
    """The last block is left out in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: tuple[Any, ...] = (x, 0)
        for gate in list(self.gates)[: 3 if self.training else 4]:
            state = gate(state[0], self.scale, state)
        return self.norm(state[0])


class Checks(Gates):
    """The input of the first block must be finite."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.first = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        assert x.isfinite().all()
        return super().forward(x)


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gates(2).gates, Gates(2).gates


def nameless() -> Gates:
    model = Gates(4)
    del model.dummy_inputs
    return model


def backwards() -> Gates:
    model = Gates(4)
    model.forward = lambda x: [gate(x, 1, (x, 0)) for gate in reversed(model.gates)]
    return model


def routed() -> Any:
    model = tiny("mixtral", dtype=torch.float32, num_hidden_layers=3)
    model.config.output_router_logits = True
    return model


def translating() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
    return T5ForConditionalGeneration(T5Config(num_layers=3, num_decoder_layers=2, **sizes))


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: nn.Linear(2, 2), "Linear"),
        (lambda: Gates(1), "Gates"),
        (TwoStacks, "TwoStacks"),
        (nameless, "Gates"),
        (backwards, "gates.3"),
        (lambda: Skips(4), "gates.0"),
        (routed, "model.layers.1"),
    ],
)
def test_what_cannot_be_cut_is_named(make, value: object):
    def run(communicator: Any) -> bool:
        with pytest.raises(PipelineError) as caught:
            polyaccel.initialize(model=make(), config=CONFIG)
        assert caught.value.value == value
        return True

    assert run_threads(2, run) == [True, True]


class Unused(Gates):
    """A larger list than that of the blocks is not called."""

    def __init__(self) -> None:
        super().__init__(3)
        self.tower = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))


@pytest.mark.parametrize(
    ("make", "names"),
    [(translating, [f"encoder.block.{at}" for at in range(3)]), (lambda: Unused(), [f"gates.{at}" for at in range(3)])],
)
def test_of_several_lists_one_that_is_a_chain_is_cut(make, names, caplog):
    cut = StageModule(make(), (0, 1), 1, "uniform")
    assert list(cut.names) == names
    assert any(names[0].rpartition(".")[0] in record.getMessage() for record in caplog.records)


def test_a_cut_model_alone_is_not_run():
    def run(communicator: Any) -> bool:
        engine, *_ = polyaccel.initialize(model=deepcopy(gates()), config=CONFIG)
        with pytest.raises(PolyaccelError) as caught:
            engine.module(torch.ones(2, 6))
        assert "Gates(...)" in str(caught.value)
        with pytest.raises(PolyaccelError) as caught:
            engine.module.gates[0 if communicator.rank else 3](torch.ones(2, 6))
        assert "engine.train_batch(data_iter)" in str(caught.value)
        engine.destroy()
        interval = {"stages": 2, "activation_checkpoint_interval": 1}
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=deepcopy(gates()), config={**CONFIG, "pipeline": interval})
        assert [(problem.key, problem.value) for problem in caught.value.problems] == [
            ("pipeline.activation_checkpoint_interval", 1)
        ]
        return True

    assert run_threads(2, run) == [True, True]


def test_a_block_that_is_left_out_is_named():
    cut = StageModule(Drops(4), (0, 1), 1, "uniform")
    received = [torch.ones(2, 6), torch.arange(2), None]
    with pytest.raises(PipelineError) as caught:
        cut.run(lambda: cut.model(torch.ones(2, 6)), 1, received)
    assert caught.value.value == 3
    assert all(part in str(caught.value) for part in ("gates.3", "stage 1"))


def test_a_check_of_what_stands_in_for_weights_is_named():
    received = [torch.ones(2, 6), torch.arange(2), None]
    cut = StageModule(Checks(4), (0, 1), 1, "uniform")
    with pytest.raises(PipelineError) as caught:
        cut.run(lambda: cut.model(torch.ones(2, 6)), 1, received)
    assert caught.value.value == "gates.0"
    cut = StageModule(Checks(4), (0, 1), 0, "uniform")  # has the weights: the script's own error
    with pytest.raises(AssertionError):
        cut.run(lambda: cut.model(torch.full((2, 6), torch.inf)), 0, [])


def test_a_block_that_gives_something_else_than_before_is_named():
    cut = StageModule(deepcopy(gates()), (0, 1), 0, "uniform")
    cut.model.gates[1].forward = lambda *_: (torch.ones(2, 6), None)
    with pytest.raises(PipelineError) as caught:
        cut.run(lambda: cut.model(torch.ones(2, 6)), 0, [])
    assert caught.value.value == "gates.1"


def test_a_stage_may_have_several_chunks():
    """Chunks 0 and 2 of four on stage 0, 1 and 3 on stage 1; a value that stages share is lent, here by hand."""
    inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    stages = [StageModule(deepcopy(gates()), (0, 1, 0, 1), stage, "uniform") for stage in (0, 1)]
    for tie in stages[1].ties.values():
        for part, name in tie.lent:
            setattr(part, name, gates().get_parameter("scale").detach())
    assert [len(cut.model.gates) for cut in stages] == [4, 4]
    values: Any = []
    for chunk in range(4):
        cut = stages[chunk % 2]
        assert cut.parts[chunk] == range(chunk, chunk + 1)
        values = cut.run(lambda: cut.model(inputs), chunk, values)  # noqa: B023 - called at once
    assert torch.equal(values, gates()(inputs))


def test_the_trial_changes_nothing():
    model = tiny("bert", dtype=torch.float32, num_hidden_layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, state = dict(model.named_parameters()), torch.get_rng_state()
    trial = trace_model(model, *find_block_lists(model))
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter and parameter.grad is None for name, parameter in parameters.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(block._forward_hooks for block in model.bert.encoder.layer)
    words = model.bert.embeddings.word_embeddings.weight
    assert {parameter for parameter, parts in trial.users.items() if len(parts) > 1} == {words}
