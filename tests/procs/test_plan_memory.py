"""The planner's figures are what the engine holds: every buffer of models in training, on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.buffer import Buffer
from polyaccel.config import load_resolved
from polyaccel.offload.file_buffer import FileBuffer
from polyaccel.planning.forecast import memory_of
from polyaccel.runtime import plan_for
from polyaccel.testkit.procs import RankPool
from polyaccel.torch.meta_shapes import shape_of_module
from polyaccel.zero.memory import MemoryEstimate, Place, Purpose

VOCAB = 4000
WIDE, NARROW = 512, 128
"""Widths of the model: 20.9 M and 2.6 M parameters. Most cases do with the latter."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.narrow(torch.relu(self.wide(self.norm(hidden))))


class PlannedModel(nn.Module):
    """Large and small parameters, a frozen one, buckets of uneven sizes, two of them in each unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.place = nn.Parameter(torch.zeros(300, width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place[: tokens.shape[-1]]
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def held_nbytes(root: object, *, without: tuple[object, ...] = ()) -> int:
    """Bytes of memory in all buffers that can be reached from `root`; what several share is counted once."""
    found = [buffer for buffer in _buffers(root, without) if not isinstance(buffer, FileBuffer)]
    spans = sorted((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in found)
    total, end = 0, 0
    for low, high in spans:
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def file_nbytes(root: object) -> int:
    """Bytes of the buffers below `root` that rest in files."""
    return sum(buffer.nbytes for buffer in _buffers(root, ()) if isinstance(buffer, FileBuffer))


def _buffers(root: object, without: tuple[object, ...]) -> Iterator[Buffer]:
    seen = {id(one) for one in without}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (str, int, float, type)):
            continue
        seen.add(id(one))
        if isinstance(one, Buffer):
            yield one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif type(one).__module__.startswith("polyaccel."):
            names = (*vars(one), *getattr(type(one), "__slots__", ())) if hasattr(one, "__dict__") else one.__slots__
            waiting += (getattr(one, name, None) for name in names)


@dataclass(frozen=True)
class Found:
    """On one rank after two steps: memory by purpose and in all, files, what was planned, and for the same layout."""

    held: dict[Purpose, int]
    total: int
    files: int
    planned: MemoryEstimate
    same_layout: bool


def measure(communicator: Any, config: dict[str, Any], width: int) -> Found:
    torch.manual_seed(0)
    model = PlannedModel(width)
    resolved = load_resolved(config, world_size=communicator.world_size)
    shape = shape_of_module(model, "", resolved)
    layout = plan_for(resolved, shape.specs, lambda: shape.units, communicator.world_size)
    planned = memory_of(resolved, layout, is_remote=False)

    engine, *_ = polyaccel.initialize(model=model, config=config)
    batch = torch.randint(0, VOCAB, (1, 8))
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(batch))
        engine.step()
    zero = engine.zero
    outside = (zero.communicator, zero.accelerator, engine.adapter)
    places = list(zero.params)
    masters = [place.master for place in places if not place.master_is_view]
    shards = [place.own for place in places if place.is_sharded]
    states = [shard.states for shard in zero.shards]
    tiers = {shard.tier for shard in zero.shards}
    held = {
        Purpose.PARAMS: held_nbytes([place.own if place.full is None else place.full for place in places]),
        Purpose.MASTER: held_nbytes(masters),
        Purpose.OPTIM: held_nbytes(states),
        Purpose.GRADS: held_nbytes(
            list(zero.gradient_buckets()), without=(*outside, zero._pool, zero._staging, *tiers)
        ),
        Purpose.GRADS_IN_FLIGHT: held_nbytes(zero._pool, without=outside),
        Purpose.GATHERED: held_nbytes(zero.params.gathering, without=(*outside, *(place.own for place in places))),
    }
    found = Found(
        held, held_nbytes(zero, without=outside), file_nbytes([masters, states, shards]), planned, layout == zero.layout
    )
    zero.close()
    return found


def check(found: Found) -> None:
    planned, held = found.planned, found.held
    assert found.same_layout
    gathered = held.pop(Purpose.GATHERED)
    assert held == {purpose: planned.nbytes(purpose) for purpose in held}
    assert found.total == sum(held.values()) + gathered  # nothing is held for a purpose that is not in the plan
    assert bool(gathered) == bool(planned.nbytes(Purpose.GATHERED))
    assert gathered <= planned.nbytes(Purpose.GATHERED)  # a bound


def config_of(stage: int, width: int, zero: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    cut = {"reduce_bucket_size": 6 * width * width, "stage3_param_persistence_threshold": 5 * width}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, **cut, **(zero or {})},
        **changes,
    }


Pools = Callable[[int], RankPool]
BF16 = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16-accumulated"])
@pytest.mark.parametrize(("stage", "width"), [(0, NARROW), (1, NARROW), (2, NARROW), (3, NARROW), (3, WIDE)])
def test_the_engine_holds_what_was_planned(rank_pool: Pools, stage: int, width: int, changes: dict[str, Any]) -> None:
    for found in rank_pool(2).run(measure, config_of(stage, width, **changes), width):
        check(found)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (2, {"zero": {"overlap_comm": False}, "optimizer": {"type": "Lion"}}),
        (1, {"communication_data_type": "bf16"}),
        (2, {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, **BF16}),
        (3, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (3, {"zero": {"stage3_max_live_parameters": 700_000}}),
    ],
    ids=["no overlap", "narrow travel", "cpu by half", "cpu", "tight"],
)
def test_other_settings_are_followed_too(rank_pool: Pools, stage: int, changes: dict[str, Any]) -> None:
    for found in rank_pool(2).run(measure, config_of(stage, NARROW, **changes), NARROW):
        check(found)


@pytest.mark.parametrize("pipelined", [False, True])
def test_states_in_files_pass_through_the_planned_buffers(rank_pool: Pools, pipelined: bool, tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "pipeline_read": pipelined, "pipeline_write": pipelined}
    for found in rank_pool(2).run(measure, config_of(2, NARROW, zero={"offload_optimizer": offload}), NARROW):
        planned = found.planned
        assert found.files == planned.peak_nbytes(Place.NVME) == 3 * planned.nbytes(Purpose.MASTER)
        staging = found.total - sum(found.held.values())
        most = planned.nbytes(Purpose.STAGING)
        padding = 9 * 4096  # whole blocks, in as many buffers
        if pipelined:  # how many groups are under way together depends on the disk
            assert most / 3 <= staging <= most + padding
        else:
            assert most <= staging <= most + padding


@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16-accumulated"])
@pytest.mark.parametrize("states", ["none", "cpu"])
def test_parameters_in_files_are_planned(
    rank_pool: Pools, tmp_path: Path, states: str, changes: dict[str, Any]
) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    zero = {"offload_param": place, "offload_optimizer": {"device": states}}
    for found in rank_pool(2).run(measure, config_of(3, NARROW, zero, **changes), NARROW):
        planned, held = found.planned, found.held
        assert found.files == planned.peak_nbytes(Place.NVME) > 0
        gathered = held.pop(Purpose.GATHERED)
        assert 0 < gathered <= planned.nbytes(Purpose.GATHERED)
        assert found.total == sum(held.values()) + gathered + planned.nbytes(Purpose.STAGING)
        held[Purpose.PARAMS] += found.files
        assert held == {purpose: planned.nbytes(purpose) for purpose in held}


def test_one_rank_is_planned_too(rank_pool: Pools) -> None:
    (found,) = rank_pool(1).run(measure, config_of(3, NARROW), NARROW)
    check(found)
