"""The calls of a pipeline's engine, shapes that change, values between layers, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pipeline_models import MICRO_BATCHES, batches, micro_batch, pipeline_config, plain_layers, plain_model, trained
from torch import nn

import polyaccel
from polyaccel.config import load_resolved
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.pipeline.table import PipelineError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline import LayerSpec, PipelineModule, TiedLayerSpec


def on_stages(stages, run, *, model=plain_model, config=None):
    """What `run(engine, communicator)` returns on each of `stages` ranks."""

    def rank(communicator):
        engine, *_ = polyaccel.initialize(model=model(stages), config=config or pipeline_config(1))
        try:
            return run(engine, communicator)
        finally:
            engine.destroy()

    return run_threads(stages, rank)


def test_stages_know_their_place_and_data_may_be_set():
    def run(engine, communicator):
        engine.set_dataiterator(iter([micro_batch(step, micro, 0) for step in range(3) for micro in range(4)]))
        losses = [float(engine.train_batch()) for _ in range(2)]
        engine.reset_activation_shape()
        return engine.is_first_stage(), engine.is_last_stage(), losses, float(engine.eval_batch())

    found = on_stages(3, run)
    assert [each[:2] for each in found] == [(True, False), (False, False), (False, True)]
    assert all(each[2:] == found[0][2:] for each in found)
    (one,) = on_stages(1, run)
    assert one[:2] == (True, True)
    assert one[2:] == found[0][2:]


def test_a_stage_alone_is_not_run():
    def run(engine, communicator):
        with pytest.raises(PolyaccelError) as caught:
            engine(torch.ones(1, 6))
        assert "engine(...)" in str(caught.value)
        with pytest.raises(PolyaccelError) as caught:
            engine.backward(torch.ones((), requires_grad=True))
        assert "engine.backward(...)" in str(caught.value)
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(iter([torch.ones(1)] * 4))
        assert caught.value.value == "Tensor"
        return True

    assert on_stages(2, run) == [True, True]


def test_one_stage_is_an_ordinary_module():
    def run(engine, communicator):
        inputs, labels = micro_batch(0, 0, 0)
        expected = nn.Sequential(*plain_layers())(inputs)
        assert torch.equal(engine(inputs), expected)
        engine.backward(nn.functional.mse_loss(engine(inputs), labels))
        engine.step()
        return engine.micro_steps

    assert on_stages(1, run) == [1]
    model = PipelineModule([LayerSpec(nn.Linear, 3, 2), nn.functional.relu])
    assert model(torch.ones(1, 3)).shape == (1, 2)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]


class Pair(nn.Module):
    """Two outputs of which one has no gradient, and None."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, value):
        return self.layer(value), torch.arange(value.shape[0]), None


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, value, places, nothing):
        assert nothing is None
        return self.layer(value).squeeze(-1) * places


