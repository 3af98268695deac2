"""`polyaccel verify` on a real script of two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, polyaccel
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
}
engine, *_ = polyaccel.initialize(model=model, config=config)
draw = torch.Generator().manual_seed(polyaccel.comm.get_rank())
for step in range(int(sys.argv[1])):
    engine.backward(engine(torch.randn(4, 8, generator=draw, dtype=next(model.parameters()).dtype)).square().mean())
    engine.step()
"""

OF_JAX = """
import sys, jax, jax.numpy as jnp, numpy as np, polyaccel
from polyaccel.jax import replicated

def loss(params, batch, rng):
    return (batch["weights"][batch["kind"]] * jnp.square(batch["x"] @ params["w"]).sum(axis=-1)).mean()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "jax": {"execution": "native"},
    "zero_optimization": {"stage": 2},
}
engine = polyaccel.initialize(model=loss, params={"w": np.full((5, 3), 0.1, np.float32)}, config=config)
mark = replicated if sys.argv[1] == "marked" else lambda value: value
for step in range(3):
    x = np.random.default_rng(step).standard_normal((8, 5)).astype(np.float32)
    batch = {"x": x, "kind": np.arange(8) % 8, "weights": mark(np.linspace(1, 4, 8, dtype=np.float32))}
    engine.train_batch(batch)
"""
OF_A_TRAIN_STATE = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, polyaccel
from flax.training.train_state import TrainState

def loss(params, batch, rng):
    return jnp.square(batch @ params["w"] - 1 + 0 * jax.random.normal(rng, (4, 3))).mean()

def batch(step):
    return np.random.default_rng(step).standard_normal((4, 5)).astype(np.float32)

state = TrainState.create(apply_fn=None, params={"w": jnp.full((5, 3), 0.1)}, tx=optax.adam(0.1))
for step in range(3):
    state = state.apply_gradients(grads=jax.grad(loss)(state.params, batch(step), jax.random.key(0)))
config = {"train_batch_size": 4, "jax": {"execution": sys.argv[1]}, "zero_optimization": {"stage": int(sys.argv[2])}}
engine = polyaccel.initialize(model=loss, params=state, config=config)
assert engine.global_steps == 3
for step in range(3, 6):
    engine.train_batch(batch(step))
"""
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


def verify(folder, *words, script=SCRIPT, flags=""):
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "polyaccel", "verify", *words]
    environ = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    run = {"capture_output": True, "text": True, "timeout": 280, "check": False}
    return subprocess.run(command, cwd=folder, env=environ, **run)


def test_a_script_of_two_ranks_is_proven(tmp_path):
    done = verify(tmp_path, "--steps", "1", "--nproc", "2", "train.py", "100000000")
    assert done.returncode == 0, done.stderr
    verdict, *rewrites = done.stdout.splitlines()
    assert verdict.startswith("PROVEN")
    assert " plain torch" in verdict
    assert any("zero_optimization" in line for line in rewrites)


def test_a_script_that_ends_too_early_is_an_error(tmp_path):
    done = verify(tmp_path, "--steps=3", "--nproc", "1", "train.py", "2")
    assert done.returncode == 1
    assert "hint: " in done.stderr
    assert "PROVEN" not in done.stdout


@pytest.mark.parametrize("weights", ["marked", "cut"])
def test_a_function_of_jax_over_two_devices(tmp_path, weights):
    pytest.importorskip("jax")
    done = verify(tmp_path, "--steps", "1", "--nproc", "1", "train.py", weights, script=OF_JAX, flags=TWO_DEVICES)
    verdict, *lines = done.stdout.splitlines() or [done.stderr]
    assert done.returncode == (0 if weights == "marked" else 1), done.stderr
    assert verdict.startswith("PROVEN" if weights == "marked" else "DIFFERENT"), done.stderr
    assert " plain JAX" in verdict
    assert any("jax: changed 2" in line for line in lines)
    assert weights == "marked" or verdict.endswith(": jax.")


@pytest.mark.parametrize(("mode", "stage"), [("views", "2"), ("native", "3")])
def test_a_train_state_that_has_taken_steps_is_proven_from_there(tmp_path, mode, stage):
    pytest.importorskip("flax")
    done = verify(tmp_path, "--steps", "2", "--nproc", "1", "train.py", mode, stage, script=OF_A_TRAIN_STATE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("PROVEN")
