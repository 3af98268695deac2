"""The drop-in as pip installs it: what is there, what importing it loads, and what becomes of another `deepspeed`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bare_environment import BareEnvironment
from throwaway import Distribution, install

import polyaccel

PLUGIN = Path(__file__).parents[3] / "plugins" / "polyaccel-deepspeed"
COMMANDS = ("deepspeed", "deepspeed.pt", "ds", "ds_report", "dsr", "ds_bench", "ds_ssh", "zero_to_fp32")
MOST_MODULES = 40
"""Modules that `import deepspeed` may load when torch is loaded already: a few milliseconds' worth."""
LOADED = """
import json, sys
import torch
before = set(sys.modules)
import deepspeed
print(json.dumps(sorted(set(sys.modules) - before)))
"""
VERSION = "import deepspeed, importlib.metadata as m; print(m.version('deepspeed'), deepspeed.__version__)"


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("*.egg-info", "build"))
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    """With torch, where another `deepspeed` was installed before ours."""
    folder = tmp_path_factory.mktemp("dropin")
    made = BareEnvironment(folder / "venv", "torch")
    into = ("--python", str(made.python), "install", "--no-index", "--no-deps")
    pip(*into, str(Distribution("deepspeed", "0.18.1", "__version__ = '0.18.1'", {}).build(folder)))
    said = pip(*into, str(wheel))
    assert "Successfully uninstalled deepspeed-0.18.1" in said
    return made


def test_it_takes_the_place_of_another_one(environment: BareEnvironment, tmp_path: Path) -> None:
    version = f"0.19.8+polyaccel.{polyaccel.__version__}"
    assert environment.run("-c", VERSION, folder=tmp_path).stdout == f"{version} {version}\n"


def test_its_commands_are_there_and_start(environment: BareEnvironment, tmp_path: Path) -> None:
    for name in COMMANDS:
        assert (environment.python.parent / name).exists(), name
    done = environment.run(str(environment.python.parent / "deepspeed"), "nothing.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("deepspeed: error: no script 'nothing.py'")


def test_importing_it_loads_little_beside_torch(environment: BareEnvironment, tmp_path: Path) -> None:
    done = environment.run("-c", LOADED, folder=tmp_path)
    loaded = json.loads(done.stdout)
    assert len(loaded) <= MOST_MODULES, loaded
    assert "polyaccel" not in loaded


def test_another_one_elsewhere_is_named_when_an_engine_is_made(environment: BareEnvironment, tmp_path: Path) -> None:
    """Its metadata come first on the path, its modules do not."""
    install(tmp_path / "site", Distribution("deepspeed", "0.18.1", "", {}))
    (tmp_path / "site" / "deepspeed.py").unlink()
    code = "import deepspeed, torch; deepspeed.initialize(model=torch.nn.Linear(2, 2), config={})"
    done = environment.run("-c", code, folder=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert "two packages named deepspeed are installed: polyaccel's 0.19.8+polyaccel." in done.stderr
    assert "and 0.18.1 in " in done.stderr
    assert "hint: pip uninstall --yes deepspeed" in done.stderr


def test_files_of_another_one_beside_ours_are_an_error_at_import(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    (tmp_path / "site" / "deepspeed" / "runtime").mkdir()
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import deepspeed"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert "two packages named deepspeed are installed into" in done.stderr
    assert "runtime is not of polyaccel's" in done.stderr
