"""`offload_param` changes where sharded parameters rest and nothing else: bitwise the numbers of no offload."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pairwise import combinations
from parity_models import SMALL_BUCKET, Run, assert_bitwise, make_config, on_threads, snapshot, train, train_on_threads
from stage3_models import CASES, assert_same_run
from torch import nn

import polyaccel
from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.config import load_config
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import ConfigError
from polyaccel.offload.file_buffer import FileBuffer
from polyaccel.offload.state_file import StateFile
from polyaccel.ops.base import UPDATE, KernelTable, Rule
from polyaccel.planner.forecast import step_plan
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.zero.buckets.gathered_buckets import GatheredBuckets
from polyaccel.zero.plan.memory import estimate_memory
from polyaccel.zero.plan.placement import Place

STEPS = 2
BF16 = {"bf16": {"enabled": True}}
OPTIMIZER_PLACES = ("none", "cpu", "nvme")
KEPT = 100
"""Elements that the place "part" keeps in memory on each rank: some buckets, and not all."""
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu"},
    "files": {"device": "nvme", "max_in_cpu": 0},
    "part": {"device": "nvme", "max_in_cpu": KEPT},
}
EAGER = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}


def config(place: str, optimizer_place: str, path: Path, zero: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Parameters in one of `PLACES` or "none"; buckets are small, and all but the persistent ones sharded."""
    offload = {
        "offload_param": {**PLACES.get(place, {}), "nvme_path": str(path)},
        "offload_optimizer": {"device": optimizer_place, "nvme_path": str(path)},
    }
    cut = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 6}
    return make_config(3, zero={**cut, **offload, **(zero or {})}, **changes)


def trained(settings: Any, world: int, case: str = "gpt") -> Run:
    build, loss = CASES[case]
    return train_on_threads(world, settings, STEPS, build=build, loss_fn=loss)


@cache
def trained_in_memory(world: int, is_bf16: bool) -> Run:
    changes = {"gradient_clipping": 0.5, "bf16": {"enabled": is_bf16}}
    return trained(config("none", "none", Path(), **changes), world)


