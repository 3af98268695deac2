"""`polyaccel verify` on a real script of two processes."""

from __future__ import annotations

import subprocess
import sys

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


def verify(folder, *words):
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "polyaccel", "verify", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def test_a_script_of_two_ranks_is_proven(tmp_path):
    done = verify(tmp_path, "--steps", "1", "--nproc", "2", "train.py", "100000000")
    assert done.returncode == 0, done.stderr
    verdict, *rewrites = done.stdout.splitlines()
    assert verdict.startswith("PROVEN")
    assert any("zero_optimization" in line for line in rewrites)


def test_a_script_that_ends_too_early_is_an_error(tmp_path):
    done = verify(tmp_path, "--steps=3", "--nproc", "1", "train.py", "2")
    assert done.returncode == 1
    assert "hint: " in done.stderr
    assert "PROVEN" not in done.stdout
