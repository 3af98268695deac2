"""Gradients of embeddings that travel as rows: the numbers of whole ones bit for bit, and of plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from parity_models import (
    Run,
    assert_bitwise,
    assert_close,
    drawn_from,
    make_config,
    on_threads,
    snapshot,
    train_on_threads,
    train_plainly,
)
from row_models import bags_loss, dense_bags, everyone, sparse_bags, tied_bags
from torch import nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import ShardingError

STEPS = 3


def run(world: int, config: dict[str, Any], build: Any) -> Run:
    return train_on_threads(world, config, STEPS, build=build, loss_fn=bags_loss, groups=everyone)


@pytest.mark.parametrize(
    ("stage", "world", "changes"),
    [
        (0, 3, {"gradient_clipping": 0.05}),
        (1, 2, {"gradient_accumulation_steps": 3, "communication_data_type": "fp16"}),
        (2, 3, {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05}),
        (2, 2, {"gradient_predivide_factor": 4.0, "zero_optimization": {"overlap_comm": False}}),
        (3, 3, {"gradient_accumulation_steps": 2}),
        (1, 2, {"fp16": {"enabled": True, "loss_scale": 16.0}}),
        (2, 3, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "prescale_gradients": True}),
    ],
)
def test_rows_train_as_whole_gradients(stage: int, world: int, changes: dict[str, Any]) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **changes.get("zero_optimization", {})}
    config = {**make_config(stage), **changes, "zero_optimization": zero}
    whole = run(world, config, dense_bags)
    rows = run(world, config, sparse_bags)
    assert_bitwise(rows.params, whole.params)
    assert (rows.losses, rows.norms) == (whole.losses, whole.norms)
    assert_bitwise(run(world, {**config, "sparse_gradients": True}, dense_bags).params, whole.params)


@pytest.mark.parametrize("stage", [0, 2])
def test_rows_train_as_plain_torch(stage: int) -> None:
    found = run(2, make_config(stage, accumulation=2), sparse_bags)
    adam = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    plain = train_plainly(
        2, STEPS, accumulation=2, make_optimizer=adam, build=dense_bags, loss_fn=bags_loss, groups=everyone
    )
    assert_close(found.params, plain.params)


def test_weights_that_the_head_shares_travel_whole() -> None:
    config = make_config(2)
    assert_bitwise(run(2, {**config, "sparse_gradients": True}, tied_bags).params, run(2, config, tied_bags).params)


def sent(communicator: Communicator, model: nn.Module, config: dict[str, Any]) -> dict[str, float]:
    """The bytes of a step of which each rank uses 32 rows of 2,000."""
    recording = RecordingCommunicator(communicator, watch_s=None)
    set_thread_communicator(recording)
    engine, *_ = polyaccel.initialize(model=model, config=config)
    recording.recorder.reset_traffic()
    words = torch.arange(32) * 61 + communicator.rank
    engine.backward(engine(words.repeat(2)).square().mean())
    engine.step()
    found = {operation.value: nbytes for operation, nbytes in recording.recorder.sent_nbytes.items() if nbytes}
    engine.destroy()
    return found


def lone_embedding() -> nn.Module:
    return nn.Embedding(2_000, 64)


@pytest.mark.parametrize(("stage", "operation"), [(0, "all_reduce"), (2, "reduce_scatter")])
def test_rows_send_less(stage: int, operation: str) -> None:
    config = make_config(stage)
    whole = on_threads(2, sent, lone_embedding, config)[0]
    rows = on_threads(2, sent, lone_embedding, {**config, "sparse_gradients": True})[0]
    ranks = 2 if stage == 0 else 1
    few = 64 * ranks // 2 * 64 * 4
    assert whole[operation] - rows[operation] == pytest.approx(2_000 * ranks // 2 * 64 * 4 - few, rel=0.05)
    assert rows["all_gather"] - whole.get("all_gather", 0) == 32 * 8 + 8


def sparse_embedding() -> nn.Module:
    with drawn_from(4):
        return nn.Embedding(40, 5, sparse=True)


def embedding_loss(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return model(torch.randint(0, 40, (3 + rank,), generator=draw)).square().mean()


def sparse_adam(
    communicator: Communicator, model: nn.Module, config: dict[str, Any], steps: int
) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(embedding_loss(engine, step, micro, communicator.rank))
            engine.step()
    engine.destroy()
    return snapshot(model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 3), (2, 1)])
def test_sparse_adam_updates_the_rows_that_plain_torch_updates(stage: int, world: int) -> None:
    config = {**make_config(stage, accumulation=2), "optimizer": None}
    found = on_threads(world, sparse_adam, sparse_embedding, config, STEPS)[0]
    plain = sparse_embedding()
    optimizer = torch.optim.SparseAdam(plain.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            for rank in range(world):
                (embedding_loss(plain, step, micro, rank) / (2 * world)).backward()
        optimizer.step()
    assert_close(found, snapshot(plain))


def test_sparse_adam_is_refused_for_whole_gradients() -> None:
    def work(communicator: Communicator, model: nn.Module) -> None:
        optimizer = torch.optim.SparseAdam(model.parameters())
        engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})
        engine.backward(embedding_loss(engine, 0, 0, 0))
        with pytest.raises(ShardingError) as caught:
            engine.step()
        assert caught.value.value == "weight"
        assert caught.value.hint

    on_threads(2, work, lambda: nn.Embedding(40, 5))
