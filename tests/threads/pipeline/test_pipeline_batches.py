"""What the engine of a pipeline is given: data on the stages that need some, losses, and evaluations of any length."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from pipeline_models import MICRO_BATCHES, micro_batch, pipeline_config, plain_layers, plain_model
from torch import nn

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.pipeline.check import check_table
from polyaccel.pipeline.csv_schedule import write_table
from polyaccel.pipeline.schedules import make_table
from polyaccel.pipeline.select import evaluation_table
from polyaccel.pipeline.table import PipelineError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline import PipelineModule


def on_stages(stages, run, *, model=plain_model, config=None):
    """What `run(engine)` returns on each of `stages` ranks."""

    def rank(communicator):
        engine, *_ = polyaccel.initialize(model=model(stages), config=config or pipeline_config(1))
        try:
            return run(engine)
        finally:
            engine.destroy()

    return run_threads(stages, rank)


def samples(count=MICRO_BATCHES):
    return [micro_batch(0, micro, 0) for micro in range(count)]


def test_a_stage_in_the_middle_needs_no_data():
    def run(engine):
        needs = engine.is_first_stage() or engine.is_last_stage()
        losses = [float(engine.train_batch(iter(samples()) if needs else None)) for _ in range(2)]
        return [*losses, float(engine.eval_batch(iter(samples()) if needs else None))]

    (expected,) = on_stages(1, run)
    assert on_stages(3, run) == [expected] * 3
    assert on_stages(4, run) == [expected] * 4


def test_a_stage_without_data_that_needs_some_says_so():
    def run(engine):
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(None)
        assert "training_data" in str(caught.value)

    on_stages(1, run)


def test_all_stages_come_to_the_end_of_their_data_together():
    def run(engine):
        source = iter(samples(MICRO_BATCHES + 1))
        engine.train_batch(source)
        with pytest.raises(StopIteration):
            engine.train_batch(source)
        return float(engine.train_batch(iter(samples())))

    assert len(set(on_stages(3, run))) == 1


def test_a_function_makes_micro_batches_of_what_the_data_gives():
    calls = []

    def make(batch):
        calls.append(batch)
        (inputs, labels) = samples()[batch["number"]]
        return [inputs, labels]

    def run(engine):
        engine.set_batch_fn(make)
        numbers = [{"number": number} for number in range(MICRO_BATCHES)]
        needs = engine.is_first_stage() or engine.is_last_stage()
        return float(engine.train_batch(iter(numbers) if needs else None))

    (expected,) = on_stages(1, lambda engine: float(engine.train_batch(iter(samples()))))
    assert on_stages(3, run) == [expected] * 3
    assert len(calls) == 2 * MICRO_BATCHES


def test_a_function_makes_micro_batches_where_a_rank_has_no_data():
    def run(engine):
        left = samples()
        engine.set_batch_fn(lambda batch: left.pop(0) if batch is None else None)
        return float(engine.train_batch())

    (expected,) = on_stages(1, lambda engine: float(engine.train_batch(iter(samples()))))
    assert on_stages(2, run) == [expected] * 2


def test_a_loader_gives_what_a_call_does_not():
    def run(engine):
        engine.set_dataloader(samples(2 * MICRO_BATCHES))
        losses = [float(engine.train_batch()) for _ in range(2)]
        with pytest.raises(StopIteration):
            engine.train_batch()
        return losses

    def given(engine):
        source = iter(samples(2 * MICRO_BATCHES))
        return [float(engine.train_batch(source)) for _ in range(2)]

    (expected,) = on_stages(1, given)
    assert on_stages(2, run) == [expected] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_an_evaluation_has_as_many_micro_batches_as_one_asks(schedule, count):
    def run(engine):
        engine.train_batch(iter(samples()))
        each = engine.eval_batch(iter(samples(count)), reduce_output=None, num_micro_batches=count)
        mean = engine.eval_batch(iter(samples(count)), num_micro_batches=count)
        assert len(each) == count
        assert mean == torch.stack(each).mean()
        return [float(loss) for loss in each]

    (expected,) = on_stages(1, run, config=pipeline_config(1))
    found = on_stages(2, run, model=partial(plain_model, schedule=schedule), config=pipeline_config(1, schedule))
    assert found == [pytest.approx(expected, rel=1e-6)] * 2


@pytest.mark.parametrize("count", [1, 4, 6])
def test_a_table_of_a_file_evaluates_any_number(tmp_path, count):
    table = make_table("zb-v", 2, MICRO_BATCHES)
    path = tmp_path / "mine.csv"
    path.write_text(write_table(table))
    found = evaluation_table(str(path), 2, count)
    check_table(found)
    assert sum(map(len, found.tasks)) == count * table.chunks


def test_a_loss_may_stay_on_the_stage_that_has_it():
    def run(engine):
        alone = engine.eval_batch(iter(samples()), bcast_loss=False)
        whole = engine.eval_batch(iter(samples()))
        assert (alone is None) != engine.is_last_stage()
        assert alone is None or alone == whole
        return float(whole)

    assert len(set(on_stages(3, run))) == 1


class Named(nn.Module):
    """Gives the outputs by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        return {"scores": self.layer(x), "inputs": (x, None)}


