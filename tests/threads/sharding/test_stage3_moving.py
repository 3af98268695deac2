"""States put aside between phases: memory goes, values come back, and meanwhile nothing reads what is not there."""

from __future__ import annotations

import pytest
import torch
from parity_models import SMALL_BUCKET, assert_bitwise, make_config, on_threads, snapshot
from stage3_models import Gpt, seeded, token_loss

import polyaccel
from polyaccel import utils, zero
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.torch.checkpoint.offload_states import StateKind

STAGES = (0, 1, 2, 3)
ZERO = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 10}
BF16 = {"bf16": {"enabled": True}}
gpt = seeded(Gpt)


def engine_of(model, stage, **changes) -> polyaccel.TorchEngine:
    return polyaccel.initialize(model=model, config=make_config(stage, zero=ZERO, **changes))[0]


def train(engine, steps, rank) -> None:
    for step in steps:
        engine.backward(token_loss(engine, step, 0, rank))
        engine.step()


def resident_nbytes(engine) -> int:
    """Of parameters, master weights, optimizer states and gradients, in storages that torch can empty.

    On a CPU it cannot empty what was ever lent to numpy; that memory is the host's anyway.
    """
    buffers = [place.own for place in engine.zero.params] + [place.master for place in engine.zero.params]
    buffers += [state for shard in engine.zero.shards for state in shard.states.values()]
    buffers += [buffer for gradients in engine.zero.reducer.buckets for buffer in gradients.resident()]
    storages = [buffer.raw.untyped_storage() for buffer in buffers]
    return sum(storage.nbytes() for storage in storages if storage.resizable())


@pytest.mark.parametrize("include", [None, ["optim_states"], [StateKind.HP_PARAMS, "lp_grads"]], ids=str)
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_as_if_nothing_had_happened(stage, precision, include):
    def work(communicator, model, moves):
        engine = engine_of(model, stage, **precision)
        train(engine, range(2), communicator.rank)
        if moves:
            before = resident_nbytes(engine)
            engine.offload_states(include, pin_memory=False)
            if include is None:
                assert resident_nbytes(engine) == 0
            engine.reload_states()
            assert resident_nbytes(engine) == before
        train(engine, range(2, 4), communicator.rank)
        engine.destroy()
        return snapshot(model)

    moved, left = (on_threads(2, work, gpt, moves) for moves in (True, False))
    for pair in zip(moved, left, strict=True):
        assert_bitwise(*pair)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_away_is_told_and_never_read(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        train(engine, range(1), communicator.rank)
        engine.offload_states()
        for use in (
            lambda: token_loss(engine, 0, 0, 0),
            lambda: token_loss(model, 0, 0, 0),
            engine.step,
            lambda: engine.backward(torch.zeros((), requires_grad=True)),
            lambda: engine.save_checkpoint("unused"),
            lambda: engine.load_checkpoint("unused"),
            engine.module_state_dict,
            model.scale.item,
            lambda: utils.safe_get_full_fp32_param(model.scale),
            zero.GatheredParameters(model.scale).__enter__,
            engine.offload_states,
        ):
            with pytest.raises(ShardingError) as caught:
                use()
            assert "engine.reload_states" in caught.value.hint
        engine.reload_states()
        train(engine, range(1), communicator.rank)
        engine.offload_states()
        engine.destroy()
        assert model.scale.item() > 0

    on_threads(2, work, gpt)


@pytest.mark.parametrize("stage", STAGES)
def test_the_module_still_runs_while_only_optimizer_states_are_away(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        train(engine, range(1), communicator.rank)
        with torch.no_grad():
            wanted = token_loss(engine, 5, 0, 0)
            engine.offload_states(["optim_states", "contiguous_grad_buffer"])
            assert torch.equal(token_loss(engine, 5, 0, 0), wanted)

    on_threads(2, work, gpt)


def test_accumulated_gradients_come_back():
    def work(communicator, model, moves):
        engine = engine_of(model, 2, accumulation=2)
        for micro in range(2):
            engine.backward(token_loss(engine, 0, micro, communicator.rank))
            if moves:
                engine.offload_states()
                engine.reload_states()
            engine.step()
        return snapshot(engine.module)

    assert_bitwise(*(on_threads(2, work, gpt, moves)[0] for moves in (True, False)))


def test_unknown_kinds_and_places_are_refused():
    def work(communicator, model):
        engine = engine_of(model, 3)
        with pytest.raises(PolyaccelError) as caught:
            engine.offload_states(["weights"])
        assert all(part in str(caught.value) for part in ("'weights'", "optim_states", "hp_params"))
        with pytest.raises(PolyaccelError) as caught:
            engine.offload_states(device="nvme")
        assert caught.value.value == "nvme"
        train(engine, range(1), communicator.rank)

    on_threads(1, work, gpt)


def test_the_partition_cache_is_emptied():
    def work(communicator, model):
        engine = engine_of(model, 3)
        train(engine, range(2), communicator.rank)
        with torch.no_grad():
            token_loss(engine, 0, 0, 0)
        engine.empty_partition_cache()
        assert engine.zero.params.gathered.live_numel == 0
        train(engine, range(2, 3), communicator.rank)

    on_threads(2, work, gpt)
