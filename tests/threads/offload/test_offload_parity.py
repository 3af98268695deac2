"""Offload changes where states are and nothing else: bitwise the numbers of no offload, at every stage."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import combinations
from parity_models import (
    SMALL_BUCKET,
    Run,
    assert_bitwise,
    batch,
    make_config,
    on_threads,
    parity_model,
    snapshot,
    train_on_threads,
)
from stage3_models import assert_same_run

import polyaccel
from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import ConfigError, OffloadError
from polyaccel.offload.state_file import StateFile
from polyaccel.ops.base import KernelTable
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 3
BF16 = {"bf16": {"enabled": True}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
OFFLOADS: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu"},
    "half": {"device": "cpu", "ratio": 0.5},
    "nvme": {"device": "nvme"},
    "pipelined": {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 12, "ratio": 0.7},
}


def offloaded(name: str, path: Path) -> dict[str, Any]:
    return {"offload_optimizer": {**OFFLOADS[name], "nvme_path": str(path)}}


def config(stage: int, zero: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET, **zero}, **changes)


def trained(world: int, stage: int, zero: dict[str, Any], **changes: Any) -> Run:
    return train_on_threads(world, config(stage, zero, **changes), STEPS)


CHANGES = {"adamw": {}, "lamb-bf16": {**LAMB, **BF16}}


@cache
def trained_on_device(world: int, stage: int, changes: str) -> Run:
    return trained(world, stage, {}, gradient_clipping=0.5, **CHANGES[changes])


@combinations(name=list(OFFLOADS), stage=[2, 3, 1, 0], world=[2, 3, 1], changes=list(CHANGES))
def test_every_tier_gives_the_numbers_of_none(tmp_path, name, stage, world, changes):
    run = trained(world, stage, offloaded(name, tmp_path), gradient_clipping=0.5, **CHANGES[changes])
    assert_same_run(run, trained_on_device(world, stage, changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Lion"])
def test_other_optimizers_are_offloaded_alike(tmp_path, name):
    params = {"lr": 1e-2, **({"momentum": 0.9} if name == "SGD" else {})}
    optimizer = {"optimizer": {"type": name, "params": params}}
    wanted = trained(2, 2, {}, **optimizer)
    for tier in ("host", "pipelined"):
        assert_same_run(trained(2, 2, offloaded(tier, tmp_path), **optimizer), wanted)


def test_accumulation_and_late_publishing_change_nothing_under_offload(tmp_path):
    for zero in ({}, {"overlap_comm": True, "overlap_param_gather": True}):
        wanted = trained(2, 2, zero, accumulation=3)
        for tier in ("host", "pipelined"):
            assert_same_run(trained(2, 2, {**zero, **offloaded(tier, tmp_path)}, accumulation=3), wanted)


# Where states are.


def test_states_are_where_the_ratio_says(tmp_path):
    def placed(communicator, model, ratio):
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "ratio": ratio}}
        engine, *_ = polyaccel.initialize(model=model, config=config(2, zero))
        names = [shard.tier.name for shard in engine.zero.shards]
        numels = [shard.bucket.numel for shard in engine.zero.shards]
        is_view = [shard.out is None for shard in engine.zero.shards]
        files = {path.name for path in tmp_path.glob(f"*/rank{communicator.rank}/*")}
        buckets = [shard.bucket.index for shard in engine.zero.shards if shard.tier.name == "nvme"]
        assert files == {f"bucket{index}.{kind}" for index in buckets for kind in ("master", "exp_avg", "exp_avg_sq")}
        assert is_view == [name == "device" for name in names]  # fp32 masters on the device are the parameters
        engine.destroy()
        return names, sum(numel for numel, name in zip(numels, names, strict=True) if name == "nvme") / sum(numels)

    shares = {}
    for ratio in (0.0, 0.5, 1.0):
        (names, shares[ratio]), _ = on_threads(2, placed, parity_model, ratio)
        assert names == sorted(names)  # the first ones stay
    assert shares[0.0] == 0.0
    assert 0.5 <= shares[0.5] < 0.8
    assert shares[1.0] == 1.0


# Checkpoints.


def go_on(
    communicator: Any,
    model: Any,
    settings: dict[str, Any],
    steps: range = range(STEPS),
    load: str | None = None,
    save: str | None = None,
) -> Any:
    """Train `steps`, after loading and before saving what is named; returns the parameters."""
    engine, *_ = polyaccel.initialize(model=model, config=settings)
    if load:
        engine.load_checkpoint(load)
    for step in steps:
        engine.backward(engine(*batch(step, 0, communicator.rank)))
        engine.step()
        for place in engine.zero.params:
            assert not any(_padding(place.bucket, place.full))
    if save:
        engine.save_checkpoint(save)
    params = snapshot(engine.module)
    engine.destroy()
    return params


def _padding(bucket: Any, full: Buffer) -> list[float]:
    """What stands between the parameters of a bucket, and zeros for the parameters."""
    values = full.raw.tolist()
    for slot in bucket.slots:
        values[slot.offset : slot.end] = [0.0] * slot.param.numel
    return values


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("source", "target"), [("none", "nvme"), ("nvme", "host"), ("half", "none"), ("host", "pipelined")]
)
def test_training_goes_on_from_another_tiers_checkpoint(tmp_path, source, target, precision):
    settings = {
        name: config(2, {} if name == "none" else offloaded(name, tmp_path / "nvme"), **precision)
        for name in ("none", source, target)
    }
    saved = str(tmp_path / "saved")
    wanted, _ = on_threads(2, go_on, parity_model, settings["none"], range(4))
    on_threads(2, go_on, parity_model, settings[source], range(2), None, saved)
    found, _ = on_threads(2, go_on, parity_model, settings[target], range(2, 4), saved)
    assert_bitwise(found, wanted)


# Optimizers of the caller's own.


def _client(communicator: Any, model: Any, settings: dict[str, Any]) -> Any:
    optimizer = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.5)
    engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(STEPS):
        engine.backward(engine(*batch(step, 0, communicator.rank)))
        engine.step()
    params = snapshot(engine.module)
    engine.destroy()
    return params


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_a_torch_optimizer_works_with_the_host(tmp_path, precision):
    wanted, _ = on_threads(2, _client, parity_model, config(2, {}, **precision))
    for name in ("host", "half"):
        found, _ = on_threads(2, _client, parity_model, config(2, offloaded(name, tmp_path), **precision))
        assert_bitwise(found, wanted)


def test_a_torch_optimizer_is_refused_with_files(tmp_path):
    with pytest.raises(ConfigError) as caught:
        on_threads(2, _client, parity_model, config(2, offloaded("nvme", tmp_path)))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("zero_optimization.offload_optimizer.device", "nvme")
    ]
    assert "AdamW" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# A device whose memory the host's kernels do not reach, as far as the step knows.


class Far(CpuAccelerator):
    """A device that is not the host: it knows whose memory is whose, and counts what it pinned."""

    name = "far"

    def __init__(self) -> None:
        super().__init__("torch")
        self.pinned = 0
        self._own: list[Buffer] = []  # both for good, so that no address is used again
        self._hosts: list[Buffer] = []
        self._kernels = refusing(self.is_the_hosts, super().kernels())

    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset(DType), "local", host_pinning=True)

    def kernels(self) -> KernelTable:
        return self._kernels

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        buffer = super().allocate(numel, dtype)
        self.pinned += pinned
        (self._hosts if pinned else self._own).append(buffer)
        return buffer

    def note_hosts(self, buffer: Buffer) -> Buffer:
        self._hosts.append(buffer)
        return buffer

    def owns(self, buffer: Buffer) -> bool:
        return any(_is_within(buffer, own) for own in self._own)

    def is_the_hosts(self, buffer: Buffer) -> bool:
        return any(_is_within(buffer, one) for one in self._hosts)


def _is_within(buffer: Buffer, whole: Buffer) -> bool:
    return bool(buffer.numel) and 0 <= buffer.data_ptr() - whole.data_ptr() < whole.nbytes


def refusing(is_foreign: Any, table: KernelTable) -> KernelTable:
    """The kernels of `table`, which cannot reach foreign memory."""

    def guarded(kernel: Any) -> Any:
        def run(*args: Any) -> None:
            inner = [one for arg in args if isinstance(arg, (list, tuple)) for one in arg]  # states, or (offset, piece)
            pieces = [one[1] if isinstance(one, tuple) else one for one in inner]
            assert not any(isinstance(one, Buffer) and is_foreign(one) for one in (*args, *pieces))
            kernel(*args)

        return run

    return table.replaced("guarded", {op: guarded(table[op]) for op in table})


@pytest.fixture
def far(monkeypatch):
    """A `Far` whose memory the host's kernels refuse, and whose kernels refuse the host's memory."""
    device = Far()
    allocate, kernels = CpuAccelerator.allocate, CpuAccelerator.kernels

    def noted(self: CpuAccelerator, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        buffer = allocate(self, numel, dtype, pinned=pinned)
        return buffer if isinstance(self, Far) else device.note_hosts(buffer)

    monkeypatch.setattr(CpuAccelerator, "allocate", noted)
    monkeypatch.setattr(CpuAccelerator, "kernels", lambda self: refusing(device.owns, kernels(self)))
    return device


def on_far_device(fn: Any, device: Far, settings: dict[str, Any]) -> Any:
    models = [parity_model() for _ in range(2)]

    def run(communicator: Any) -> Any:
        reduce_scatter = communicator.reduce_scatter

        def guarded(out: Buffer, source: Buffer, *args: Any, **kwargs: Any) -> Any:
            assert device.owns(out)
            assert device.owns(source)
            return reduce_scatter(out, source, *args, **kwargs)

        communicator.reduce_scatter = guarded
        return fn(communicator, models[communicator.rank], settings)

    return run_threads(2, run, accelerator=device)[0]


@combinations(name=list(OFFLOADS), bucket=[SMALL_BUCKET, 10**9], is_lamb=[False, True], is_bf16=[False, True])
def test_gradients_and_parameters_pass_between_device_and_host(tmp_path, far, name, bucket, is_lamb, is_bf16):
    sizes, changes = {"reduce_bucket_size": bucket}, {**(LAMB if is_lamb else {}), **(BF16 if is_bf16 else {})}
    wanted, _ = on_threads(2, go_on, parity_model, config(2, sizes, **changes))
    pinned = far.pinned
    found = on_far_device(go_on, far, config(2, {**offloaded(name, tmp_path), **sizes}, **changes))
    assert_bitwise(found, wanted)
    assert far.pinned > pinned


def accumulate(communicator: Any, model: Any, settings: dict[str, Any], look: Any = None) -> Any:
    """Two updates of three micro-batches; `look` looks at gradients in the middle."""
    engine, *_ = polyaccel.initialize(model=model, config=settings)
    norms = []
    for step in range(2):
        for micro in range(3):
            engine.backward(engine(*batch(step, micro, communicator.rank)))
            engine.step()
            if look is not None and micro == 1:
                look(engine.zero)
        norms.append(engine.get_global_grad_norm())
    params = snapshot(engine.module)
    engine.destroy()
    return params, norms


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_gradients_rest_with_offloaded_states_and_add_up_there(tmp_path, far, stage, precision):
    def check(zero: Any) -> None:
        zero.reducer.finish_reductions()
        for shard, gradients in zip(zero.shards, zero.reducer.buckets, strict=True):
            is_away = stage >= 2 and shard.tier.name != "device"
            assert far.is_the_hosts(gradients.result()) is is_away
            assert far.owns(gradients.result()) is not is_away
            seen.add(is_away)

    changes = {"accumulation": 3, "gradient_clipping": 0.5, **precision}
    wanted = on_threads(2, accumulate, parity_model, config(stage, {}, **changes))[0]
    for name in ("half", "nvme"):
        seen: set[bool] = set()
        settings = config(stage, offloaded(name, tmp_path), **changes)
        found = on_far_device(lambda *args: accumulate(*args, check), far, settings)
        assert found[1] == wanted[1]
        assert_bitwise(found[0], wanted[0])
        assert seen == ({False} if stage == 0 else {True} if name == "nvme" else {False, True})


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_a_torch_optimizer_on_the_host_serves_a_device(tmp_path, far, precision):
    wanted, _ = on_threads(2, _client, parity_model, config(2, {}, **precision))
    found = on_far_device(_client, far, config(2, offloaded("host", tmp_path), **precision))
    assert_bitwise(found, wanted)


# A full disk.


def test_a_full_disk_is_told_after_the_update_and_loses_nothing(tmp_path, monkeypatch):
    settings = config(2, offloaded("nvme", tmp_path / "nvme"))
    write = StateFile.start_writing

    def write_elsewhere(file: StateFile, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if file.path.name.startswith("bucket1."):
                patch.setattr(file, "path", Path("/dev/full"))
            return write(file, *rest)

    def fill_up(communicator: Any, model: Any) -> None:
        engine, *_ = polyaccel.initialize(model=model, config=settings)
        engine.backward(engine(*batch(0, 0, communicator.rank)))
        engine.step()
        engine.backward(engine(*batch(1, 0, communicator.rank)))
        with monkeypatch.context() as patch:
            patch.setattr(StateFile, "start_writing", write_elsewhere)
            with pytest.raises(OffloadError) as caught:
                engine.step()
            assert caught.value.value == 256
        engine.save_checkpoint(str(tmp_path / "saved"))
        engine.destroy()

    on_threads(1, fill_up, parity_model)
    (wanted,) = on_threads(1, go_on, parity_model, config(2, {}), range(4))
    (found,) = on_threads(1, go_on, parity_model, config(2, {}), range(2, 4), str(tmp_path / "saved"))
    assert_bitwise(found, wanted)
