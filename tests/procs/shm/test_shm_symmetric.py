"""Symmetric memory: the numbers of every stage over shared memory are those of threads and of private buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity_models import SMALL_BUCKET, assert_bitwise, make_config, parity_loss, parity_model, train, train_on_threads
from stage3_models import seeded
from way_models import CASES, loss_of, one_group

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.procs import RankPool

STEPS = 2
ZERO = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 0}
Pools = Callable[[int, bool], RankPool]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    started: dict[tuple[int, bool], RankPool] = {}

    def pool(world_size: int, symmetric: bool) -> RankPool:
        environ = {} if symmetric else {"POLYACCEL_SHM_SYMMETRIC": "0"}
        key = (world_size, symmetric)
        return started.setdefault(key, RankPool(world_size, comm_timeout_s=20.0, environ=environ, backend="shm"))

    yield pool
    for one in started.values():
        one.close()


def train_here(communicator: Communicator, config: Any, steps: int) -> Any:
    return train(communicator, parity_model(), config, steps)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "extra",
    [{}, {"bf16": {"enabled": True}}, {"accumulation": 3, "gradient_clipping": 0.5}],
    ids=["fp32", "bf16", "accumulation"],
)
def test_every_stage_gives_the_bits_of_threads(pools: Pools, stage: int, extra: dict[str, Any]) -> None:
    config = make_config(stage, zero=ZERO, **extra)
    reference = train_on_threads(2, config, STEPS)
    for symmetric in (True, False):
        runs = pools(2, symmetric).run(train_here, config, STEPS)
        assert runs[0].losses == reference.losses
        for run in runs:
            assert_bitwise(run.params, reference.params)
            assert run.norms == reference.norms


def train_on_ways(communicator: Communicator, config: Any, steps: int) -> Any:
    case = CASES["layer drop"]
    return train(communicator, seeded(case.build)(), config, steps, loss_of(case), groups=one_group)


def test_ranks_may_take_different_ways(pools: Pools) -> None:
    """With one memory nothing is gathered, without it in the order of a course."""
    config = make_config(3, zero=ZERO)
    one, other = (pools(2, symmetric).run(train_on_ways, config, 4) for symmetric in (True, False))
    for run in (*one, *other):
        assert_bitwise(run.params, one[0].params)


@pytest.mark.parametrize("stage", [2, 3])
def test_overlapped_publishing_changes_nothing(pools: Pools, stage: int) -> None:
    zero = {**ZERO, "overlap_param_gather": stage < 3}
    config = make_config(stage, zero=zero)
    reference = train_on_threads(3, config, STEPS)
    for run in pools(3, True).run(train_here, config, STEPS):
        assert_bitwise(run.params, reference.params)


def look_inside(communicator: Communicator, config: Any) -> tuple[list[bool], bool, bool]:
    """Which buckets are one memory, whether any is sharded, and whether the engine's write on another rank is seen."""
    model = parity_model()
    engine, *_ = polyaccel.initialize(model=model, model_parameters=model.parameters(), config=config)
    params = engine.zero.params
    shared, is_any_sharded = [place.shared is not None for place in params], params.is_any_sharded
    is_seen = False
    if not is_any_sharded:
        communicator.barrier()
        slot = params[0].bucket.slots[0]
        if communicator.rank == 1:
            params.full(0).view(slot.offset, 1).fill(42.0)
        communicator.barrier()
        is_seen = bool(engine.adapter.parameter(slot.param.fqn).flatten()[0].item() == 42.0)
        communicator.barrier()
    engine.destroy()
    return shared, is_any_sharded, is_seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_one_memory_where_the_optimizer_is_sharded(pools: Pools, stage: int) -> None:
    config = make_config(stage, zero=ZERO)
    first, second = pools(2, True).run(look_inside, config)
    for shared, is_any_sharded, _ in (first, second):
        assert len(shared) > 1
        assert set(shared) == {stage > 0}
        assert not is_any_sharded
    assert first[2] is (stage > 0)
    assert second[2]
    first, second = pools(2, False).run(look_inside, config)
    assert not any(first[0])
    assert (first[1], first[2]) == (stage == 3, False)


def begin_apart(communicator: Communicator, config: Any) -> tuple[list[float], list[float]]:
    """The means of this rank's parameters before and after `initialize`, each rank having drawn its own."""
    model = parity_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 + communicator.rank)
    before = [float(parameter.detach().mean()) for parameter in model.parameters()]
    engine, *_ = polyaccel.initialize(model=model, model_parameters=model.parameters(), config=config)
    with polyaccel.zero.GatheredParameters(list(model.parameters())):
        after = [float(parameter.detach().mean()) for parameter in model.parameters()]
    engine.destroy()
    return before, after


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_training_begins_with_the_parameters_of_rank_0(pools: Pools, stage: int, symmetric: bool) -> None:
    runs = pools(2, symmetric).run(begin_apart, make_config(stage, zero=ZERO, bf16={"enabled": stage == 2}))
    expected = runs[0][0]
    assert runs[1][0] != expected
    assert [after for _, after in runs] == [expected, expected]


def change_by_hand(communicator: Communicator, config: Any) -> tuple[float, float]:
    """Rank 1 changes a parameter for all, and each rank loads the same state dict; what this rank sees of both."""
    model = parity_model()
    engine, *_ = polyaccel.initialize(model=model, model_parameters=model.parameters(), config=config)
    parameter = next(model.parameters())
    with polyaccel.zero.GatheredParameters([parameter], modifier_rank=1), torch.no_grad():
        if communicator.rank == 1:
            parameter.mul_(0.0).add_(3.0)
    with polyaccel.zero.GatheredParameters([parameter]):
        after = float(parameter.detach().mean())
    state = {name: torch.full_like(value, 5.0) for name, value in parity_model().state_dict().items()}
    model.load_state_dict(state)
    engine.backward(parity_loss(engine, 0, 0, communicator.rank) * 0.0)
    engine.step()
    communicator.barrier()
    with polyaccel.zero.GatheredParameters([parameter]):
        loaded = float(parameter.detach().mean())
    engine.destroy()
    return after, loaded


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_changes_by_hand_reach_every_rank(pools: Pools, stage: int, bf16: bool) -> None:
    config = make_config(stage, bf16={"enabled": bf16}, zero=ZERO)
    for after, loaded in pools(2, True).run(change_by_hand, config):
        assert after == 3.0
        assert loaded == pytest.approx(5.0, rel=0.02)  # less a step of the optimizer
