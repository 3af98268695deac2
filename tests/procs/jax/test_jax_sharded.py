"""Stage 3 under JAX where ranks are processes: a call that waits for another rank holds a thread of XLA's, and those
are all ranks' of one process."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from jax_models import make_config, torch_gpt, train_torch
from jax_sharded_models import ZERO, build, model_of, tokens, train_sharded
from jax_surgery import check_sam, train
from pairwise import combinations

from polyaccel.comm.default import set_default_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import CommError
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.threads import run_threads

pytestmark = pytest.mark.timeout(500)  # programs to compile, on a machine that may be slow and busy
CONFIG = make_config(3, accumulation=3, zero=ZERO)
STEPS = 10
PATIENCE_S = 240.0


def at_stage_2(world, model, config, steps):
    """The same runs where nothing is gathered, by threads here."""
    model_of(model)
    config = {**config, "zero_optimization": {"stage": 2}}
    return run_threads(world, train_sharded, model, config, steps, timeout_s=PATIENCE_S)


def assert_equal(runs, wanted):
    for run, other in zip(runs, wanted, strict=True):
        assert run.losses == other.losses
        assert run.norms == other.norms
        for fqn, value in other.params.items():
            np.testing.assert_array_equal(run.params[fqn], value, err_msg=fqn)


@combinations(world=[2, 3], accumulation=[3, 1], is_bf16=[False, True])
def test_stage_3_equals_stage_2_bitwise_and_torch_within_rounding(rank_pool, world, accumulation, is_bf16):
    config = make_config(3, accumulation=accumulation, zero=ZERO, bf16={"enabled": is_bf16})
    limit = 1e-2 if is_bf16 else 1e-5
    models = [torch_gpt() for _ in range(world)]
    of_torch = run_threads(
        world, lambda ranks: train_torch(ranks, models[ranks.rank], config, STEPS), timeout_s=PATIENCE_S
    )[0]
    runs = rank_pool(world).run(train_sharded, "units", config, STEPS, timeout_s=PATIENCE_S)
    assert_equal(runs, at_stage_2(world, "units", config, STEPS))
    assert runs[0].losses[:-1] == pytest.approx(of_torch.losses, rel=limit)
    assert runs[0].norms == pytest.approx(of_torch.norms, rel=10 * limit)


def test_sam_at_stage_3_equals_plain_jax(rank_pool):
    check_sam(rank_pool(2).run(train, 3, "sam", 2, {}, timeout_s=PATIENCE_S), 2, 2)


def test_scanned_layers_in_bf16(rank_pool):
    config = make_config(3, zero=ZERO, bf16={"enabled": True})
    runs = rank_pool(2).run(train_sharded, "scan", config, 2, timeout_s=PATIENCE_S)
    assert_equal(runs, at_stage_2(2, "scan", config, 2))


def test_shared_memory_is_read_where_it_is(rank_pool):
    pool = rank_pool(2, "shm", "numpy")
    assert_equal(pool.run(train_sharded, "units", CONFIG, 2, timeout_s=PATIENCE_S), at_stage_2(2, "units", CONFIG, 2))
    for calls in pool.run(calls_of_a_pass, timeout_s=PATIENCE_S):
        assert {op for op, _ in calls} == {"reduce_scatter"}


def calls_of_a_pass(communicator):
    """(operation, unit) of the collectives of a micro-batch in their order, as the recorder has them, each run once."""
    recording = RecordingCommunicator(communicator, watch_s=None)
    set_default_communicator(recording)
    engine = build(recording, "units", make_config(3, zero={**ZERO, "stage3_max_reuse_distance": 0}))
    engine.train_batch(tokens(0, 0, communicator.rank))
    recording.recorder.entries.clear()
    engine.grad_step(tokens(1, 0, communicator.rank))
    infos = [(entry.collective.operation, entry.collective.bucket) for entry in recording.recorder.entries]
    buckets = engine.zero.layout.buckets
    calls = [(op, buckets[bucket].kind.unit) for op, bucket in infos if bucket is not None]
    engine.zero_grad()
    engine.destroy()
    set_default_communicator(communicator)
    return [call for at, call in enumerate(calls) if at == 0 or calls[at - 1] != call]


def test_one_unit_is_gathered_at_a_time(rank_pool):
    """Forward in order, backward in reverse, each unit's gradients before the next one's parameters."""
    for calls in rank_pool(2).run(calls_of_a_pass, timeout_s=PATIENCE_S):
        assert calls == [
            ("all_gather", ""),
            ("all_gather", "blocks.0"),
            ("all_gather", "blocks.1"),  # for its forward pass, and again for its backward pass
            ("reduce_scatter", "blocks.1"),
            ("all_gather", "blocks.0"),
            ("reduce_scatter", "blocks.0"),
            ("reduce_scatter", ""),
        ]


def lose_a_rank(communicator):
    """What a rank is told when rank 1's gather fails in the middle of a step."""
    engine = build(communicator, "units", make_config(3, zero=ZERO))
    engine.train_batch(tokens(0, 0, communicator.rank))
    if communicator.rank == 1:

        def fail(*arguments, **named):
            raise CommError("the cable was pulled")

        engine.zero.params.gathered.unshard = fail
    try:
        engine.train_batch(tokens(1, 0, communicator.rank))
    except CommError as error:
        communicator.close()  # as a process that ends does
        return str(error)
    return "nothing"


def test_a_failed_collective_ends_the_step_on_every_rank():
    with RankPool(2, comm_timeout_s=PATIENCE_S) as pool:
        survivor, culprit = pool.run(lose_a_rank, timeout_s=PATIENCE_S)
    assert culprit == "the cable was pulled"
    assert survivor not in ("nothing", culprit)
