"""README's loops run: the one before the change, the one after it, by every command that README gives, and JAX's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

RUN = {
    "polyaccel doctor",
    "python train.py",
    "polyaccel run --ranks 2 train.py",
    "torchrun --standalone --nproc-per-node 2 train.py",
}
"""Commands that are run here, next to README's loop as train.py."""
BEFORE = """\
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
inputs = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
loss_fn = torch.nn.functional.mse_loss


def MyModel():
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))


for epoch in range(10):
"""
"""What README leaves out of the loop, which trains ten epochs here."""
BEFORE_JAX = """\
import jax
import jax.numpy as jnp

import polyaccel


def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


params = {"w": jnp.zeros((8, 1))}
x = jax.random.normal(jax.random.key(0), (32, 8))
batch = {"x": x, "y": x.sum(axis=1, keepdims=True)}
"""


def block(language: str) -> str:
    """The only block of README in this language."""
    found = [text for one, text in FENCE.findall((ROOT / "README.md").read_text()) if one == language]
    text: str = found[0]
    assert len(found) == 1
    return text


def side(mark: str) -> str:
    """The script before (-) or after (+) the change that README shows."""
    lines = [line[2:] for line in block("diff").splitlines() if line[:1] in (" ", mark)]
    loop = next(number for number, line in enumerate(lines) if line.startswith("for "))
    epochs = [f"    {line}" for line in lines[loop:]]
    head, tail = BEFORE.split("for epoch")
    return "\n".join([head, *lines[:loop], f"for epoch{tail}", *epochs, 'print(f"loss {loss.item():.4f}")'])


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, with this environment's programs first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("command", sorted(RUN))
def test_a_command_works_as_written(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(side("+"))
    (tmp_path / "config.json").write_text(block("json"))
    done = shell(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == ("train.py" in command) * (2 if "2" in command else 1)
    assert max(losses, default=0) < 0.5


def test_the_loop_before_the_change_is_one_of_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(side("-"))
    done = shell("python train.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removeprefix("loss ")) < 0.5


def test_the_lines_for_jax_run(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    (tmp_path / "train.py").write_text(f"{BEFORE_JAX}{block('python')}print(float(loss))\n")
    (tmp_path / "config.json").write_text(block("json"))
    done = shell("python train.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
