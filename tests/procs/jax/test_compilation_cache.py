"""Compiled programs of JAX are found again by the next process, in a folder that belongs to this user alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

import polyaccel
from polyaccel.jax import compilation_cache
from polyaccel.jax.compilation_cache import keep_compiled_programs
from polyaccel.testkit.ranks.threads import run_threads

SCRIPT = """
import jax, numpy as np, polyaccel
config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
fn = lambda params, batch, rng: ((batch @ params["w"]) ** 2).mean()
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
engine = polyaccel.initialize(model=fn, params={"w": np.ones((3, 1), np.float32)}, config=config)
engine.train_batch(np.ones((2, 3), np.float32))
print(sum(event.endswith("compilation_cache/cache_hits") for event in found), jax.config.jax_compilation_cache_dir)
"""


def run(cache: Path) -> tuple[int, str]:
    """How many programs were found, and their folder, of a process with this folder for caches."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment = {**kept, "XDG_CACHE_HOME": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    hits, folder = done.stdout.split()
    return int(hits), folder


def test_the_next_start_compiles_nothing_again(tmp_path: Path) -> None:
    cache = tmp_path / "home" / "cache"
    hits, folder = run(cache)
    assert hits == 0
    assert Path(folder).parent == cache / "polyaccel" / "jax"
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    kept = {file.name for file in Path(folder).glob("*-cache")}
    assert kept
    hits, again = run(cache)
    assert (hits > 0, again) == (True, folder)
    assert {file.name for file in Path(folder).glob("*-cache")} == kept


@pytest.fixture
def unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """JAX without a folder, and the folder for caches. What JAX has opened it keeps."""
    folder, size = jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", size)


def test_a_folder_of_the_user_is_used(unset: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", "own")
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == "own"
    assert not unset.exists()


@pytest.mark.parametrize("lacks", ["a lock", "a folder"])
def test_what_is_missing_stops_no_training(lacks: str, unset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "a lock":
        monkeypatch.setattr(compilation_cache, "find_spec", lambda name: None)
    else:
        unset.write_bytes(b"")
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_false_keeps_nothing(unset: Path) -> None:
    config = {"train_batch_size": 2, "jax": {"compilation_cache": False}}

    def run(_: Any) -> None:
        polyaccel.initialize(model=lambda p, batch, rng: (batch * p).sum(), params=np.ones(2), config=config).destroy()

    run_threads(1, run)
    assert jax.config.jax_compilation_cache_dir is None
    assert not unset.exists()