@combinations(place=list(PLACES), optimizer_place=OPTIMIZER_PLACES, world=[2, 1, 3], is_bf16=[False, True])
def test_every_place_gives_the_numbers_of_none(tmp_path, place, optimizer_place, world, is_bf16):
    changes = {"gradient_clipping": 0.5, "bf16": {"enabled": is_bf16}}
    found = trained(config(place, optimizer_place, tmp_path, **changes), world)
    assert_same_run(found, trained_in_memory(world, is_bf16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", [name for name in CASES if name != "gpt"])
def test_models_that_are_hard_to_shard(tmp_path, case):
    wanted = trained(config("none", "none", tmp_path, accumulation=2), 2, case)
    for place, optimizer_place, zero in (("part", "nvme", EAGER), ("host", "cpu", {}), ("files", "nvme", {})):
        settings = config(place, optimizer_place, tmp_path, zero, accumulation=2)
        assert_same_run(trained(settings, 2, case), wanted)


def test_prefetch_and_optimizers_change_nothing(tmp_path):
    for optimizer in ("Lamb", "SGD"):
        changes = {"optimizer": {"type": optimizer, "params": {"lr": 1e-2}}, **BF16}
        wanted = trained(config("none", "none", tmp_path, **changes), 2)
        for zero in (EAGER, {}):
            assert_same_run(trained(config("files", "cpu", tmp_path, zero, **changes), 2), wanted)


# Where parameters are.


class Rest(NamedTuple):
    """Where a sharded bucket's shard and its master weights rest, and whether these are the same memory."""

    params: str
    masters: str
    is_one: bool
    trained: bool
    numel: int


def placed(communicator: Any, model: nn.Module, settings: Any) -> list[Rest]:
    """Of each sharded bucket, in order."""
    engine, *_ = polyaccel.initialize(model=model, config=settings)
    found = []
    for place in engine.zero.params:
        if place.is_sharded:
            where = ["file" if isinstance(one, FileBuffer) else "memory" for one in (place.own, place.master)]
            found.append(Rest(*where, place.master_is_view, place.bucket.kind.trainable, place.own.numel))
    engine.zero.close()
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optimizer_place", OPTIMIZER_PLACES)
def test_parameters_exist_twice_only_where_they_must(tmp_path, place, optimizer_place):
    build, _ = CASES["gpt"]
    found, _ = on_threads(2, placed, build, config(place, optimizer_place, tmp_path))
    left = {"host": 10**9, "files": 0, "part": KEPT}[place]
    for rest in found:
        left = left - rest.numel if left >= rest.numel else 0  # the first ones, and none after one that does not fit
        is_kept = place == "host" or left > 0
        if not rest.trained:
            assert rest.params == ("memory" if is_kept else "file")
            continue
        assert rest.masters == ("file" if optimizer_place == "nvme" else "memory")
        if is_kept:
            assert (rest.params, rest.is_one) == ("memory", optimizer_place == "cpu")
        elif optimizer_place == "cpu":  # master weights in host memory serve as the parameters
            assert (rest.params, rest.is_one) == ("memory", True)
        else:
            assert (rest.params, rest.is_one) == ("file", optimizer_place == "nvme")
    assert len(found) > 4
    assert place != "part" or {rest.params for rest in found} == {"memory", "file"}


def test_frozen_parameters_rest_there_too(tmp_path):
    build, _ = CASES["lora"]
    found, _ = on_threads(2, placed, build, config("files", "cpu", tmp_path))
    assert {rest.params for rest in found if not rest.trained} == {"file"}
    assert {rest.params for rest in found if rest.trained} == {"memory"}  # they are their own master weights


# Checkpoints, and values that users read and write.


def go_on(communicator: Any, model: nn.Module, settings: Any, steps: range, load: Any = None, save: Any = None) -> Any:
    engine, *_ = polyaccel.initialize(model=model, config=settings)
    _, loss = CASES["gpt"]
    if load:
        engine.load_checkpoint(str(load))
    for step in steps:
        engine.backward(loss(engine, step, 0, communicator.rank))
        engine.step()
    if save:
        engine.save_checkpoint(str(save))
    engine.destroy()
    return snapshot(model)


@pytest.mark.parametrize(
    ("source", "target", "precision"), [("none", "files", {}), ("files", "part", BF16), ("part", "none", {})]
)
def test_training_goes_on_from_another_places_checkpoint(tmp_path, source, target, precision):
    build, _ = CASES["gpt"]
    settings = {name: config(name, "nvme", tmp_path / "nvme", **precision) for name in ("none", *PLACES)}
    wanted, _ = on_threads(2, go_on, build, settings["none"], range(4))
    on_threads(2, go_on, build, settings[source], range(2), None, tmp_path / "saved")
    found, _ = on_threads(2, go_on, build, settings[target], range(2, 4), tmp_path / "saved")
    assert_bitwise(found, wanted)


def edit(communicator: Any, model: nn.Module, settings: Any) -> Any:
    engine, *_ = polyaccel.initialize(model=model, config=settings)
    _, loss = CASES["gpt"]
    with polyaccel.zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if communicator.rank == 1:
            with torch.no_grad():
                model.blocks[0].wide.weight.mul_(0.5)
                model.shift.fill_(0.25)
    engine.backward(loss(engine, 0, 0, communicator.rank))
    engine.step()
    engine.destroy()
    return snapshot(model)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_what_users_write_reaches_the_files(tmp_path, precision):
    build, _ = CASES["gpt"]
    wanted, _ = on_threads(2, edit, build, config("none", "none", tmp_path, **precision))
    for optimizer_place in OPTIMIZER_PLACES:
        found, _ = on_threads(2, edit, build, config("files", optimizer_place, tmp_path, **precision))
        assert_bitwise(found, wanted)


# A device whose memory the host's kernels do not reach, as far as the step knows.


class Far(CpuAccelerator):
    """A device that is not the host, and knows which memory is its own."""

    name = "far"

    def __init__(self) -> None:
        super().__init__("torch")
        self._own: list[Buffer] = []  # for good, so that no address is used again
        self._kernels = super().kernels()  # before the test replaces the host's

    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset(DType), "local", host_pinning=True)

    def kernels(self) -> KernelTable:
        return self._kernels

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        buffer = super().allocate(numel, dtype)
        if not pinned:
            self._own.append(buffer)
        return buffer

    def owns(self, buffer: Buffer) -> bool:
        return any(own.data_ptr() <= buffer.data_ptr() < own.data_ptr() + own.nbytes for own in self._own)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_parameters_pass_between_host_and_device(tmp_path, monkeypatch, place, precision):
    build, loss = CASES["gpt"]
    device = Far()
    kernels = CpuAccelerator.kernels
    updates = []

    def noting(self: CpuAccelerator) -> KernelTable:
        table = kernels(self)

        def update(rule: Rule, master: Buffer, grad: Buffer, states: Sequence[Buffer], *rest: Any) -> None:
            given = (master, grad, *states, *rest)
            updates.append({device.owns(buffer) for buffer in given if isinstance(buffer, Buffer)})
            table[UPDATE](rule, master, grad, states, *rest)

        return table.replaced("noting", {UPDATE: update})

    wanted = trained(config("none", "none", tmp_path, **precision), 2)
    monkeypatch.setattr(CpuAccelerator, "kernels", noting)
    for optimizer_place in OPTIMIZER_PLACES[1:]:
        settings = config(place, optimizer_place, tmp_path, **precision)
        settings["zero_optimization"]["offload_param"].update(buffer_count=2, buffer_size=50)
        models = [build() for _ in range(2)]
        runs = run_threads(
            2, lambda comm, m=models, s=settings: train(comm, m[comm.rank], s, STEPS, loss), accelerator=device
        )
        assert_same_run(runs[0], wanted)
    assert updates
    assert all(memory == {False} for memory in updates)


@pytest.mark.parametrize("optimizer_place", OPTIMIZER_PLACES)
def test_pieces_on_their_way_to_a_device_take_the_host_memory_that_is_planned(tmp_path, optimizer_place):
    build, loss = CASES["gpt"]
    settings = config("files", optimizer_place, tmp_path)
    settings["zero_optimization"]["offload_param"].update(buffer_count=2, buffer_size=20)
    models = [build() for _ in range(2)]

    def planned(engine: Any, buffer_size: int) -> int:
        zero = engine.config.zero_optimization
        offload = zero.offload_param.model_copy(update={"buffer_size": buffer_size})
        zero = zero.model_copy(update={"offload_param": offload})
        changed = engine.config.model_copy(update={"zero_optimization": zero})
        return estimate_memory(step_plan(changed, engine.zero.layout, is_remote=True)).peak_nbytes(Place.HOST)

    def work(communicator: Any) -> None:
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=settings)
        for step in range(2):
            engine.backward(loss(engine, step, 0, communicator.rank))
            engine.step()
        tiers = {shard.tier for shard in engine.zero.shards} | {place.tier for place in engine.zero.params}
        pieces = [pieces for tier in tiers if tier.name == "nvme" for pieces in tier._piece_buffers.values()]
        held = sum(buffer.nbytes for each in pieces for buffer in each._free)
        assert 0 < held <= planned(engine, 20) - planned(engine, 0)
        engine.destroy()

    run_threads(2, work, accelerator=Far())


