"""Ranks that take different ways through a model at stage 3 train like plain torch on the whole batch."""

from __future__ import annotations

import pytest
import torch
from parity_models import (
    assert_bitwise,
    assert_close,
    make_config,
    on_threads,
    relative_distance,
    snapshot,
    train_plainly,
)
from stage3_models import seeded
from torch import Tensor
from way_models import CASES, Case, Experts, Skipping, loss_of, one_group

import polyaccel
from polyaccel import zero
from polyaccel.errors import CommError

ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}
STEPS = 12


def trained(case: Case, world: int, *, steps: int = STEPS, prepare=lambda model: None, **config) -> dict[str, Tensor]:
    """Parameters after so many steps; nothing is left gathered."""
    zero_keys = {**ZERO, **config.pop("zero", {})}

    def work(communicator, model):
        prepare(model)
        engine = polyaccel.initialize(
            model=model, model_parameters=one_group(model), config=make_config(3, zero=zero_keys, **config)
        )[0]
        for step in range(steps):
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(loss_of(case)(engine, step, micro, communicator.rank))
                engine.step()
        gathering = engine.zero.params.gathered
        assert (gathering.live_numel, gathering.kept_numel, gathering.pool.in_use_count) == (0, 0, 0)
        engine.destroy()
        return snapshot(model)

    first, *others = on_threads(world, work, seeded(case.build))
    for other in others:
        assert_bitwise(other, first)
    return first


def plainly(case: Case, world: int, steps: int = STEPS, **arguments) -> dict[str, Tensor]:
    return train_plainly(
        world, steps, build=seeded(case.build), loss_fn=loss_of(case), groups=one_group, **arguments
    ).params


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_ranks_on_different_ways_train_like_plain_torch(name, world):
    assert_close(trained(CASES[name], world), plainly(CASES[name], world))


@pytest.mark.parametrize("name", ["layer drop", "images on some ranks", "experts in any order"])
@pytest.mark.parametrize(
    "zero_keys",
    [
        {"stage3_max_live_parameters": 100, "stage3_prefetch_bucket_size": 0},
        {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 10**9},
        {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 150},
    ],
    ids=["little memory", "all kept", "ahead"],
)
def test_whatever_is_kept_and_gathered_ahead(name, zero_keys):
    assert_close(trained(CASES[name], 2, accumulation=2, zero=zero_keys), plainly(CASES[name], 2, accumulation=2))


@pytest.mark.parametrize("name", ["layer drop", "images on some ranks", "experts by data"])
def test_in_sixteen_bits_with_clipping(name):
    found = trained(CASES[name], 2, bf16={"enabled": True}, gradient_clipping=0.05)
    wanted = plainly(CASES[name], 2, param_dtype=torch.bfloat16, clip=0.05)
    start = {key: value.bfloat16() for key, value in snapshot(seeded(CASES[name].build)()).items()}
    assert relative_distance(found, wanted, start) < 0.1


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_with_parameters_and_states_off_the_device(tmp_path, device):
    place = {"device": device, "nvme_path": str(tmp_path)}
    zero_keys = {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    for name in ("layer drop", "images on some ranks"):
        assert_close(trained(CASES[name], 2, steps=6, zero=zero_keys), plainly(CASES[name], 2, steps=6))


def test_with_second_copies():
    for name in ("layer drop", "experts in any order"):
        assert_close(trained(CASES[name], 2, zero={"zero_hpz_partition_size": 2}), plainly(CASES[name], 2))


def test_leaves_still_spare_the_votes():
    """The class whose forward chooses is one unit then."""
    case = CASES["layer drop"]
    leaf = lambda model: zero.set_leaf_modules(model, [Skipping])  # noqa: E731
    assert_close(trained(case, 3, prepare=leaf), plainly(case, 3))


def test_evaluation_on_different_ways():
    """Between steps, and between the forward and the backward pass of one."""
    build = seeded(Skipping)
    plain = build()

    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))[0]
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(communicator.rank))
        ways = [list(range(1 + communicator.rank)), [3, 0], [1, 2][: 1 + communicator.rank]]
        with torch.no_grad():
            assert [engine(inputs, way).item() for way in ways] == [plain(inputs, way).item() for way in ways]
        for step in range(3):
            loss = engine(inputs, [0, 1, 2, 3])
            with torch.no_grad():
                engine(inputs, ways[step])
            engine.backward(loss)
            engine.step()
        assert engine.zero.params.gathered.live_numel == 0

    on_threads(2, work, build)


def test_passes_that_fail_on_one_rank_and_others_go_on():
    """The forward pass of a batch that one rank could not use, and its next batch, are one to the other ranks."""

    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))[0]
        for step in range(4):
            inputs = torch.randn(4, 8)
            if step == 2 and communicator.rank == 1:
                with pytest.raises(IndexError):
                    engine(inputs, [0, 1, 9])
            engine.backward(engine(inputs, [0, 1, 2]))
            engine.step()
        assert engine.zero.params.gathered.live_numel == 0

    on_threads(2, work, seeded(Skipping))


def test_a_rank_that_runs_a_pass_less_is_named():
    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))[0]
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 8), [0, 1, 2]))
            engine.step()
        loss = engine(torch.randn(4, 8), [0, 1, 2])
        if communicator.rank:
            engine(torch.randn(4, 8), [0, 1, 2])
        engine.backward(loss)

    with pytest.raises(CommError) as caught:
        on_threads(2, work, seeded(Skipping))
    assert "reduce_scatter" in str(caught.value)


def test_what_all_ranks_skip_keeps_its_values():
    start = snapshot(seeded(Experts)())
    found = trained(CASES["experts by data"], 2)
    assert torch.equal(found["experts.5.0.weight"], start["experts.5.0.weight"])
    assert not torch.equal(found["experts.0.0.weight"], start["experts.0.0.weight"])
