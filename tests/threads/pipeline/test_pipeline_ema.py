"""Averaged weights of a pipeline: those of one stage, which are torch's; evaluated, and away again."""

from __future__ import annotations

import pytest
import torch
from pipeline_models import MICRO_BATCHES, batches, micro_batch, pipeline_config, plain_layers, plain_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 3


def averaged(stages, data, stage):
    def run(communicator):
        place = communicator.rank % data
        config = pipeline_config(stage, ema={"decay": 0.7})
        engine, *_ = polyaccel.initialize(model=plain_model(stages), config=config)
        for step in range(STEPS):
            engine.train_batch(batches(step, place))
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        with engine.averaged_weights():
            found = {name: value.clone() for name, value in engine.module_state_dict().items()}
            loss = float(engine.eval_batch(batches(9, place)))
        after = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        return found, loss, place

    return run_threads(stages * data, run)


def in_plain_torch(data):
    model = nn.Sequential(*plain_layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    wanted = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(data):
            for micro in range(MICRO_BATCHES):
                inputs, labels = micro_batch(step, micro, rank)
                (nn.functional.mse_loss(model(inputs), labels) / (data * MICRO_BATCHES)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        wanted.update_parameters(model)
    return wanted.module


@pytest.mark.parametrize(("stages", "data", "stage"), [(2, 1, 0), (2, 2, 1)])
def test_averages_are_torch_s(stages, data, stage):
    model = in_plain_torch(data)
    wanted = list(model.state_dict().values())
    for found, loss, place in averaged(stages, data, stage):
        values = dict(sorted(found.items(), key=lambda item: int("".join(filter(str.isdigit, item[0])))))
        assert len(values) == len(wanted)
        for value, expected in zip(values.values(), wanted, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            pairs = [micro_batch(9, micro, place) for micro in range(MICRO_BATCHES)]
            exact = sum(nn.functional.mse_loss(model(one), other).item() for one, other in pairs) / len(pairs)
        assert abs(loss - exact) < 1e-4
