"""The scripts of `examples/deepspeed`, started by the command `deepspeed`, against the same jobs in plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "deepspeed"
PLUGIN = ROOT / "plugins" / "polyaccel-deepspeed"
RANKS = 2
LAUNCH = "import sys; from polyaccel_deepspeed.commands import launch; sys.exit(launch())"
TIMEOUT_S = 240


def losses(folder: Path, script: str, *arguments: str) -> list[float]:
    """What the script writes, on two ranks."""
    file = folder / "losses.json"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LAUNCH,
            "--num_gpus",
            str(RANKS),
            str(EXAMPLES / script),
            "--losses",
            str(file),
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PLUGIN)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: list[float] = json.loads(file.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module(request.param)


def close(ours: list[float], theirs: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)


@pytest.mark.parametrize("example", ["cifar10_deepspeed"], indirect=True)
def test_cifar10(example: ModuleType, tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "cifar10_config.json").read_text(encoding="utf-8"))
    steps, file = 6, tmp_path / "images.pt"
    found = losses(
        tmp_path, "cifar10_deepspeed.py", "--deepspeed", "--deepspeed_config", str(EXAMPLES / "cifar10_config.json"),
        "--data", str(file), "--epochs", "2", "--steps", str(steps),
    )  # fmt: skip
    data, model = example.prepare(file), example.build()
    options = {**config["optimizer"]["params"], "betas": tuple(config["optimizer"]["params"]["betas"])}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    plain = []
    for epoch in range(2):
        sampler: DistributedSampler[Tensor] = DistributedSampler(data, 1, 0, seed=5)
        sampler.set_epoch(epoch)
        order = list(sampler)
        for step in range(steps):
            images, labels = data[order[step * 16 : (step + 1) * 16]]
            loss = example.loss_of(model, images, labels)
            update(model, optimizer, loss, config["gradient_clipping"])
            plain.append(loss.item())
    close(found, plain)


@pytest.mark.parametrize("example", ["bert_pretraining"], indirect=True)
def test_bert_pretraining(example: ModuleType, tmp_path: Path) -> None:
    found = losses(
        tmp_path, "bert_pretraining.py", "--deepspeed_config", str(EXAMPLES / "bert_config.json"), "--steps", "6"
    )
    model = example.build()
    optimizer = torch.optim.AdamW(example.groups_of(model), lr=1e-3)
    schedule = example.schedule_of(optimizer)
    plain = []
    for step in range(6):
        parts = [example.draw_batch(2 * step + turn, rank, 4) for turn in range(2) for rank in range(RANKS)]
        loss = model(*(torch.cat(each) for each in zip(*parts, strict=True)))
        update(model, optimizer, loss, 0.5)
        schedule.step()
        plain.append(loss.item())
    close(found, plain)


@pytest.mark.parametrize("example", ["hello_deepspeed"], indirect=True)
def test_hello_deepspeed_goes_on_from_its_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    first = losses(tmp_path, "hello_deepspeed.py", "--checkpoint_dir", str(tmp_path / "saved"), "--steps", "10")
    rest = losses(tmp_path, "hello_deepspeed.py", "--checkpoint_dir", str(tmp_path / "saved"), "--steps", "13")
    assert (len(first), len(rest)) == (10, 3)
    model = example.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    close(first + rest, list(_read(example, model, optimizer)))


def _read(example: ModuleType, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    for step in range(13):
        loss = model(torch.cat([example.draw_batch(step, rank) for rank in range(RANKS)]))
        update(model, optimizer, loss, None)
        yield loss.item()


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float | None) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