# Reading ahead.


def test_files_are_read_before_the_hold_that_needs_them(tmp_path, monkeypatch):
    """Within the bounds on what is gathered, and without a descriptor more after some steps."""
    log: list[tuple[str, int]] = []
    start, hold = StateFile.start_reading, GatheredBuckets.unshard

    def noted_start(file: StateFile, *rest: Any) -> Any:
        log.append(("read", int(file.path.name.removeprefix("bucket").partition(".")[0])))
        return start(file, *rest)

    def noted_hold(gathering: GatheredBuckets, index: int, **rest: Any) -> None:
        log.append(("hold", index))
        hold(gathering, index, **rest)
        log.append(("held", index))

    monkeypatch.setattr(StateFile, "start_reading", noted_start)
    monkeypatch.setattr(GatheredBuckets, "unshard", noted_hold)
    build, loss = CASES["gpt"]

    def work(communicator: Any, model: nn.Module, settings: Any) -> tuple[int, int, int]:
        engine, *_ = polyaccel.initialize(model=model, config=settings)
        gc.collect()
        open_files = []
        for step in range(4):
            engine.backward(loss(engine, step, 0, communicator.rank))
            engine.step()
            if step:
                open_files.append(len(os.listdir("/proc/self/fd")))
            if step < 2:
                log.clear()
        assert open_files == sorted(open_files, reverse=True)  # what another test left may be closed meanwhile
        told = list(log)
        peak = engine.zero.params.gathered.peak_numel
        engine.destroy()
        reads = [index for index, (what, _) in enumerate(told) if what == "read"]
        on_demand = [index for index in reads if told[index - 1] == ("hold", told[index][1])]
        return len(reads), len(reads) - len(on_demand), peak

    def trained_with(zero: dict[str, Any]) -> Any:
        return on_threads(1, work, build, config("files", "none", tmp_path, zero))[0]

    reads, ahead, peak = trained_with({})
    assert reads >= 10
    assert ahead >= 0.8 * reads
    assert trained_with({"stage3_prefetch_bucket_size": 0})[:2] == (reads, 0)
    assert trained_with({"offload_param": {"device": "none"}}) == (0, 0, peak)


# Refusals.


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_is_refused_where_parameters_are_not_sharded(stage):
    with pytest.raises(ConfigError) as caught:
        load_config(make_config(stage, zero={"offload_param": {"device": "cpu"}}))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("zero_optimization.offload_param.device", "cpu")
    ]
    assert all(part in str(caught.value) for part in ('"stage"', str(stage)))


def test_files_need_a_directory():
    with pytest.raises(ConfigError) as caught:
        load_config(make_config(3, zero={"offload_param": {"device": "nvme"}}))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("zero_optimization.offload_param.nvme_path", None)
    ]
