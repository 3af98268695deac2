"""What an engine refuses to save or load, and that it names the reason."""

from __future__ import annotations

import pytest
import torch
from parity_models import SMALL_BUCKET, make_config, on_threads, parity_loss, parity_model, snapshot
from torch import nn

import polyaccel
from polyaccel.checkpoint import list_checkpoints
from polyaccel.errors import CheckpointError


def engine_for(model, stage, **changes):
    config = make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET}, **changes)
    engine, *_ = polyaccel.initialize(model=model, config=config)
    return engine


def saved(tmp_path, build=parity_model):
    def save(communicator, model):
        engine_for(model, 1).save_checkpoint(str(tmp_path), tag="kept")

    on_threads(2, save, build)


def loading(tmp_path, build, **arguments):
    def load(communicator, model):
        engine = engine_for(model, 1)
        engine.load_checkpoint(str(tmp_path), **arguments)
        return snapshot(engine.module)

    return on_threads(1, load, build)[0]


def test_another_model_is_refused_by_name(tmp_path):
    saved(tmp_path)

    def other():
        model = parity_model()
        model.wide = nn.Linear(6, 34)
        model.extra = nn.Parameter(torch.ones(2))
        del model.unused
        return model

    with pytest.raises(CheckpointError) as caught:
        loading(tmp_path, other)
    assert caught.value.value == (0,)
    for named in ("'wide.weight': ((33, 6), (34, 6))", "not saved: ['extra']", "not in the model: ['unused']"):
        assert named in str(caught.value)


def test_a_model_with_more_and_less_takes_what_fits_when_told_to(tmp_path):
    saved(tmp_path)

    def other():
        model = parity_model()
        model.extra = nn.Parameter(torch.full((2,), 9.0))
        del model.unused
        with torch.no_grad():
            model.scale.fill_(0.0)
        return model

    found = loading(tmp_path, other, load_module_strict=False, load_optimizer_states=False)
    assert found["scale"] == torch.tensor(1.3)
    assert found["extra"].tolist() == [9.0, 9.0]


def test_a_load_that_takes_no_parameter_is_refused(tmp_path):
    saved(tmp_path)

    def other():
        return nn.Sequential(nn.Linear(6, 33))

    with pytest.raises(CheckpointError) as caught:
        loading(tmp_path, other, load_module_strict=False, load_optimizer_states=False)
    assert "0.weight" in str(caught.value)
    names = {"0.weight": "wide.weight", "0.bias": "wide.bias"}.get
    found = loading(
        tmp_path, other, load_module_strict=False, load_optimizer_states=False, name_map=lambda name: names(name, name)
    )
    assert torch.equal(found["0.weight"], parity_model().wide.weight)


@pytest.mark.parametrize("stage", [0, 2])
def test_new_parameters_keep_their_values_and_states_when_told_to(tmp_path, stage, caplog):
    saved(tmp_path)

    def other():
        model = parity_model()
        model.extra = nn.Parameter(torch.full((100,), 9.0))
        return model

    def load(communicator, model):
        engine = engine_for(model, stage)
        for state in (state for shard in engine.zero.shards for state in shard.states.values()):
            state.fill(0.25)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path))
        assert caught.value.value == (0, 1)
        assert "'extra'" in str(caught.value)
        engine.load_checkpoint(str(tmp_path), load_module_strict=False)
        kinds = {kind for slot, kind, _, buffer in engine.zero.local_shards() if is_quarter(slot, buffer)}
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        engine.step()
        return snapshot(engine.module)["extra"].tolist(), kinds

    def is_quarter(slot, buffer):
        assert slot.param.fqn == "extra" or not (buffer.raw == 0.25).all()
        return slot.param.fqn == "extra" and bool((buffer.raw == 0.25).all())

    for extra, kinds in on_threads(2, load, other):
        assert extra == [9.0] * 100
        assert kinds == {"exp_avg", "exp_avg_sq"}
    assert caplog.text.count("1 parameters or their states were not saved and stay as they are: extra") == 1


def test_without_a_tag_the_newest_complete_checkpoint_is_taken_with_one_warning(tmp_path, caplog):
    def work(communicator, model):
        engine = engine_for(model, 1)
        for tag in ("first", "second"):
            engine.save_checkpoint(str(tmp_path), tag=tag)
        engine.wait_for_checkpoint()
        communicator.barrier()
        if communicator.rank == 0:
            (tmp_path / "second" / "commit.json").unlink()
        communicator.barrier()
        assert engine.load_checkpoint(str(tmp_path))[0] == f"{tmp_path}/first"
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path), tag="second")
        assert caught.value.value == (0,)
        assert "'second'" in str(caught.value)

    on_threads(2, work, parity_model)
    assert caplog.text.count("loading 'first', the newest complete checkpoint, instead") == 1


def test_the_newest_is_the_newest_though_the_clock_was_set_back(tmp_path, monkeypatch):
    def work(communicator, model):
        engine = engine_for(model, 1, checkpoint={"async": False})
        for tag, now_s in (("first", 2e9), ("second", 1e9), ("third", 1e9 + 5)):
            monkeypatch.setattr("polyaccel.checkpoint.save.protocol.time.time", lambda now_s=now_s: now_s)
            engine.save_checkpoint(str(tmp_path), tag=tag)
        (tmp_path / "latest").unlink()
        assert engine.load_checkpoint(str(tmp_path))[0] == f"{tmp_path}/third"
        assert [status.tag for status in list_checkpoints(tmp_path)] == ["third", "second", "first"]

    on_threads(1, work, parity_model)


def test_nothing_to_load_is_an_error(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        loading(tmp_path, parity_model)
    assert caught.value.value == (0,)
    saved(tmp_path)
    with pytest.raises(CheckpointError) as caught:  # the tags that there are
        loading(tmp_path, parity_model, tag="lost")
    assert caught.value.value == (0,)


def test_saving_between_micro_batches_is_refused_until_gradients_are_dropped(tmp_path):
    def save(communicator, model):
        engine = engine_for(model, 2, accumulation=3)
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        engine.step()
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(str(tmp_path))
        assert "engine.zero_grad()" in str(caught.value)
        engine.zero_grad()
        engine.save_checkpoint(str(tmp_path), tag="dropped")

    on_threads(2, save, parity_model)


def test_client_state_that_is_no_mapping_is_refused(tmp_path):
    def save(communicator, model):
        with pytest.raises(CheckpointError) as caught:
            engine_for(model, 1).save_checkpoint(str(tmp_path), client_state=[1])
        assert caught.value.value == "list"
        assert "client_state" in str(caught.value)

    on_threads(2, save, parity_model)
    assert list(tmp_path.iterdir()) == []


def test_client_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    def save(communicator, model):
        engine_for(model, 1).save_checkpoint(str(tmp_path), client_state={"best": print})

    with pytest.raises(CheckpointError) as caught:
        on_threads(1, save, parity_model)
    assert caught.value.value == "builtins.builtin_function_or_method"
    assert all(part in str(caught.value) for part in ("client_state.best", "builtins.builtin_func"))
    assert list(tmp_path.iterdir()) == []


def test_client_state_may_hold_tensors(tmp_path):
    def save_and_load(communicator, model):
        engine = engine_for(model, 1)
        engine.save_checkpoint(str(tmp_path), client_state={"best": torch.ones(3, dtype=torch.bfloat16), 5: "x"})
        _, state = engine.load_checkpoint(str(tmp_path))
        assert torch.equal(state.pop("best"), torch.ones(3, dtype=torch.bfloat16))
        assert state == {5: "x"}

    on_threads(2, save_and_load, parity_model)
