"""Who may import whom: import-linter's contracts hold, frameworks stay behind names that announce them, and importing
the package costs neither of them."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import grimp
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "jax")
NAMED_OTHERWISE = {
    "polyaccel.frontend": "the type of a torch module in the signature of initialize, for editors alone",
    "polyaccel.accelerators.cpu": "a device's own file",
    "polyaccel.testkit.ranks.procs": "ranks as processes are joined by torch's gloo",
}
"""Modules that import a framework, when they are used, without saying so in their names, and why they may."""


def test_every_contract_is_kept() -> None:
    """In a process of its own, because import-linter silences every logger that exists."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout


def test_every_module_that_imports_a_framework_says_so_in_its_name() -> None:
    graph = grimp.build_graph("polyaccel", include_external_packages=True, cache_dir=None)
    silent = {
        (module, framework)
        for framework in FRAMEWORKS
        if framework in graph.modules
        for module in graph.find_modules_that_directly_import(framework)
        if framework not in module and module not in NAMED_OTHERWISE
    }
    assert silent == set()


def test_plugins_behind_entry_points_are_protected() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    protected = {module for contract in contracts for module in contract.get("protected_modules", ())}
    groups = ("polyaccel.accelerators", "polyaccel.comm", "polyaccel.tiers")
    points = [point for group in groups for point in project["project"]["entry-points"][group].values()]
    modules = {point.partition(":")[0] for point in points}
    assert all(any(fnmatch(module, pattern) for pattern in protected) for module in modules)
    assert all(any(fnmatch(module, pattern) for module in modules) for pattern in protected)


@pytest.mark.parametrize("module", ["polyaccel", "polyaccel.cli.main", "polyaccel.config", "polyaccel.registry"])
def test_importing_loads_no_framework(module: str) -> None:
    script = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=280)
    found = {name.partition(".")[0] for name in json.loads(loaded.stdout)}
    assert "polyaccel" in found
    assert found.isdisjoint({*FRAMEWORKS, "stevedore"} if module != "polyaccel.registry" else FRAMEWORKS)


def test_rooms_of_frameworks_are_attributes_that_load_no_framework() -> None:
    """The guide writes `polyaccel.jax.unit` after `import polyaccel`."""
    script = """
import sys, polyaccel
assert (polyaccel.jax.__name__, polyaccel.torch.__name__) == ("polyaccel.jax", "polyaccel.torch")
assert {"jax", "torch"} <= {*dir(polyaccel)}
assert not {"jax", "torch"} & {*sys.modules}
assert callable(polyaccel.jax.replicated) and callable(polyaccel.torch.as_jax)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_training_does_not_load_the_compiler() -> None:
    """torch's own optimizers load it when they are made: seconds of every start, on every rank."""
    script = """
import sys, torch, polyaccel
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
engine, *_ = polyaccel.initialize(model=torch.nn.Linear(4, 4), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
assert engine.global_steps == 1
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
