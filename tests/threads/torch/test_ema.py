"""The moving average of weights: plain torch's numbers, stages, exchange and back, checkpoints, exports, refusals."""

from __future__ import annotations

import pytest
import torch
from parity_models import SMALL, assert_bitwise, batch, make_config, on_threads, parity_model, snapshot
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 4
EMA = {"ema": {"decay": 0.7}}


def engine_for(model, stage, **changes):
    zero = {**SMALL, "stage3_param_persistence_threshold": 0, **changes.pop("zero", {})}
    return polyaccel.initialize(model=model, config=make_config(stage, zero=zero, **EMA, **changes))[0]


def go(engine, rank, begin=0, steps=STEPS):
    for step in range(begin, begin + steps):
        engine.backward(engine(*batch(step, 0, rank)))
        engine.step()


def averages_of(engine):
    with engine.averaged_weights():
        return {name: value.clone() for name, value in engine.module_state_dict().items()}


def train(communicator, model, stage, changes):
    engine = engine_for(model, stage, **changes)
    go(engine, communicator.rank)
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    with engine.averaged_weights():
        loss = engine(*batch(0, 0, 0)).item()
        averages = {name: value.clone() for name, value in engine.module_state_dict().items()}
        with pytest.raises(PolyaccelError):
            engine.backward(engine(*batch(0, 0, 0)))
        with pytest.raises(PolyaccelError), engine.averaged_weights():
            pass
    engine.zero_grad()
    assert_bitwise(engine.module_state_dict(), before)
    go(engine, communicator.rank, STEPS, 1)
    engine.destroy()
    return averages, loss, snapshot(model)


def test_averages_are_torch_s():
    averages, loss, _ = on_threads(1, train, parity_model, 2, {})[0]
    model = parity_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    wanted = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*batch(step, 0, 0)).backward()
        optimizer.step()
        wanted.update_parameters(model)
    for name, value in wanted.module.state_dict().items():
        torch.testing.assert_close(averages[name], value, rtol=1e-5, atol=1e-6)
    assert abs(loss - wanted.module(*batch(0, 0, 0)).item()) < 1e-4


@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_stages_have_the_same_averages_and_go_on_as_without(changes):
    wanted, loss, ends = on_threads(2, train, parity_model, 0, changes)[0]
    for stage in (1, 2, 3):
        for found, other, weights in on_threads(2, train, parity_model, stage, changes):
            assert_bitwise(found, wanted)
            assert_bitwise(weights, ends)
            assert other == loss


def test_states_on_the_host_and_in_files_too(tmp_path):
    wanted, *_ = on_threads(2, train, parity_model, 1, {})[0]
    for device in ("cpu", "nvme"):
        offload = {"offload_optimizer": {"device": device, "nvme_path": str(tmp_path)}}
        found, *_ = on_threads(2, train, parity_model, 3, {"zero": offload})[0]
        assert_bitwise(found, wanted)


def test_an_optimizer_of_the_script_has_averages_too(tmp_path):
    def visit(communicator, model):
        config = make_config(2, zero=SMALL, **EMA)
        del config["optimizer"]
        client = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        engine = polyaccel.initialize(model=model, optimizer=client, config=config)[0]
        go(engine, communicator.rank)
        engine.save_checkpoint(str(tmp_path))
        found = averages_of(engine)
        engine.load_checkpoint(str(tmp_path))
        assert_bitwise(averages_of(engine), found)
        assert not any("weights_ema" in state for state in client.state.values())
        return found

    wanted, *_ = on_threads(2, train, parity_model, 2, {})[0]
    for found in on_threads(2, visit, parity_model):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)


def test_averages_resume_at_another_world_size_and_are_exported(tmp_path):
    def save(communicator, model):
        engine = engine_for(model, 3)
        go(engine, 0)
        engine.save_checkpoint(str(tmp_path / "saved"))
        found = averages_of(engine)
        with engine.averaged_weights():
            engine.save_16bit_model(str(tmp_path / "exported"))
        engine.destroy()
        return found

    def resume(communicator, model):
        engine = engine_for(model, 1)
        engine.load_checkpoint(str(tmp_path / "saved"))
        found = averages_of(engine)
        engine.load_checkpoint(str(tmp_path / "saved"), load_optimizer_states=False)
        restarted = averages_of(engine)
        assert_bitwise(restarted, engine.module_state_dict())
        engine.destroy()
        return found

    wanted = on_threads(2, save, parity_model)[0]
    for found in on_threads(3, resume, parity_model):
        assert_bitwise(found, wanted)
    (file,) = (tmp_path / "exported").iterdir()
    if file.suffix == ".bin":
        exported = torch.load(file)
        for name, value in exported.items():
            torch.testing.assert_close(value.float(), wanted[name], rtol=1e-2, atol=1e-3)


def test_checkpoints_without_averages_begin_them_at_the_weights(tmp_path):
    plain = parity_model()
    engine = polyaccel.initialize(model=plain, config=make_config(1))[0]
    go(engine, 0)
    engine.save_checkpoint(str(tmp_path))
    with pytest.raises(PolyaccelError), engine.averaged_weights():
        pass
    other = engine_for(parity_model(), 2)
    other.load_checkpoint(str(tmp_path))
    assert_bitwise(averages_of(other), engine.module_state_dict())


def test_layers_that_are_unfrozen_begin_their_averages():
    def visit(communicator):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        model[0].requires_grad_(False)
        engine = polyaccel.initialize(model=model, config=make_config(2, **EMA))[0]
        for step in range(3):
            if step == 1:
                model[0].requires_grad_(True)
            engine.backward(engine(torch.ones(4, 3)).sum())
            engine.step()
        trained = engine.module_state_dict()
        averages = averages_of(engine)
        assert not torch.equal(averages["1.weight"], trained["1.weight"])
        return {name: value.clone() for name, value in averages.items()}

    first, second = run_threads(2, visit)
    assert_bitwise(first, second)
    # One step of lr 1e-2 a step, as Adam's first steps are: 0.09 and 0.08 averaged for the new layer.
    torch.testing.assert_close(first["0.weight"], torch.full((4, 3), 0.7 * 0.09 + 0.3 * 0.08), rtol=1e-2, atol=0)
