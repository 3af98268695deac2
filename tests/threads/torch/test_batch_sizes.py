"""A batch size that changes in the middle of a run: each update has the mean gradient of exactly its micro-batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline import PipelineModule

MICRO, CLIP, LR = 4, 1.0, 0.05


def make_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return model


def micro_batch(step, index, data_rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + data_rank)
    return torch.randn(MICRO, 8, generator=generator), torch.randn(MICRO, 1, generator=generator)


def make_config(stage, steps, **more):
    sizes = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": steps, "gradient_clipping": CLIP}
    optimizer = {"type": "SGD", "params": {"lr": LR, "momentum": 0.5}}
    return sizes | {"optimizer": optimizer, "zero_optimization": {"stage": stage}} | more


def plain_norms(windows, data_ranks):
    """The norms of plain torch's updates over all micro-batches of each window."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    norms = []
    for step, steps in enumerate(windows):
        optimizer.zero_grad()
        for index in range(steps):
            for rank in range(data_ranks):
                inputs, labels = micro_batch(step, index, rank)
                (nn.functional.mse_loss(model(inputs), labels) / (steps * data_ranks)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return norms


def train(engine, windows, data_rank, data_ranks, *, in_batches=False):
    norms = []
    for step, steps in enumerate(windows):
        engine.set_train_batch_size(MICRO * data_ranks * steps)
        assert engine.gradient_accumulation_steps() == steps
        if in_batches:
            engine.train_batch(iter([micro_batch(step, index, data_rank) for index in range(steps)]))
        else:
            for index in range(steps):
                inputs, labels = micro_batch(step, index, data_rank)
                engine.backward(nn.functional.mse_loss(engine(inputs), labels))
                engine.step()
                assert engine.was_step_applied() == (index + 1 == steps)
        norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == len(windows)
    assert engine.micro_steps == sum(windows)
    assert engine.metrics.samples == engine.global_samples == MICRO * data_ranks * sum(windows)
    return norms


WINDOWS = [(2, 4, 4, 2, 3), (3, 1, 5), (1, 2, 3, 4), (4, 3, 1, 1, 2)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("windows", WINDOWS)
def test_each_update_has_its_own_micro_batches(stage, world, windows):
    def rank(communicator):
        engine, *_ = polyaccel.initialize(model=make_model(), config=make_config(stage, 2))
        return train(engine, windows, communicator.rank, world)

    for found in run_threads(world, rank):
        assert found == pytest.approx(plain_norms(windows, world), rel=1e-5)


@pytest.mark.parametrize(("stages", "world"), [(1, 1), (1, 2), (2, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("windows", WINDOWS[:2])
def test_a_pipeline_follows(stages, world, windows):
    ranks = world // stages

    def rank(communicator):
        model = PipelineModule(list(make_model()), stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        engine, *_ = polyaccel.initialize(model=model, config=make_config(1, 2))
        data_rank = engine.mesh.coordinates(communicator.rank).get("data", 0)
        try:
            return train(engine, windows, data_rank, ranks, in_batches=True)
        finally:
            engine.destroy()

    for found in run_threads(world, rank):
        assert found == pytest.approx(plain_norms(windows, ranks), rel=1e-5)


@pytest.mark.parametrize(("stages", "windows"), [(1, (2, 4, 4, 2, 3)), (2, (2, 4, 4, 2, 3)), (2, (1, 3))])
def test_a_pipeline_of_the_drop_in_follows(stages, windows):
    deepspeed = pytest.importorskip("deepspeed")

    def rank(communicator):
        loss = {"loss_fn": nn.functional.mse_loss, "partition_method": "uniform"}
        model = deepspeed.pipe.PipelineModule(layers=list(make_model()), num_stages=stages, **loss)
        engine = deepspeed.initialize(model=model, config=make_config(1, 2))[0]
        try:
            return train(engine, windows, 0, 1, in_batches=True)
        finally:
            engine.destroy()

    try:
        found = run_threads(stages, rank)
    finally:
        if torch.distributed.is_initialized():  # the drop-in makes torch's group of a single rank
            torch.distributed.destroy_process_group()
    for each in found:
        assert each == pytest.approx(plain_norms(windows, 1), rel=1e-5)


def test_only_data_parallel_ranks_are_counted():
    def rank(communicator):
        model = PipelineModule(list(make_model()), 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        engine, *_ = polyaccel.initialize(model=model, config=make_config(1, 2))
        with pytest.raises(ConfigError) as refused:
            engine.set_train_batch_size(MICRO + 1)
        engine.set_train_batch_size(MICRO)
        engine.set_train_micro_batch_size(3)
        sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        engine.destroy()
        return sizes, refused.value.problems[0].value

    assert run_threads(2, rank) == [((3, 3, 1), MICRO + 1)] * 2


@pytest.mark.parametrize("stage", [0, 2])
def test_inside_a_window_a_size_waits_for_the_next(stage):
    windows = (2, 4, 3)

    def rank(communicator):
        engine, *_ = polyaccel.initialize(model=make_model(), config=make_config(stage, 2))
        norms = []
        for step, steps in enumerate(windows):
            for index in range(steps):
                inputs, labels = micro_batch(step, index, communicator.rank)
                engine.backward(nn.functional.mse_loss(engine(inputs), labels))
                if index == 0:  # gradients are there, though no micro-batch has ended
                    engine.set_train_batch_size(MICRO * 2 * windows[(step + 1) % 3])
                    assert engine.gradient_accumulation_steps() == steps
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms, engine.global_samples

    for norms, samples in run_threads(2, rank):
        assert norms == pytest.approx(plain_norms(windows, 2), rel=1e-5)
        assert samples == MICRO * 2 * sum(windows)


def test_a_size_that_waits_counts_once_gradients_are_forgotten():
    def rank(communicator):
        engine, *_ = polyaccel.initialize(model=make_model(), config=make_config(1, 2))
        engine.backward(engine(torch.ones(MICRO, 8)).mean())
        engine.set_train_batch_size(MICRO * 3)
        before = engine.gradient_accumulation_steps()
        engine.zero_grad()
        return before, engine.gradient_accumulation_steps(), engine.train_batch_size()

    assert run_threads(1, rank) == [(2, 3, MICRO * 3)]


def test_a_resumed_run_goes_on_with_whole_windows(tmp_path):
    windows = (2, 4, 3, 1, 2)

    def rank(split, communicator):
        engine, *_ = polyaccel.initialize(model=make_model(), config=make_config(2, 2))
        norms = []
        for step, steps in enumerate(windows):
            if step == split:
                engine.save_checkpoint(str(tmp_path), client_state={"step": step})
                engine.destroy()
                engine, *_ = polyaccel.initialize(model=make_model(), config=make_config(2, 2))
                engine.load_checkpoint(str(tmp_path))
            engine.set_train_batch_size(MICRO * 2 * steps)
            for index in range(steps):
                inputs, labels = micro_batch(step, index, communicator.rank)
                engine.backward(nn.functional.mse_loss(engine(inputs), labels))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms, engine.global_samples, engine.micro_steps, engine.global_steps

    whole = run_threads(2, partial(rank, None))
    assert run_threads(2, partial(rank, 3)) == whole
    assert whole[0][1:] == (MICRO * 2 * sum(windows), sum(windows), len(windows))


def test_more_micro_batches_than_16_bit_gradients_were_planned_for_are_announced(caplog):
    config = make_config(1, 1, bf16={"enabled": True})

    def rank(communicator):
        engine, *_ = polyaccel.initialize(model=make_model(), config=config)
        engine.set_train_batch_size(MICRO * 2)
        engine.set_train_batch_size(MICRO * 4)

    run_threads(1, rank)
    assert sum("grad_accum_dtype" in record.getMessage() for record in caplog.records) == 1


def test_an_optimizer_that_evaluates_the_loss_itself_keeps_one_micro_batch():
    def rank(communicator):
        model = make_model()
        config = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 0}}
        engine, *_ = polyaccel.initialize(model=model, config=config, optimizer=torch.optim.LBFGS(model.parameters()))
        with pytest.raises(ConfigError) as refused:
            engine.set_train_batch_size(MICRO * 2)
        return refused.value.problems[0].value

    assert run_threads(1, rank) == [2]