def test_several_values_and_shapes_that_change_pass_between_stages():
    first, second = Pair(), Joined()

    def model(stages):
        from copy import deepcopy

        layers = [deepcopy(first), deepcopy(second)]
        return PipelineModule(layers, stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")

    def run(engine, communicator):
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            lengths = [2 + (step + micro) % 3 for micro in range(MICRO_BATCHES)]
            source = [(torch.randn(n, 3, generator=generator), torch.randn(n, generator=generator)) for n in lengths]
            losses.append(float(engine.train_batch(iter(source))))
        return losses

    (expected,) = on_stages(1, run, model=model)
    assert on_stages(2, run, model=model) == [expected, expected]


def test_frozen_first_layers_send_no_gradients():
    def model(stages):
        layers = plain_layers()
        layers[0].requires_grad_(False)
        layers[2].requires_grad_(False)
        return PipelineModule(layers, stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")

    def run(engine, communicator):
        return [float(engine.train_batch(batches(step, 0))) for step in range(3)]

    (expected,) = on_stages(1, run, model=model)
    assert on_stages(2, run, model=model) == [expected, expected]


def test_a_sequential_is_cut_as_the_config_says():
    config = pipeline_config(1, pipeline={"stages": 2, "partition": "type:linear"})

    def run(communicator):
        model = nn.Sequential(*plain_layers())
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
        with pytest.raises(PolyaccelError) as caught:
            polyaccel.initialize(model=model, config=config, optimizer=torch.optim.SGD(groups, lr=0.1))
        assert "SGD" in str(caught.value)
        model.loss_fn = nn.functional.mse_loss
        engine, *_ = polyaccel.initialize(model=model, config=config)
        assert engine.train_batch(batches(0, 0)) > 0
        names = [name for name, _ in engine.module.named_parameters()]
        engine.destroy()
        return names

    first, second = run_threads(2, run)
    assert first == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert second == ["5.weight", "5.bias", "6.weight", "6.bias"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tensor_parallel": {"autotp_size": 2, "sequence_sharded": True}}, "tensor_parallel.sequence_sharded"),
        ({"mesh": {"pipe": 3}}, "pipeline.stages"),
        ({"pipeline": {"stages": 3}}, "pipeline.stages"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, key: str):
    with pytest.raises(ConfigError) as caught:
        load_resolved(pipeline_config(1, **{"pipeline": {"stages": 2}, **changes}), world_size=4)
    assert caught.value.problems[0].key == key


def test_models_that_cannot_be_dealt_are_refused():
    config = pipeline_config(1, pipeline={"stages": 2})

    def run(communicator):
        with pytest.raises(PipelineError) as caught:
            polyaccel.initialize(model=nn.Linear(2, 2), config=config)
        assert caught.value.value == "Linear"
        with pytest.raises(PolyaccelError) as caught:
            polyaccel.initialize(model=PipelineModule([nn.Linear(2, 2)]), config=config)
        assert caught.value.value == 1
        assert "PipelineModule" in str(caught.value)
        with pytest.raises(PipelineError) as caught:
            PipelineModule([nn.Linear(2, 2)] * 3, 3)
        assert caught.value.value == 3
        with pytest.raises(PipelineError) as caught:
            PipelineModule([nn.Linear(2, 2)], 2)
        assert caught.value.value == 1
        return True

    assert run_threads(2, run) == [True, True]


def test_a_topology_says_the_stage():
    class Topology:
        def get_dim(self, axis):
            return {"pipe": 2, "data": 1}.get(axis, 0)

        def get_coord(self, rank):
            return type("Coordinates", (), {"pipe": 1 - rank})

    def run(communicator):
        return PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], topology=Topology()).stage

    assert run_threads(2, run) == [1, 0]
    with pytest.raises(PipelineError) as caught:
        PipelineModule([nn.Linear(2, 2)] * 2, 2)
    assert "polyaccel.init_distributed()" in str(caught.value)


def test_layers_are_seeded_by_their_place():
    def weights(**arguments):
        return [p.detach().clone() for p in PipelineModule(specs, **arguments).parameters()]

    specs = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 2)]
    with torch.random.fork_rng():
        assert all(map(torch.equal, weights(seed_layers=True), weights(seed_layers=True)))
        seeds = []
        weights(seed_layers=True, seed_fn=seeds.append, base_seed=7)
        assert seeds == [7, 8]


def test_tied_specs_of_one_stage_are_one_module():
    specs = [TiedLayerSpec("a", nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 2), TiedLayerSpec("a", nn.Linear, 2, 2)]
    model = PipelineModule(specs)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(PipelineError) as caught:
        LayerSpec(3)
    assert caught.value.value == 3
    assert "LayerSpec" in str(caught.value)


