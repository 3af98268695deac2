"""Checkpoints and weights of pipelines: from any number of stages to any other, by the names of the whole model."""

from __future__ import annotations

import pytest
import torch
from pipeline_models import (
    batches,
    pipeline_config,
    plain_layers,
    plain_model,
    tied_model,
    trained,
    words,
)
from safetensors.torch import load_file
from torch import nn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads


def saved(folder, stages, data, *, model=plain_model, make=None, steps=2):
    """Train from the beginning and save; the last rank's client state is not what is saved."""

    def run(communicator):
        engine, *_ = polyaccel.initialize(model=model(stages), config=pipeline_config(1))
        for step in range(steps):
            engine.train_batch(batches(step, communicator.rank % data, *([make] if make else [])))
        engine.save_checkpoint(str(folder), client_state={"epoch": 3})
        engine.destroy()

    run_threads(stages * data, run)


def resumed(folder, stages, data, *, model=plain_model, make=None, steps=range(2, 4)):
    """Go on from a checkpoint. The losses of each data rank, the norms, and the whole model."""

    def run(communicator):
        place = communicator.rank % data
        engine, *_ = polyaccel.initialize(model=model(stages), config=pipeline_config(1, "gpipe"))
        _, client_state = engine.load_checkpoint(str(folder))
        assert client_state == {"epoch": 3}
        assert engine.global_steps == 2
        source = [batches(step, place, *([make] if make else [])) for step in steps]
        losses = [float(engine.train_batch(each)) for each in source]
        values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return place, losses, values

    ranks = run_threads(stages * data, run)
    return {place: losses for place, losses, _ in ranks}, ranks[0][2]


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 1), (3, 1)), ((3, 1), (2, 1)), ((2, 2), (1, 2))])
def test_a_checkpoint_goes_on_with_another_number_of_stages(before, after, tmp_path):
    saved(tmp_path, *before)
    losses, values = resumed(tmp_path, *after)
    whole = trained(1, before[1], pipeline_config(1), steps=4)
    assert losses == {place: all_losses[2:] for place, all_losses in whole.losses.items()}
    assert values.keys() == whole.values.keys()
    assert all(torch.equal(values[name], value) for name, value in whole.values.items())


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_tied_weights_are_saved_once(before, after, tmp_path):
    saved(tmp_path, before, 1, model=tied_model, make=words)
    losses, values = resumed(tmp_path, after, 1, model=tied_model, make=words)
    whole = trained(1, 1, pipeline_config(1), model=tied_model, make=words, steps=4)
    assert losses[0] == pytest.approx(whole.losses[0][2:], rel=1e-6)
    assert values.keys() == whole.values.keys()


def test_an_ordinary_engine_loads_what_a_pipeline_saved_and_the_other_way(tmp_path):
    saved(tmp_path / "pipe", 2, 1)

    def run(communicator):
        model = nn.Sequential(*plain_layers())
        engine, *_ = polyaccel.initialize(model=model, config={**pipeline_config(0), "pipeline": {}})
        engine.load_checkpoint(str(tmp_path / "pipe"))
        found = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.save_checkpoint(str(tmp_path / "plain"), client_state={"epoch": 3})
        engine.destroy()
        return found

    (values,) = run_threads(1, run)
    expected = trained(1, 1, pipeline_config(1), steps=2).values
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    losses, _ = resumed(tmp_path / "plain", 3, 1)
    assert losses[0] == trained(1, 1, pipeline_config(1), steps=4).losses[0][2:]


def test_a_checkpoint_of_another_model_is_refused_on_every_stage(tmp_path):
    saved(tmp_path, 2, 1)

    def run(communicator):
        layers = [*plain_layers(), nn.Linear(5, 5)]
        model = polyaccel.torch.pipeline.PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss)
        engine, *_ = polyaccel.initialize(model=model, config=pipeline_config(1))
        with pytest.raises(polyaccel.errors.CheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path))
        assert caught.value.value == (1,)
        assert all(part in str(caught.value) for part in ("'7.bias'", "'7.weight'"))
        engine.destroy()
        return True

    assert run_threads(2, run) == [True, True]


def test_the_weights_of_all_stages_are_one_file_and_one_state_dict(tmp_path):
    def run(communicator):
        engine, *_ = polyaccel.initialize(model=plain_model(3), config=pipeline_config(1))
        changed = {name: value + 1 for name, value in engine.module_state_dict().items()}
        engine.load_module_state_dict(changed)
        assert engine.save_16bit_model(str(tmp_path), "whole.safetensors")
        found = {name: value.clone() for name, value in engine.module_state_dict().items()}
        with pytest.raises(RuntimeError) as caught:
            engine.load_module_state_dict({**changed, "9.weight": torch.ones(1)})
        assert "9.weight" in str(caught.value)
        with pytest.raises(RuntimeError) as caught:
            engine.load_module_state_dict({name: value for name, value in changed.items() if name != "0.bias"})
        assert "0.bias" in str(caught.value)
        engine.destroy()
        return found

    before = nn.Sequential(*plain_layers()).state_dict()
    ranks = run_threads(3, run)
    for found in ranks:
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], value + 1) for name, value in before.items())
    written = load_file(tmp_path / "whole.safetensors")
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], value + 1) for name, value in before.items())
