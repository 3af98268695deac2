"""Without torch, and without torch and JAX, for real: nothing is hidden, they are not there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from bare_environment import BareEnvironment

from polyaccel.comm.backends.shm.backend import ShmBackend

pytestmark = pytest.mark.skipif(not ShmBackend.probe().usable, reason="without torch ranks meet in shared memory")
HAVE = "import importlib.util, json; print(json.dumps([bool(importlib.util.find_spec(m)) for m in ('torch', 'jax')]))"
ASK = """
import polyaccel
try:
    polyaccel.initialize(model=lambda params, batch, rng: 0, {arguments}config={{"train_batch_size": 1}})
except polyaccel.PolyaccelError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    """With neither."""
    return BareEnvironment(tmp_path_factory.mktemp("nothing") / "venv")


def test_the_doctor_says_that_nothing_can_train(nothing: BareEnvironment, tmp_path: Path) -> None:
    assert nothing.run("-c", HAVE, folder=tmp_path).stdout == "[false, false]\n"
    text = nothing.run("-m", "polyaccel", "doctor", "-v", folder=tmp_path)
    assert text.returncode == 1, text.stderr
    assert "\ncannot train: neither torch nor jax is installed" in text.stdout
    assert "matrix kernels  none: they come with torch" in text.stdout
    report = json.loads(nothing.run("-m", "polyaccel", "doctor", "--json", folder=tmp_path).stdout)
    assert report["nothing_broken"]
    assert report["problems"] == ["neither torch nor jax is installed"]
    assert report["comm"] == {"within a host": "shm", "between hosts": "none, which takes torch or MPI"}


@pytest.mark.parametrize(("arguments", "missing"), [("params={}, ", "jax"), ("", "torch")])
def test_an_engine_cannot_be_made(nothing: BareEnvironment, tmp_path: Path, arguments: str, missing: str) -> None:
    done = nothing.run("-c", ASK.format(arguments=arguments), folder=tmp_path)
    assert done.stdout.startswith(f"{missing} is not installed\n  hint: pip install "), done.stderr


def test_a_framework_of_long_ago_is_named(nothing: BareEnvironment, tmp_path: Path) -> None:
    """One that has nothing of what is imported from it."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").touch()
    done = nothing.run("-c", ASK.format(arguments="params={}, "), folder=tmp_path)
    assert done.stdout.startswith("this version of jax is too old: No module named 'jax."), done.stderr
    assert "hint: pip install --upgrade " in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_jax_alone_is_enough_on_one_host(tmp_path: Path) -> None:
    only = BareEnvironment(tmp_path / "venv", "jax")
    assert only.run("-c", HAVE, folder=tmp_path).stdout == "[false, true]\n"
    done = only.run("-m", "polyaccel", "doctor", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["nothing_broken"]
    assert report["comm"] == {"within a host": "shm", "between hosts": "none, which takes torch or MPI"}
