"""A plugin for pytest: peers' tests run on a CPU, and each outcome is a line of JSON in $PEERS_OUTCOMES."""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_DEVICES = (
    "require_non_cpu",
    "require_cuda",
    "require_multi_device",
    "require_multi_gpu",
    "require_fp16",
    "require_bf16",
)


_TRANSFORMERS = ("require_torch_accelerator", "require_torch_multi_accelerator", "require_torch_fp16")


def _same(test: Any) -> Any:
    return test


def _take_off(module: str, names: tuple[str, ...]) -> None:
    if find_spec(module.partition(".")[0]) is not None:
        home = import_module(module)
        for name in names:
            if hasattr(home, name):
                setattr(home, name, _same)


def _take_off_transformers() -> None:
    """Take off skips; two devices are counted, each trainer and each script computes on the CPU."""
    _take_off("transformers.testing_utils", (*_TRANSFORMERS, "slow"))
    home: Any = import_module("transformers.testing_utils")
    home.BACKEND_DEVICE_COUNT["cpu"] = lambda: 2
    _compute_on_cpu(import_module("transformers").TrainingArguments)
    start = home.execute_subprocess_async
    home.execute_subprocess_async = lambda command, **options: start(_through(command), **options)


def _compute_on_cpu(arguments: Any) -> None:
    finish = arguments.__post_init__

    def on_cpu(self: Any) -> None:
        self.use_cpu = True
        finish(self)

    arguments.__post_init__ = on_cpu


def _take_off_lightning() -> None:
    if find_spec("lightning") is None:
        return
    for name in ("lightning.fabric.utilities.testing", "lightning.pytorch.utilities.testing"):
        home: Any = import_module(name)
        reasons = home._runif_reasons

        def on_cpu(reasons: Any = reasons, **conditions: Any) -> Any:
            for one in ("min_cuda_gpus", "bf16_cuda", "standalone"):
                conditions.pop(one, None)
            return reasons(**conditions)

        home._runif_reasons = on_cpu


def pytest_configure(config: pytest.Config) -> None:
    """Take off skips before test modules are imported."""
    suite = os.environ["PEERS_SUITE"]
    if suite == "lightning":
        _take_off_lightning()
    elif suite in ("transformers", "trl"):
        _take_off_transformers()
    else:
        _take_off("accelerate.test_utils.testing", _DEVICES)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the commands of TRL's tests compute on the CPU."""
    if os.environ["PEERS_SUITE"] == "trl":
        for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
            start = module.run_command
            module.run_command = lambda command, env, start=start: start(_through(command), env)


def _through(command: list[str]) -> list[str]:
    """Return the command with its script run by `on_cpu.py`."""
    at = next((at for at, part in enumerate(command) if str(part).endswith(".py")), None)
    if at is None:
        return command
    return [*command[:at], str(Path(__file__).with_name("on_cpu.py")), *command[at:]]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write an outcome: of the call, or of what failed or skipped before it."""
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ["PEERS_OUTCOMES"], "a") as out:
            out.write(json.dumps([report.nodeid, report.outcome, str(report.longrepr)[-800:]]) + "\n")
