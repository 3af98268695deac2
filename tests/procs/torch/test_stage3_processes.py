"""Stage 3 where ranks are processes: over gloo, and 120 steps that leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import warnings

import psutil
import pytest
import torch
from parity_models import assert_bitwise, make_config, train, train_on_threads
from stage3_models import CASES, token_loss
from transformer_models import transformer_batch, transformer_model

import polyaccel
from polyaccel import zero
from polyaccel.errors import LaunchError
from polyaccel.testkit.ranks.procs import RankPool

STEPS = 2
PATIENCE_S = 240.0
ZERO = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}


def train_here(communicator, case, config):
    """One rank's run, inside its process."""
    build, loss = CASES[case]
    return train(communicator, build(), config, STEPS, loss)


@pytest.mark.parametrize("case", ["gpt", "experts", "recomputed"])
def test_two_processes_equal_two_threads_bitwise(rank_pool, case):
    config = make_config(3, accumulation=2, gradient_clipping=0.5, zero=ZERO)
    build, loss = CASES[case]
    threads = train_on_threads(2, config, STEPS, build=build, loss_fn=loss)
    for run in rank_pool(2).run(train_here, case, config):
        assert_bitwise(run.params, threads.params)
        assert run.norms == threads.norms


def test_three_processes_agree(rank_pool):
    config = make_config(3, accumulation=2, bf16={"enabled": True}, zero={**ZERO, "stage3_prefetch_bucket_size": 0})
    runs = rank_pool(3).run(train_here, "gpt", config)
    for run in runs[1:]:
        assert_bitwise(run.params, runs[0].params)


def train_compiled(communicator, how, stage):
    """One rank's losses and parameters with its blocks compiled, or the whole model."""
    build, _ = CASES["gpt"]
    model = build()
    if how == "whole":
        model = torch.compile(model, backend="aot_eager")
    for index, block in enumerate(() if how == "whole" else model.blocks):
        if how == "method":
            block.compile(backend="aot_eager")
        else:
            model.blocks[index] = torch.compile(block, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns itself, of attributes that it looks at
        run = train(communicator, model, make_config(stage, zero=ZERO), 3, token_loss)
    torch.compiler.reset()
    return run


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("how", ["method", "wrapper", "whole"])
def test_compiled_blocks_and_models(rank_pool, how):
    two, three = (rank_pool(2).run(train_compiled, how, stage, timeout_s=PATIENCE_S)[1] for stage in (2, 3))
    assert_bitwise(three.params, two.params)
    assert three.losses == two.losses


def soak(communicator, steps, places):
    """Resident bytes, open files, threads and tensors after a third of the steps and after all of them.

    Gathered parameters, and the memory that is kept for them, stay within their bound all the time.
    """
    build, _ = CASES["gpt"]
    engine = polyaccel.initialize(
        model=build(), config=make_config(3, zero={"stage3_param_persistence_threshold": 10, **places})
    )[0]
    gathering = engine.zero.params.gathered
    process = psutil.Process()
    figures = []
    for step in range(steps):
        engine.backward(token_loss(engine, step, 0, communicator.rank))
        engine.step()
        if step % 10 == 0:
            with torch.no_grad():
                token_loss(engine, step, 1, communicator.rank)
            with zero.GatheredParameters(engine.module.scale):
                pass
            engine.module_state_dict()
        assert 0 < gathering.peak_numel <= gathering._policy.max_live_numel
        assert gathering.pool.held_numel <= gathering._policy.max_live_numel
        if step + 1 in (steps // 3, steps):
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            figures.append((process.memory_info().rss, process.num_fds(), process.num_threads(), tensors))
    engine.destroy()
    return figures


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("device", ["none", "nvme"])
def test_120_steps_leave_nothing_behind(tmp_path, device):
    """In processes of their own: of what other tests leave in theirs, some goes only while this one counts."""
    place = {"device": device, "nvme_path": str(tmp_path)}
    places = {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    with RankPool(2, comm_timeout_s=PATIENCE_S) as pool:
        found = pool.run(soak, 120, places, timeout_s=PATIENCE_S)
    for (rss, *counts), (later_rss, *later_counts) in found:
        assert later_counts == counts
        assert later_rss - rss < 4 << 20
    assert list(tmp_path.iterdir()) == []


def killed_in_a_rollout(communicator, hybrid_engine):
    """Rank 1 is killed at its second token, when rank 0 waits for it: for a unit, or at the end."""
    config = {**make_config(3, zero=ZERO), "hybrid_engine": hybrid_engine}
    engine = polyaccel.initialize(model=transformer_model("gpt2"), config=config)[0]
    prompt = transformer_batch("gpt2", length=4)["input_ids"]
    calls = []

    def count(_, scores):
        calls.append(scores)
        if communicator.rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores

    engine.generate(prompt, max_new_tokens=4, do_sample=False, logits_processor=[count])


@pytest.mark.parametrize("pins", [True, False], ids=["once", "units"])
def test_a_rank_that_is_killed_in_a_rollout_is_named(pins):
    section = {"enabled": True, "pin_parameters": pins}
    with (
        RankPool(2, backend="gloo", comm_timeout_s=PATIENCE_S, grace_s=PATIENCE_S) as pool,
        pytest.raises(LaunchError) as caught,
    ):
        pool.run(killed_in_a_rollout, section, timeout_s=PATIENCE_S)
    assert caught.value.value == (1, -9)
    reports = "\n".join(caught.value.__notes__)
    assert "rank 0 raised CommError" in reports
    assert "ranks [1] did not take part" in reports