def test_a_batch_is_evaluated_as_one_asks():
    """On two stages of which the second has the last layers, and in a V, where the first has them."""

    def run(engine, communicator):
        source = [micro_batch(0, micro, 0) for micro in range(MICRO_BATCHES)]
        mean = engine.eval_batch(iter(source))
        each = engine.eval_batch(iter(source), reduce_output=None)
        both, outputs = engine.eval_batch(iter(source), return_logits=True)
        alone = engine.eval_batch(iter(source), compute_loss=False, reduce_output=None)
        average = engine.eval_batch(iter(source), compute_loss=False)
        with pytest.raises(PolyaccelError) as caught:
            engine.eval_batch(iter(source), reduce_output="sum")
        assert caught.value.value == "sum"
        assert "reduce_output" in str(caught.value)
        assert mean == both == torch.stack(each).mean()
        assert (outputs is None) == (alone is None) == (average is None) == (not engine.is_last_stage())
        if outputs is None:
            return each
        labels = [labels for _, labels in source]
        assert each == [nn.functional.mse_loss(out, label) for out, label in zip(outputs, labels, strict=True)]
        assert all(map(torch.equal, outputs, alone))
        torch.testing.assert_close(average, torch.stack(outputs).mean(0))
        return each

    (expected,) = on_stages(1, run)
    assert on_stages(2, run) == [expected] * 2
    folded = partial(plain_model, schedule="zb-v")
    assert on_stages(2, run, model=folded, config=pipeline_config(1, "zb-v")) == [expected] * 2


def test_outputs_that_have_no_mean_are_said():
    def run(engine, communicator):
        lengths = [2, 3, 2, 3]
        source = [(torch.ones(length, 6), torch.ones(length, 5)) for length in lengths]
        assert engine.eval_batch(iter(source)) > 0
        with pytest.raises(PolyaccelError) as caught:
            engine.eval_batch(iter(source), compute_loss=False)
        assert "reduce_output=None" in str(caught.value)
        return True

    assert on_stages(1, run) == [True]


def test_layers_that_do_not_fit_are_named_with_their_stages():
    def model(stages):
        layers = [
            LayerSpec(nn.Linear, 6, 4),
            nn.functional.gelu,
            LayerSpec(nn.Linear, 5, 3),
            LayerSpec(nn.Linear, 3, 1),
        ]
        return PipelineModule(layers, stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")

    def run(engine, communicator):
        engine.train_batch(batches(0, 0))

    with pytest.raises(PipelineError) as caught:
        on_stages(2, run, model=model)
    assert caught.value.value == 2
    assert all(part in str(caught.value) for part in ("float32", "RuntimeError", "mat1", "mat2"))


def test_a_sequential_is_cut_into_chunks_as_the_config_says():
    config = pipeline_config(1, pipeline={"stages": 2, "partition": "uniform", "schedule": "interleaved", "chunks": 3})

    def run(communicator):
        model = nn.Sequential(*plain_layers())
        model.loss_fn = nn.functional.mse_loss
        engine, *_ = polyaccel.initialize(model=model, config=config)
        loss = float(engine.train_batch(batches(0, 0)))
        names = [name for name, _ in engine.module.named_parameters()]
        with pytest.raises(PipelineError) as caught:
            engine.module(torch.ones(1, 6))
        assert caught.value.value in ([0, 2, 4], [1, 3, 5])
        with pytest.raises(PipelineError) as caught:
            engine.module.chunk(6)
        assert caught.value.value == 6
        engine.destroy()
        return loss, names

    (one, first), (other, second) = run_threads(2, run)
    assert one == other == trained(1, 1, pipeline_config(1), steps=1).losses[0][0]
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(name for name, _ in nn.Sequential(*plain_layers()).named_parameters())


@pytest.mark.parametrize("schedule", ["inference", "2f2b", "table.txt"])
def test_a_schedule_that_does_not_train_is_refused(schedule):
    with pytest.raises(ConfigError) as caught:
        polyaccel.config.load_config(pipeline_config(1, schedule))
    assert [problem.key for problem in caught.value.problems] == ["pipeline.schedule"]
    assert all(part in str(caught.value) for part in ("1f1b", "zb-h1"))
