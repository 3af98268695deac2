"""Nobody sees a shard: state dicts in and out, one file with all weights, and checkpoints that change their stage."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from parity_models import batch, drawn_from, make_config, on_threads, snapshot, train_on_threads
from safetensors.torch import load_file
from stage3_models import CASES, ConvNet, Gpt, lora, seeded, token_loss
from torch import nn

import polyaccel
from polyaccel import zero
from polyaccel.errors import CheckpointError, ShardingError

STAGES = (0, 1, 2, 3)
ZERO = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}
BF16 = {"bf16": {"enabled": True}}
gpt = seeded(Gpt)


def engine_of(model: nn.Module, stage: int, **changes) -> polyaccel.TorchEngine:
    return polyaccel.initialize(model=model, config=make_config(stage, zero=ZERO, **changes))[0]


def train(engine, steps, rank, loss_fn=token_loss) -> None:
    for step in steps:
        engine.backward(loss_fn(engine, step, 0, rank))
        engine.step()


def assert_equal(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_is_whole_and_loads_into_a_plain_model(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        train(engine, range(2), communicator.rank)
        state, part = engine.module_state_dict(), model.blocks[1].state_dict()
        prefixed = engine.state_dict()
        assert engine.zero.params.gathered.live_numel == 0
        tied = state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        trained = engine.module_state_dict(exclude_frozen_parameters=True)
        engine.destroy()
        return state, part, prefixed, tied, trained.keys(), model.state_dict()

    plain = gpt()
    for state, part, prefixed, tied, trained, after in on_threads(2, work, gpt):
        assert_equal(state, after)
        assert tied
        assert_equal(
            {f"blocks.1.{name}": value for name, value in part.items()},
            {n: v for n, v in state.items() if n.startswith("blocks.1.")},
        )
        assert_equal(prefixed, {f"module.{name}": value for name, value in state.items()})
        assert state.keys() - trained == {"shift"}
        plain.load_state_dict(state)
    assert_equal(plain.state_dict(), state)


def test_values_keep_when_their_bucket_goes():
    """Of many parameters in one bucket, taken by a state dict outside or inside `GatheredParameters`."""

    def work(communicator, model):
        keys = {"stage3_param_persistence_threshold": 0}
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=keys))[0]
        outside = model.state_dict()
        with zero.GatheredParameters(model.parameters()):
            inside = model.state_dict()
            kept = snapshot(model)
        train(engine, range(1), communicator.rank)  # whose gathers would use the memory again
        assert_equal(outside, wanted)
        assert_equal(inside, wanted)
        assert all(torch.equal(kept[name], wanted[name]) for name in kept)
        assert (
            len({value.untyped_storage().data_ptr() for value in outside.values()}) == len(outside) - 1
        )  # one is tied

    wanted = gpt().state_dict()
    on_threads(2, work, gpt)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loaded_state_dict_trains_on_in_full_precision(stage, precision):
    """An engine that was given the values trains like one whose model had them from the start."""

    def other():
        with drawn_from(5):
            return Gpt()

    values = other().state_dict()

    def loaded(communicator, model):
        engine = engine_of(model, stage, **precision)
        engine.load_module_state_dict(values)
        train(engine, range(2), communicator.rank)
        engine.destroy()
        return model.state_dict()

    def built(communicator, model):
        engine = engine_of(model, stage, **precision)
        train(engine, range(2), communicator.rank)
        engine.destroy()
        return model.state_dict()

    assert_equal(on_threads(2, loaded, gpt)[1], on_threads(2, built, other)[1])


def test_load_state_dict_of_the_module_itself_works_at_stage_3():
    def work(communicator, model):
        engine = engine_of(model, 3)
        wanted = {name: value + 1.0 for name, value in engine.module_state_dict().items()}
        calls = len(communicator.trace)
        engine.module.load_state_dict(wanted)
        assert len(communicator.trace) == calls  # each rank keeps its slice of what it was given
        assert_equal(engine.module_state_dict(), wanted)
        part = {name: value * 2.0 for name, value in model.blocks[0].state_dict().items()}
        model.blocks[0].load_state_dict(part)
        assert_equal(model.blocks[0].state_dict(), part)
        before = engine.module_state_dict()
        with pytest.raises(RuntimeError) as caught:
            engine.load_module_state_dict({**wanted, "stranger": torch.zeros(1)})
        assert "stranger" in str(caught.value)
        with pytest.raises(RuntimeError) as caught:
            engine.load_module_state_dict({**wanted, "shift": torch.zeros(3)})
        assert all(part in str(caught.value) for part in ("shift", "(3,)", "(8,)"))
        assert_equal(engine.module_state_dict(), before)
        engine.load_module_state_dict({"shift": wanted["shift"]}, strict=False)
        with pytest.raises(ShardingError) as caught:
            model.load_state_dict(wanted, assign=True)
        assert caught.value.value == "scale"
        assert "assign=True" in str(caught.value)

    on_threads(2, work, gpt)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_that_one_rank_refuses_changes_nothing_on_any(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        before = engine.module_state_dict()
        wanted = {name: value + 1.0 for name, value in before.items()}
        refused = dict(wanted)
        if communicator.rank == 1:
            refused["shift"] = torch.zeros(3)
            refused["another"] = refused.pop(next(iter(refused)))
        with pytest.raises(RuntimeError) as caught:
            engine.load_module_state_dict(refused)
        assert "rank 1" in str(caught.value)
        assert_equal(engine.module_state_dict(), before)
        engine.load_module_state_dict(wanted)
        assert_equal(engine.module_state_dict(), wanted)

    on_threads(2, work, gpt)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_file_has_all_weights(tmp_path, stage, name):
    def work(communicator, model):
        engine = engine_of(model, stage, **BF16)
        train(engine, range(1), communicator.rank)
        assert engine.save_16bit_model(tmp_path, name)
        assert engine.save_16bit_model(tmp_path, f"trained-{name}", exclude_frozen_parameters=True)
        assert (tmp_path / name).exists()  # for every rank, as soon as it returns
        return engine.module_state_dict()

    wanted = on_threads(2, work, gpt)[0]
    load = load_file if name.endswith("safetensors") else lambda path: torch.load(path, weights_only=True)
    assert_equal(load(tmp_path / name), wanted)
    assert set(load(tmp_path / f"trained-{name}")) == wanted.keys() - {"shift"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"trained-{name}"]
    if name.endswith("bin"):  # tied weights are saved once
        loaded = load(tmp_path / name)
        assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")

    def work(communicator, model):
        engine = engine_of(model, 3)
        with pytest.raises(CheckpointError) as caught:
            engine.save_16bit_model(tmp_path / "taken")
        assert caught.value.value == str(tmp_path / "taken/pytorch_model.bin")
        train(engine, range(1), communicator.rank)

    on_threads(2, work, gpt)


def test_running_statistics_are_saved_too(tmp_path):
    def work(communicator, model):
        engine = engine_of(model, 3)
        train(engine, range(2), communicator.rank, CASES["conv"].loss)
        engine.save_16bit_model(tmp_path)
        return engine.module_state_dict()

    wanted = on_threads(2, work, seeded(ConvNet))[0]
    assert_equal(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), wanted)
    assert wanted["body.0.1.num_batches_tracked"] == 2


def test_an_adapter_is_not_saved_as_an_empty_file(tmp_path):
    """Low-rank additions are picked from the state dict by name, as PEFT does it."""

    def work(communicator, model):
        engine = engine_of(model, 3)
        train(engine, range(2), communicator.rank)
        adapter = {name: value for name, value in model.state_dict().items() if "lora_" in name}
        if communicator.rank == 0:
            torch.save(adapter, tmp_path / "adapter.bin")
        engine.destroy()
        return snapshot(model)

    wanted = on_threads(2, work, seeded(lora))[0]
    saved = torch.load(tmp_path / "adapter.bin", weights_only=True)
    assert len(saved) == 12
    assert_equal(saved, {name: wanted[name] for name in saved})
    assert (tmp_path / "adapter.bin").stat().st_size > sum(value.nbytes for value in saved.values()) > 0


def test_copies_and_pickles_of_sharded_parameters_say_what_to_do():
    wanted = gpt().state_dict()

    def work(communicator, model):
        engine = engine_of(model, 3)
        for copy_it in (copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(ShardingError) as caught:
                copy_it(model)
            assert "GatheredParameters" in str(caught.value)
        with zero.GatheredParameters(model.parameters()):
            twin = copy.deepcopy(model)
        tokens = batch(0, 0, 0)[0][None]
        with torch.no_grad():
            before = len(communicator.trace)
            logits = twin.logits(tokens)  # a copy is a plain module: nothing is exchanged
            assert len(communicator.trace) == before
        train(engine, range(1), communicator.rank)
        with torch.no_grad():
            assert torch.equal(twin.logits(tokens), logits)
        assert_equal(twin.state_dict(), wanted)

    on_threads(2, work, gpt)


@pytest.mark.parametrize("stage", [0, 2])
def test_whole_modules_pickle_as_ever(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        train(engine, range(1), communicator.rank)
        return pickle.loads(pickle.dumps(engine.module)).state_dict(), engine.module_state_dict()

    for copied, wanted in on_threads(2, work, gpt):
        assert_equal(copied, wanted)


@pytest.mark.parametrize(("saved", "loaded"), [((3, 2), (2, 3)), ((2, 3), (3, 2)), ((3, 3), (3, 1)), ((3, 1), (3, 2))])
def test_checkpoints_change_stage_and_world_size(tmp_path, saved, loaded):
    """(stage, ranks) that saves, and that loads. Going on from it does the same as never having stopped."""
    stage, world = saved
    momentum = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    changes = {"gradient_clipping": 0.5, **momentum}  # Adam would make steps out of gradients that are only rounding

    def save(communicator, model):
        engine = engine_of(model, stage, **changes)
        train(engine, range(2), 0)  # equal data on all ranks, so that their number does not matter
        engine.save_checkpoint(tmp_path)

    def go_on(communicator, model):
        engine = engine_of(model, loaded[0], **changes)
        engine.load_checkpoint(tmp_path)
        train(engine, range(2, 4), 0)
        engine.destroy()
        return snapshot(model)

    def straight(communicator, model):
        engine = engine_of(model, 3, **changes)
        train(engine, range(4), 0)
        engine.destroy()
        return snapshot(model)

    on_threads(world, save, gpt)
    (wanted,) = on_threads(1, straight, gpt)
    for params in on_threads(loaded[1], go_on, gpt):
        assert all(torch.allclose(params[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_destroy_gives_back_a_whole_module(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        wanted = engine.module_state_dict()
        engine.destroy()
        assert_equal(model.state_dict(), wanted)
        assert type(model.scale) is nn.Parameter
        assert not model._forward_pre_hooks
        again = engine_of(model, 3)  # and it can be trained anew
        train(again, range(1), communicator.rank)

    on_threads(2, work, gpt)


def test_a_model_belongs_to_the_engine_that_was_made_last():
    def work(communicator, model):
        first = engine_of(model, 3)
        wanted = first.module_state_dict()
        second = engine_of(model, 3)
        assert_equal(second.module_state_dict(), wanted)
        with pytest.raises(ShardingError) as refused:
            first.step()
        assert refused.value.value == second.adapter.engine_name

    on_threads(2, work, gpt)


def test_runs_end_alike_whatever_is_asked_of_the_state_in_between():
    def curious(engine, step, micro, rank):
        engine.module_state_dict()
        engine.empty_partition_cache()
        return token_loss(engine, step, micro, rank)

    runs = [
        train_on_threads(2, make_config(3, zero=ZERO), 3, build=gpt, loss_fn=loss) for loss in (token_loss, curious)
    ]
    assert_equal(runs[0].params, runs[1].params)
