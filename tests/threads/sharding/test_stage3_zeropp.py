"""Stage 3 with ZeRO++: second copies change no bit, quantised traffic trains as well, and both send what is planned."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

import pytest
import torch
from parity_models import SMALL_BUCKET, Run, assert_bitwise, make_config, on_threads, snapshot, train_on_threads
from stage3_models import CASES, assert_same_run, token_loss

import polyaccel
from polyaccel import zero
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.planner.forecast import step_plan
from polyaccel.zero.plan.memory import Purpose, estimate_memory
from polyaccel.zero.plan.traffic import step_traffic

SHARDED = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": SMALL_BUCKET}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def run(world: int, zero: dict, case: str = "gpt", **changes) -> Run:
    build, loss = CASES[case]
    config = make_config(3, zero={**SHARDED, **zero}, **changes)
    return train_on_threads(world, config, 2, build=build, loss_fn=loss)


# Second copies.


@pytest.mark.parametrize(
    ("case", "world", "near"), [("gpt", 2, 2), ("reentrant", 2, 2), ("lora", 2, 2), ("wandering", 3, 3), ("gpt", 4, 2)]
)
def test_second_copies_change_no_bit(case, world, near):
    changes = {"accumulation": 2, "gradient_clipping": 0.5}
    wanted = run(world, {}, case, **changes)
    for more in ({}, {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}):
        assert_same_run(run(world, {"zero_hpz_partition_size": near, **more}, case, **changes), wanted)


def test_second_copies_of_quantised_parameters_are_what_was_gathered():
    wanted = run(4, QUANTIZED, accumulation=2, bf16={"enabled": True})
    assert_same_run(run(4, {**QUANTIZED, "zero_hpz_partition_size": 2}, accumulation=2, bf16={"enabled": True}), wanted)


def changed_by_hand(communicator, model, zero_config):
    """Losses and parameters of a run in which a user changes a parameter after every micro-batch."""
    engine = polyaccel.initialize(model=model, config=make_config(3, accumulation=2, zero=zero_config))[0]
    losses = []
    for micro in range(4):
        loss = token_loss(engine, 0, micro % 2, communicator.rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        with zero.GatheredParameters(engine.module.blocks[1].wide.weight, modifier_rank=1), torch.no_grad():
            engine.module.blocks[1].wide.weight.add_(0.1)
    engine.destroy()
    return losses, snapshot(model)


def test_a_change_by_hand_between_micro_batches_is_seen():
    wanted, found = (
        on_threads(2, changed_by_hand, CASES["gpt"].build, {**SHARDED, **more})[0]
        for more in ({}, {"zero_hpz_partition_size": 2})
    )
    assert found[0] == wanted[0]
    assert_bitwise(found[1], wanted[1])


# Quantised traffic.


def learn(world: int, zero: dict, **changes) -> tuple[float, float]:
    """First and last loss, averaged over ranks, of learning a micro-batch a rank by heart."""

    def work(communicator, model):
        config = make_config(3, zero={"stage3_param_persistence_threshold": 0, **zero}, **changes)
        engine = polyaccel.initialize(model=model, config=config)[0]
        losses = []
        for _ in range(30):
            loss = token_loss(engine, 0, 0, communicator.rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses, snapshot(model)

    results = on_threads(world, work, CASES["gpt"].build)
    for _, params in results[1:]:
        assert_bitwise(params, results[0][1])
    first, last = (sum(losses[at] for losses, _ in results) / world for at in (0, -1))
    return first, last


@pytest.mark.parametrize(
    ("world", "precision", "askings"),
    [
        (2, "fp32", ({"zero_quantized_weights": True}, {"zero_quantized_gradients": True})),
        (2, "bf16", (QUANTIZED,)),
        (3, "fp32", (QUANTIZED,)),
        (4, "fp32", (QUANTIZED,)),
    ],
)
def test_quantised_training_learns_as_well(world, precision, askings):
    """The last loss is within 5 % of the way that exact training came."""
    changes = {"bf16": {"enabled": precision == "bf16"}}
    first, exact = learn(world, {}, **changes)
    assert exact < 0.5 * first
    for asked in askings:
        _, last = learn(world, asked, **changes)
        assert last != exact
        assert abs(last - exact) <= 0.05 * (first - exact)


def test_frozen_parameters_alone_can_be_quantised():
    exact, frozen, all_of_them = (
        run(2, asked, "lora")
        for asked in ({}, {"zero_quantized_nontrainable_weights": True}, {"zero_quantized_weights": True})
    )
    assert exact.losses != frozen.losses != all_of_them.losses
    gpt, gpt_without_frozen = run(2, {}, "conv"), run(2, {"zero_quantized_nontrainable_weights": True}, "conv")
    assert_same_run(gpt_without_frozen, gpt)  # nothing is frozen there


def test_users_see_exact_values():
    """In state dicts and inside GatheredParameters, also while quantised values are kept for the next use."""

    def work(communicator, model):
        wanted = snapshot(model)
        keep = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
        engine = polyaccel.initialize(model=model, config=make_config(3, zero={**SHARDED, **keep, **QUANTIZED}))[0]
        for micro in range(2):
            loss = token_loss(engine, 0, micro, communicator.rank)
            with zero.GatheredParameters(list(engine.module.parameters())):
                assert_bitwise(snapshot(engine.module), wanted)
            state = engine.module_state_dict()
            assert_bitwise({name: state[name] for name in wanted}, wanted)
            engine.backward(loss)
        engine.destroy()
        return True

    assert on_threads(2, work, CASES["gpt"].build) == [True] * 2


# Traffic and memory.


def last_step(communicator, model, config):
    """The calls of a third step that are about a bucket, and the engine, which is destroyed."""
    recording = RecordingCommunicator(communicator, watch_s=None)
    set_thread_communicator(recording)
    engine = polyaccel.initialize(model=model, config=config)[0]
    for step in range(3):
        recording.recorder.entries.clear()
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(token_loss(engine, step, micro, communicator.rank))
            engine.step()
    entries = [entry for entry in recording.recorder.entries if entry.collective.bucket is not None]
    engine.destroy()
    return entries, engine


NEAR = {**QUANTIZED, "zero_hpz_partition_size": 2}


@pytest.mark.parametrize(("world", "asked"), [(2, {}), (3, QUANTIZED), (4, NEAR)])
def test_what_is_sent_is_what_was_planned(world, asked):
    """Bytes by the recorder, without the few scalars that a step agrees on."""
    config = make_config(3, zero={**SHARDED, "reduce_bucket_size": 10**9, **asked})
    for entries, engine in on_threads(world, last_step, CASES["gpt"].build, config):
        sent: defaultdict[int, int] = defaultdict(int)
        for entry in entries:
            ranks = len(entry.group)
            sent[ranks] += entry.collective.numel // ranks * (ranks - 1) * entry.collective.dtype.itemsize
        plan = step_plan(engine.config, engine.zero.layout, is_remote=True)
        assert sum(sent.values()) == step_traffic(plan).total_nbytes
        assert set(sent) == {world, asked.get("zero_hpz_partition_size", world)}
        memory = estimate_memory(plan)
        assert (memory.nbytes(Purpose.SECOND) > 0) == ("zero_hpz_partition_size" in asked)
        assert (memory.nbytes(Purpose.CODES) > 0) == bool(asked)


def test_all_ranks_gather_a_bucket_once_a_step_and_near_ones_from_then_on():
    far_apart = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    config = make_config(3, accumulation=3, zero={**SHARDED, **far_apart, "zero_hpz_partition_size": 2})
    entries, engine = on_threads(4, last_step, CASES["gpt"].build, config)[0]
    calls = Counter(
        (len(entry.group), entry.collective.bucket) for entry in entries if entry.collective.operation == "all_gather"
    )
    for bucket in engine.zero.layout.buckets:
        assert calls[4, bucket.index] == 1
        if bucket.kind.unit:  # forward and backward of three micro-batches
            assert calls[2, bucket.index] == 2 * 3 - 1


def test_quantised_steps_send_a_fifth():
    """In float32: gathers a quarter, gradients an eighth, and scales."""
    plain, quantised = (
        on_threads(2, planned, CASES["gpt"].build, make_config(3, zero={**SHARDED, **asked}))[0]
        for asked in ({}, QUANTIZED)
    )
    assert 0.2 < quantised / plain < 0.24


def planned(communicator, model, config) -> int:
    engine = polyaccel.initialize(model=model, config=config)[0]
    nbytes = step_traffic(step_plan(engine.config, engine.zero.layout, is_remote=True)).total_nbytes
    engine.destroy()
    return nbytes


def test_it_is_said_once_where_nothing_is_gathered(caplog):
    config = make_config(3, zero={"stage3_param_persistence_threshold": 10**9, "zero_quantized_weights": True})
    with caplog.at_level(logging.INFO):
        on_threads(2, planned, CASES["gpt"].build, config)
    assert caplog.text.count("no parameters are gathered") == 1
