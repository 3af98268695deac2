"""The names of the drop-in `deepspeed`: each of its table can be imported, and what is absent says so when used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import env_report
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.torch import is_functorch_transforming, required_torch_version
from polyaccel_deepspeed.names.absent import NotAvailable
from polyaccel_deepspeed.names.entry import Status
from polyaccel_deepspeed.names.surface import MODULES
from polyaccel_deepspeed.version import __version__

import polyaccel

PLUGIN = Path(__file__).parents[3] / "plugins" / "polyaccel-deepspeed"


def found(path: str) -> Any:
    module = max((name for name in MODULES if path.startswith(f"{name}.")), key=len)
    value: Any = import_module(module)
    for part in path.removeprefix(f"{module}.").split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("module", MODULES)
def test_names_that_are_there_can_be_imported(module: str) -> None:
    for name, one in MODULES[module].names.items():
        if one.status in (Status.YES, Status.ACCEPTED):
            assert found(f"{module}.{name}") is not None or name.endswith("_DEFAULT")
            assert (one.status is Status.ACCEPTED) == bool(one.why)


@pytest.mark.parametrize("module", MODULES)
def test_names_that_are_absent_say_so_when_they_are_used(module: str) -> None:
    for name, one in MODULES[module].names.items():
        if one.status is Status.NO:
            value = found(f"{module}.{name}")
            assert one.why
            with pytest.raises(NotAvailable) as caught:
                value(1, 2, three=3)
            assert all(part in str(caught.value) for part in (module, name))
            assert one.why in str(caught.value)
            if isinstance(value, type):
                assert not isinstance(3, value)
                with pytest.raises(NotImplementedError):
                    type("Derived", (value,), {})


def test_importing_it_loads_no_framework_and_no_module_of_the_engine() -> None:
    code = (
        "import sys, deepspeed; print(sorted(name for name in sys.modules if name in ('torch', 'polyaccel', 'numpy')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_name_stays_a_function_beside_the_module_of_its_name() -> None:
    below = import_module("deepspeed.utils.z3_leaf_module")
    assert import_module("deepspeed.utils").z3_leaf_module is below.z3_leaf_module


def test_a_module_that_is_not_in_the_table_does_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("deepspeed.nebula")


def test_its_version_names_both() -> None:
    deepspeeds, _, ours = __version__.partition("+polyaccel.")
    assert deepspeeds == "0.19.8"
    assert ours == polyaccel.__version__


def test_versions_of_torch_are_compared() -> None:
    assert required_torch_version(min_version=2.1)
    assert not required_torch_version(max_version="1.13")
    assert not required_torch_version(min_version="99.0.1")
    with pytest.raises(ValueError):
        required_torch_version()
    seen = []
    torch.func.grad(lambda x: (seen.append(is_functorch_transforming()), x)[1])(torch.tensor(1.0))
    assert seen == [True]
    assert not is_functorch_transforming()


def test_parts_of_the_version_are_numbers() -> None:
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, parts)) == __version__.partition("+")[0]
    assert deepspeed.__git_hash__ == deepspeed.__git_branch__ == "[none]"


def test_keys_of_a_config_are_attributes() -> None:
    config = DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": "sum"}, world_size=1)
    assert (config.gradient_allreduce_op, config.prescale_gradients, config.zero_config.stage) == ("sum", False, 0)
    with pytest.raises(AttributeError):
        config.no_such_key  # noqa: B018


def test_the_config_s_adam_is_a_fused_adam() -> None:
    for stage, given, is_fused in ((0, {}, True), (1, {}, False), (0, {"torch_adam": True}, False)):
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.5, "weight_decay": 0.0, **given}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,
        }
        engine, optimizer, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
        before = engine.module.weight.detach().clone()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert isinstance(optimizer, FusedAdam) is is_fused
        assert torch.allclose(engine.module.weight, before - 0.5)
        engine.destroy()


def test_ds_report_prints_what_the_doctor_finds_then_deepspeeds_lines(capfd: pytest.CaptureFixture[str]) -> None:
    assert env_report.cli_main(["--hide_errors_and_warnings"]) == 0
    found = capfd.readouterr().out
    assert "trains on" in found.partition("DeepSpeed general environment info:")[0]
    assert all(text in found for text in (torch.__version__, __version__, env_report.get_shm_size()[0]))
    assert env_report.cli_main(["--hide_operator_status"]) == 0
    assert "trains on" not in capfd.readouterr().out


def test_sizes_are_told_in_the_largest_unit() -> None:
    sizes = {0: "0.00 B", 1023: "1023.00 B", 1024: "1.00 KB", 3 << 29: "1.50 GB", 1 << 52: "4096.00 TB"}
    assert {size: env_report.human_readable_size(size) for size in sizes} == sizes
