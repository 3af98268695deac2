"""What the engine really allocates is what stands in its plan: every buffer of models in training, on two ranks."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.config import load_resolved
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType
from polyaccel.engine.policies.modules import module_rules_of
from polyaccel.engine.policies.steps import plan_for
from polyaccel.offload.device import DeviceTier
from polyaccel.offload.host import HostTier
from polyaccel.offload.nvme import NvmeTier
from polyaccel.planner.forecast import step_plan
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.torch.estimate.meta_shapes import shape_of_module
from polyaccel.zero.plan.bucket_plan import PlannedBuffer, StepPlan
from polyaccel.zero.plan.memory import Purpose, estimate_memory, follow_reductions
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.plan.policy import Placement

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


class Allocations:
    """Every buffer that `communicator`, its accelerator or a tier gave, by the call that the engine made itself."""

    def __init__(self, communicator: Any) -> None:
        self._owners = (type(communicator), type(communicator.accelerator))
        self._found: list[tuple[str, str, Any]] = []
        """The method, the key in a tier, and a reference to the buffer."""
        self._inside = threading.local()

    @contextmanager
    def noted(self) -> Iterator[None]:
        communicator, accelerator = self._owners
        methods: list[tuple[Any, str, str]] = [(ScratchPool, "take", "")]
        methods += [(communicator, "allocate", "communicator"), (accelerator, "allocate", "accelerator")]
        for tier in (DeviceTier, HostTier, NvmeTier):
            methods += [(tier, "allocate", tier.name), (tier, "stage", "staging")]
        with ExitStack() as stack:
            for owner, method, by in methods:
                stack.enter_context(patch.object(owner, method, self._noting(getattr(owner, method), by)))
            yield

    def _noting(self, real: Callable[..., Any], by: str) -> Callable[..., Any]:
        def allocate(owner: Any, *args: Any, **options: Any) -> Any:
            if getattr(self._inside, "now", False):  # a tier or a communicator asks its accelerator
                return real(owner, *args, **options)
            self._inside.now = True
            try:
                buffer = real(owner, *args, **options)
            finally:
                self._inside.now = False
            if by:  # else a communicator's own
                self._found.append((by, args[0] if isinstance(args[0], str) else "", ref(buffer)))
            return buffer

        return allocate

    def held(self) -> dict[str, Counter[tuple[str, int, DType]]]:
        """The buffers that are still there: for each method, how many of each key, length and type."""
        gc.collect()
        found: dict[str, Counter[tuple[str, int, DType]]] = {}
        for by, key, buffer in self._found:
            if (held := buffer()) is not None:
                found.setdefault(by, Counter())[key, held.numel, held.dtype] += 1
        return found


def planned(plan: StepPlan) -> dict[str, Counter[tuple[str, int, DType]]]:
    """The same by the plan, but for gathered parameters and what passes between files and kernels."""
    found: dict[str, Counter[tuple[str, int, DType]]] = {}

    def add(by: str, key: str, buffer: PlannedBuffer | None) -> None:
        if buffer is not None:
            found.setdefault(by, Counter())[key, buffer.numel, buffer.dtype] += 1

    for each in plan.buckets:
        key = f"bucket{each.bucket.index}"
        if each.is_sharded:
            add(each.params.place.value, f"{key}.params", each.params)
        else:
            add("communicator", "", each.params)
        if each.master is not None:
            add(each.master.place.value, f"{key}.master", each.master)
    for each in plan.trained:
        for name, state in each.states.items():
            add(state.place.value, f"bucket{each.bucket.index}.{name}", state)
        is_whole = plan.zero.grads is Placement.REPLICATED
        add("communicator" if is_whole else "accelerator", "", each.gradient)
    for numel, dtype in follow_reductions(plan).held():
        add("communicator", "", PlannedBuffer(numel, dtype))
    for params in {each.staged_params for each in plan.trained}:
        add("staging", "", params)
    return found


@dataclass(frozen=True)
class Found:
    """On one rank after two steps: the buffers held and planned, the engine's plan, and the planner's."""

    held: dict[str, Counter[tuple[str, int, DType]]]
    planned: dict[str, Counter[tuple[str, int, DType]]]
    plan: StepPlan
    forecast: StepPlan


def measure(communicator: Any, config: dict[str, Any], width: int) -> Found:
    torch.manual_seed(0)
    model = PlannedModel(width)
    resolved = load_resolved(config, world_size=communicator.world_size)
    shape = shape_of_module(model, "", module_rules_of(resolved))
    layout = plan_for(resolved, shape.specs, lambda: shape.units, Mesh.flat(communicator.world_size))
    forecast = step_plan(resolved, layout, is_remote=False)

    allocations = Allocations(communicator)
    with allocations.noted():
        engine, *_ = polyaccel.initialize(model=model, config=config)
        batch = torch.randint(0, VOCAB, (1, 8))
        for _ in range(2 * engine.gradient_accumulation_steps()):
            engine.backward(engine(batch))
            engine.step()
    found = Found(allocations.held(), planned(engine.zero.plan), engine.zero.plan, forecast)
    engine.destroy()
    return found


def nbytes_of(buffers: Counter[tuple[str, int, DType]]) -> int:
    return sum(count * numel * dtype.itemsize for (_, numel, dtype), count in buffers.items())


def check(found: Found) -> None:
    """All that is held is planned, and the other way round; gathered parameters within their bound."""
    assert found.plan == found.forecast
    held, expected = dict(found.held), found.planned
    gathered = held["communicator"] - expected["communicator"]
    votes = Counter({key: count for key, count in gathered.items() if key[2] is DType.UINT8})
    assert sum(votes.values()) <= 1  # what ranks need next, two numbers of each: not planned
    gathered -= votes
    held["communicator"] = held["communicator"] - gathered - votes
    assert held == expected
    bound = estimate_memory(found.plan).nbytes(Purpose.GATHERED)
    lengths = {(each.bucket.numel, each.params.dtype) for each in found.plan.sharded}
    assert {(numel, dtype) for _, numel, dtype in gathered} <= lengths
    assert bool(gathered) == bool(bound)
    assert nbytes_of(gathered) <= bound


def of_files(found: Found) -> int:
    """Bytes of the host buffers between files and kernels, and of nothing else: those that no plan names singly."""
    between = found.held["accelerator"] - found.planned.get("accelerator", Counter())
    found.held["accelerator"] -= between
    if not found.held["accelerator"]:
        del found.held["accelerator"]
    return nbytes_of(between)


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
        staging = of_files(found)
        check(found)
        estimate = estimate_memory(found.plan)
        assert nbytes_of(found.held["nvme"]) == estimate.peak_nbytes(Place.NVME) == 3 * estimate.nbytes(Purpose.MASTER)
        most = estimate.nbytes(Purpose.STAGING)
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
        check(found)
        estimate = estimate_memory(found.plan)
        assert nbytes_of(found.held["nvme"]) == estimate.peak_nbytes(Place.NVME) > 0
        assert nbytes_of(found.held.get("staging", Counter())) == estimate.nbytes(Purpose.STAGING)


def test_one_rank_is_planned_too(rank_pool: Pools) -> None:
    (found,) = rank_pool(1).run(measure, config_of(3, NARROW), NARROW)
    check(found)