def loss_of_names(outputs, labels):
    return nn.functional.mse_loss(outputs["scores"], labels["y"]) * labels["weights"][0].mean() * len(outputs["inputs"])


def labelled():
    return [(x, {"y": y, "weights": [torch.full((4,), float(at))]}) for at, (x, y) in enumerate(samples())]


LOSSES = {
    "number": loss_of_names,
    "pair": lambda outputs, labels: (loss_of_names(outputs, labels), outputs["scores"]),
    "dict": lambda outputs, labels: {"loss": loss_of_names(outputs, labels), "other": 3},
    "of_length_1": lambda outputs, labels: loss_of_names(outputs, labels)[None],
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_loss_is_of_outputs_and_labels_of_any_structure(kind, stages):
    with torch.random.fork_rng():
        layer = Named()

    def model(stages):
        layers = [nn.Identity(), copy.deepcopy(layer)]  # ranks that are threads have one generator
        return PipelineModule(layers, stages, loss_fn=LOSSES[kind], partition_method="uniform")

    def run(engine):
        return float(engine.eval_batch(iter(labelled()))), float(engine.train_batch(iter(labelled())))

    expected = torch.stack([loss_of_names(layer(x), labels) for x, labels in labelled()]).mean().item()
    assert on_stages(stages, run, model=model) == [(pytest.approx(expected), pytest.approx(expected))] * stages


@pytest.mark.parametrize("stages", [1, 2])
def test_a_loss_that_is_no_number_is_refused(stages):
    def run(engine):
        engine.train_batch(iter(samples()))

    def model(loss_fn, stages):
        return PipelineModule(plain_layers(), stages, loss_fn=loss_fn, partition_method="uniform")

    with pytest.raises(PolyaccelError) as refused:
        on_stages(stages, run, model=partial(model, None))
    assert refused.value.value == (4, 5)
    with pytest.raises(PolyaccelError) as refused:
        on_stages(stages, run, model=partial(model, lambda outputs, labels: {"mine": 1}))
    assert refused.value.value == "dict"


class Reports(PipelineModule):
    """Reports the largest output of the last micro-batch."""

    largest = None

    def get_additional_losses(self):
        return {"largest": self.largest, "two": torch.tensor(2.0)}


def reports(stages):
    def loss_fn(outputs, labels):
        model.largest = outputs.detach().max()
        return nn.functional.mse_loss(outputs, labels)

    model = Reports(plain_layers(), stages, loss_fn=loss_fn, partition_method="uniform")
    return model


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_a_model_reports_beside_its_loss_is_on_every_stage(stages):
    def run(engine):
        assert engine.get_additional_losses() is None
        engine.train_batch(iter(samples()))
        return {name: float(loss) for name, loss in engine.get_additional_losses().items()}

    layers = nn.Sequential(*plain_layers())
    expected = torch.stack([layers(x).max() for x, _ in samples()]).mean().item()
    assert on_stages(stages, run, model=reports) == [{"largest": pytest.approx(expected), "two": 2.0}] * stages
    assert on_stages(stages, lambda engine: engine.get_additional_losses()) == [None] * stages


def test_a_topology_that_places_ranks_otherwise_than_the_mesh_is_refused():
    class Topology:
        def get_dim(self, axis):
            return {"pipe": 2, "data": 1}.get(axis, 0)

        def get_coord(self, rank):
            return type("Coordinates", (), {"pipe": 1 - rank})

    def run(communicator):
        model = PipelineModule(plain_layers(), topology=Topology(), loss_fn=nn.functional.mse_loss)
        with pytest.raises(PipelineError) as refused:
            polyaccel.initialize(model=model, config=pipeline_config(1))
        return refused.value.value

    assert run_threads(2, run) == [1, 0]
