"""A plugin for pytest: peers' tests run on a CPU, and each outcome is a line of JSON in $PEERS_OUTCOMES."""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.util import find_spec
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


def _same(test: Any) -> Any:
    return test


def _take_off(module: str, names: tuple[str, ...]) -> None:
    if find_spec(module.partition(".")[0]) is not None:
        home = import_module(module)
        for name in names:
            if hasattr(home, name):
                setattr(home, name, _same)


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
    else:
        _take_off("accelerate.test_utils.testing", _DEVICES)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write an outcome: of the call, or of what failed or skipped before it."""
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ["PEERS_OUTCOMES"], "a") as out:
            out.write(json.dumps([report.nodeid, report.outcome, str(report.longrepr)[-800:]]) + "\n")
