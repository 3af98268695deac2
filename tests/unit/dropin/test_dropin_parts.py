"""Parts of the drop-in that need no ranks: optimizers as objects, the device's names, native parts."""

from __future__ import annotations

import io
import pickle
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import init_distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.ops import op_builder
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.runtime.utils import call_to_str, memory_status, partition_balanced, partition_uniform, prefix_sum_inc
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from polyaccel_deepspeed.engine.parameters import describe

from polyaccel import PolyaccelError
from polyaccel.config import load_resolved
from polyaccel.errors import CommError
from polyaccel.torch.api.optimizer import ZeroOptimizer


def test_an_optimizer_shows_the_engines_groups_in_the_dicts_that_schedules_hold() -> None:
    """Accelerate makes a DeepSpeedCPUAdam of a torch optimizer's groups, which the user's schedule goes on moving."""
    model = torch.nn.Linear(3, 2)
    users = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(users, lambda step: 1.0 / (1 + step))
    ours = DeepSpeedCPUAdam(users.param_groups, lr=0.5, weight_decay=0.1)
    engines = ZeroOptimizer([dict(group) for group in ours.param_groups], lambda closure: None, lambda: None)
    ours.follow(engines)
    users.step()
    schedule.step()
    assert engines.param_groups[0]["lr"] == 0.25
    assert engines.param_groups[0] is ours.param_groups[0] is users.param_groups[0]


@pytest.mark.parametrize("make", [FusedAdam, DeepSpeedCPUAdam, FusedLamb])
def test_an_optimizer_is_one_of_the_configs(make: Any) -> None:
    optimizer = make([torch.nn.Parameter(torch.zeros(2))], lr=0.25)
    resolved = load_resolved({"train_batch_size": 1, "optimizer": optimizer.section()}, world_size=1)
    assert resolved.optimizer is not None
    assert resolved.optimizer.params["lr"] == 0.25
    with pytest.raises(PolyaccelError) as caught:
        optimizer.step()
    assert "deepspeed.initialize" in str(caught.value)
    with pytest.raises(PolyaccelError) as caught:
        make([torch.nn.Parameter(torch.zeros(2))], amsgrad=True)
    assert caught.value.value == "amsgrad"


def test_parameters_say_what_deepspeeds_say_and_still_pickle() -> None:
    model = torch.nn.Linear(7, 33)
    describe(model, world_size=2)
    weight: Any = model.weight
    assert (weight.ds_numel, tuple(weight.ds_shape), weight.partition_numel()) == (231, (33, 7), 116)
    assert weight.ds_tensor.ds_numel == 116
    assert weight.ds_status == ZeroParamStatus.AVAILABLE
    assert pickle.loads(pickle.dumps(weight.ds_status)) is ZeroParamStatus.AVAILABLE
    torch.save(model, io.BytesIO())


def test_the_device_has_deepspeeds_names() -> None:
    device = get_accelerator()
    assert device is get_accelerator()
    assert device.current_device_name().startswith(device.device_name())
    assert device.FloatTensor([1, 2]).dtype is torch.float32
    assert torch.float32 in device.supported_dtypes()
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with device.stream(device.current_stream()):
        device.range_push("nothing")
        device.range_pop()


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="devices of other kinds can be counted")
def test_a_cpu_counts_as_many_devices_as_a_launcher_has_ranks_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    alone = get_accelerator().device_count()
    assert alone >= 1
    monkeypatch.setenv("LOCAL_SIZE", str(alone + 3))
    assert get_accelerator().device_count() == alone + 3


def test_versions_that_scripts_compare_are_unknown_where_nothing_was_compiled() -> None:
    assert deepspeed.git_version_info.version == deepspeed.__version__
    assert deepspeed.git_version_info.torch_info["version"] == "0.0"


def test_what_is_copied_to_be_saved_stays_tied_and_leaves_the_rest_behind() -> None:
    whole = torch.arange(1000.0)
    copied = clone_tensors_for_torch_save({"a": whole[:10], "tied": [whole[:10]], "b": whole[10:20], "step": 3})
    assert copied["a"] is copied["tied"][0]
    assert copied["a"].untyped_storage().nbytes() == 40
    assert torch.equal(copied["b"], whole[10:20])
    assert copied["step"] == 3
    copied["a"].zero_()
    assert whole[1] == 1.0


def test_a_call_is_written_as_python_writes_it() -> None:
    assert call_to_str("load", 3, "bert", path="a") == "load(3, 'bert', path='a')"


@pytest.mark.parametrize(
    ("weights", "count", "parts"),
    [([0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]), ([0.0, 1.1, 30, 3.0], 3, [0, 2, 3, 4]), ([1, 1], 4, [0, 1, 2, 2, 2])],
)
def test_layers_are_dealt_to_balanced_parts(weights: list[float], count: int, parts: list[int]) -> None:
    assert partition_balanced(weights, count) == parts


@pytest.mark.parametrize(("items", "parts"), [(8, [0, 2, 4, 6, 8]), (10, [0, 3, 6, 8, 10]), (2, [0, 1, 2, 2, 2])])
def test_layers_are_dealt_to_equal_parts(items: int, parts: list[int]) -> None:
    assert partition_uniform(items, 4) == parts
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]


def test_there_is_nothing_to_build() -> None:
    builder = op_builder.CPUAdamBuilder()
    assert builder.is_compatible()
    with pytest.raises(PolyaccelError) as caught:
        builder.load()
    assert caught.value.value == "cpu_adam"
    assert deepspeed.ops.__compatible_ops__[op_builder.CPUAdamBuilder.NAME]
    assert get_accelerator().get_op_builder("CPUAdamBuilder") is op_builder.CPUAdamBuilder


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_backend_of_gpus_is_refused_on_a_machine_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CommError) as caught:
        init_distributed("nccl")
    assert caught.value.value == "nccl"
    assert "dist_backend" in str(caught.value.hint)


def test_what_a_device_holds_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    memory_status("after a step:", reset_max=True)
    memory_status("not here", print_rank=5)
    said = capsys.readouterr().out
    assert said.startswith("RANK=0 MEMSTATS after a step: device=")
    assert said.count("\n") == 1
