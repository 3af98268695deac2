"""Gradients and weights that are not finite: nothing goes on in silence, and nothing resumes from them unasked."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from parity_models import SMALL_BUCKET, make_config, on_threads, parity_loss, parity_model

import polyaccel
from polyaccel.checkpoint import list_checkpoints
from polyaccel.engine.loss_scale import MOST_SKIPS, LossScaler
from polyaccel.errors import LossScaleError

BF16 = {"bf16": {"enabled": True}}


def engine_for(model, stage, **changes):
    config = make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET}, **changes)
    return polyaccel.initialize(model=model, config=config)[0]


def step(engine, communicator, number, factor=1.0):
    engine.backward(parity_loss(engine, number, 0, communicator.rank) * factor)
    engine.step()


def test_fp16_from_its_defaults_skips_as_many_steps_as_the_others_may():
    scaler = LossScaler.from_config()
    for _ in range(MOST_SKIPS):
        scaler.update(True)
    with pytest.raises(LossScaleError):
        scaler.update(True)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_that_skips_every_step_is_an_error_that_names_the_parameter(stage, caplog):
    def train(communicator, model):
        engine = engine_for(model, stage, **BF16)
        for number in range(MOST_SKIPS):
            step(engine, communicator, number, math.nan)
        step(engine, communicator, 0)  # which is not skipped, and the count begins anew
        for number in range(MOST_SKIPS):
            step(engine, communicator, number, math.nan)
        with pytest.raises(LossScaleError) as caught:
            step(engine, communicator, 0, math.nan)
        assert caught.value.value in dict(model.named_parameters())
        assert "18 steps" in str(caught.value)
        return engine.skipped_steps

    assert on_threads(2, train, parity_model) == [2 * MOST_SKIPS] * 2
    records = [record for record in caplog.records if "skipped: the gradient of" in record.message]
    warnings = [record for record in records if record.levelno == logging.WARNING]
    assert len(warnings) == 2  # the first of each row, from rank 0


@pytest.mark.parametrize("stage", [0, 2])
def test_weights_that_are_not_finite_are_told_and_do_not_become_the_resume_point(stage, tmp_path, caplog):
    def train(communicator, model):
        engine = engine_for(model, stage)
        step(engine, communicator, 0)
        engine.save_checkpoint(str(tmp_path), tag="good")
        for number in range(1, 4):
            step(engine, communicator, number, math.inf)
        engine.save_checkpoint(str(tmp_path), tag="bad")
        engine.wait_for_checkpoint()
        communicator.barrier()
        assert (tmp_path / "latest").read_text() == "good"
        assert engine.load_checkpoint(str(tmp_path))[0].endswith("good")
        assert all(torch.isfinite(parameter).all() for parameter in engine.module.parameters())
        communicator.barrier()
        if communicator.rank == 0:
            (tmp_path / "latest").unlink()  # the newest complete one would be the bad one
        communicator.barrier()
        assert engine.load_checkpoint(str(tmp_path))[0].endswith("good")
        assert engine.load_checkpoint(str(tmp_path), tag="bad")[0].endswith("bad")

    on_threads(2, train, parity_model)
    applied = [each.message for each in caplog.records if "applied gradients that are not finite" in each.message]
    assert len(applied) == 1
    assert applied[0].startswith("step 2 applied gradients that are not finite, the first of ")
    assert "'bad' holds values of " in caplog.text
    assert "'latest' stays where it was" in caplog.text
    bad, good = list_checkpoints(tmp_path)
    assert (bad.tag, bad.is_good, bad.problem) == ("bad", False, "")
    assert good.is_good


@pytest.mark.parametrize("kind", [BF16, {"fp16": {"enabled": True}}], ids=["bf16", "fp16"])
def test_weights_of_16_bits_are_looked_at_too(kind, tmp_path, caplog):
    def save(communicator, model):
        engine = engine_for(model, 0, **kind)
        for parameter in engine.module.parameters():
            parameter.requires_grad_(False)
        with torch.no_grad():
            engine.module.frozen.fill_(math.nan)
        engine.save_checkpoint(str(tmp_path), tag="bad")
        engine.wait_for_checkpoint()

    on_threads(1, save, parity_model)
    assert "'bad' holds values of frozen that are not finite" in caplog.text
    assert not (tmp_path / "latest").exists()
