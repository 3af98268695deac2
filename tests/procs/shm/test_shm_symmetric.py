"""Symmetric memory: the numbers of every stage over shared memory are those of threads and of private buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity_models import SMALL_BUCKET, assert_bitwise, make_config, parity_loss, parity_model, train, train_on_threads

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


@pytest.mark.parametrize("stage", [2, 3])
def test_overlapped_publishing_changes_nothing(pools: Pools, stage: int) -> None:
    zero = {**ZERO, "overlap_param_gather": stage < 3}
    config = make_config(stage, zero=zero)
    reference = train_on_threads(3, config, STEPS)
    for run in pools(3, True).run(train_here, config, STEPS):
        assert_bitwise(run.params, reference.params)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def look_inside(communicator: Communicator, config: Any) -> tuple[list[bool], bool, bool, list[str]]:
    """Which buckets are one memory, whether any is sharded, whether another rank's write is seen here, and what is
    said after a change in place."""
    records = Records()
    logging.getLogger("polyaccel").addHandler(records)
    model = parity_model()
    engine, *_ = polyaccel.initialize(model=model, model_parameters=model.parameters(), config=config)
    params = engine.zero.params
    shared, is_any_sharded = [place.is_shared for place in params], params.is_any_sharded
    communicator.barrier()
    if communicator.rank == 1:
        params.full(0).view(0, 1).fill(42.0)
    communicator.barrier()
    is_seen = bool(params.full(0).view(0, 1).raw.item() == 42.0)
    communicator.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    engine.adapter.adopt_changes()
    engine.destroy()
    logging.getLogger("polyaccel").removeHandler(records)
    return shared, is_any_sharded, is_seen, [one for one in records.messages if "in place" in one]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_one_memory_where_the_optimizer_is_sharded(pools: Pools, stage: int) -> None:
    config = make_config(stage, zero=ZERO)
    for shared, is_any_sharded, is_seen, said in pools(2, True).run(look_inside, config):
        assert len(shared) > 1
        assert set(shared) == {stage > 0}
        assert not is_any_sharded
        assert len(said) == (stage > 0)
        assert is_seen or stage == 0
    ((_, first_is_sharded, *_), (_, _, is_seen, said)) = pools(2, False).run(look_inside_if_whole, config, stage)
    assert first_is_sharded is (stage == 3)
    assert not said


def look_inside_if_whole(communicator: Communicator, config: Any, stage: int) -> Any:
    """The same with private buffers, where a sharded bucket cannot be looked at."""
    if stage < 3:
        return look_inside(communicator, config)
    engine, *_ = polyaccel.initialize(model=parity_model(), config=config)
    is_any_sharded = engine.zero.params.is_any_sharded
    engine.destroy()
    return [], is_any_sharded, False, []


def change_on_one_rank(communicator: Communicator, config: Any) -> tuple[float, list[str]]:
    """What this rank sees of rank 1's change, and what the next step says of it here."""
    records = Records()
    logging.getLogger("polyaccel").addHandler(records)
    model = parity_model()
    engine, *_ = polyaccel.initialize(model=model, model_parameters=model.parameters(), config=config)
    parameter = next(model.parameters())
    communicator.barrier()
    if communicator.rank == 1:
        with torch.no_grad():
            parameter.fill_(3.0)
    communicator.barrier()
    seen = float(parameter.detach().mean())
    communicator.barrier()
    engine.backward(parity_loss(engine, 0, 0, communicator.rank))
    engine.step()
    engine.destroy()
    logging.getLogger("polyaccel").removeHandler(records)
    return seen, [one for one in records.messages if "in place" in one]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_change_on_one_rank_is_one_on_all_and_is_said_where_it_was_made(pools: Pools, stage: int) -> None:
    (first, silence), (second, said) = pools(2, True).run(change_on_one_rank, make_config(stage, zero=ZERO))
    assert (first, second) == (3.0, 3.0)
    assert silence == []
    assert len(said) == 1
    assert "The ranks of this host have one memory for it" in said[0]


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
