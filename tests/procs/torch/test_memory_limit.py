"""Models that are too large for the memory that a process may have, trained all the same by sharding and by files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polyaccel.job.ports import free_port

TIMEOUT_S = 240
LAYERS, WIDTH = 24, 1600
MODEL_MIB = LAYERS * WIDTH * WIDTH * 4 / 2**20
STATES_MIB = 4 * MODEL_MIB  # parameters, gradients, and two moments of Adam, all fp32
ROOMY_MIB, TIGHT_MIB = 0.8 * STATES_MIB, 0.43 * STATES_MIB
"""What a rank may allocate beside what it has when it starts: between what the ways to train need, far from each.

On the CPU host memory is the device's memory, so the host tier saves nothing there: it is sharding that leaves half of
the states to each of two ranks. In files is all of it but the gradients, which are an eighth of the states on each.
"""

RANK = """
import json, os, resource, sys, traceback

import torch
from torch import nn

import polyaccel

layers, width, cases = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


def mib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024


def train(zero, layers, width):
    torch.manual_seed(0)
    with polyaccel.zero.Init():
        model = nn.Sequential(*(Residual(width) for _ in range(layers)))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero}
    engine, *_ = polyaccel.initialize(model=model, config=config)
    inputs, losses = torch.randn(1, width), []
    for _ in range(2):
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.zero.close()  # and not destroy(), which makes all parameters whole
    return losses


def play(case):
    os.environ["MASTER_PORT"] = str(case["port"])
    polyaccel.init_distributed(dist_backend="gloo")
    train(case["zero"], 2, 8)  # for the libraries and threads that come with the first step
    limit = int((mib("VmData") + case["limit_mib"]) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again here
    start, found = mib("VmRSS"), {"losses": [], "error": None, "text": ""}
    try:
        found["losses"] = train(case["zero"], layers, width)
    except BaseException as error:
        found["error"], found["text"] = type(error).__name__, traceback.format_exc()[-2000:]
    found["peak_mib"] = mib("VmHWM") - start
    print(json.dumps(found), flush=True)


for case in cases:  # each in a process of its own, without importing torch again
    child = os.fork()
    if child == 0:
        play(case)
        os._exit(0)
    os.waitpid(child, 0)
"""


class Found(NamedTuple):
    """How a case ended on one rank."""

    losses: list[float]
    error: str | None
    text: str
    peak_mib: float


def play(cases: list[dict[str, Any]]) -> list[list[Found]]:
    """Train every case in turn on two ranks; case by case, what the ranks found."""
    cases = [{**case, "port": free_port()} for case in cases]
    arguments = [sys.executable, "-c", RANK, str(LAYERS), str(WIDTH), json.dumps(cases)]
    ranks = [
        subprocess.Popen(
            arguments,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "OPENBLAS_NUM_THREADS": "1",
                "MALLOC_MMAP_THRESHOLD_": str(2**20),  # else malloc keeps the addresses of large blocks for itself
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
    found = [[Found(**json.loads(line)) for line in out.splitlines() if line.startswith("{")] for out, _ in answers]
    assert [len(each) for each in found] == [len(cases)] * 2, answers
    return [list(pair) for pair in zip(*found, strict=True)]


def nvme(path: Path) -> dict[str, Any]:
    """All states of stage 3 in files."""
    place = {"device": "nvme", "nvme_path": str(path)}
    return {"stage": 3, "offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}


HOST = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def has_no_memory(ranks: list[Found]) -> bool:
    """Whether nobody trained, and somebody said that memory ran out; what others see then is that rank missing."""
    said = [rank.error == "MemoryError" or "can't allocate memory" in rank.text for rank in ranks]
    return any(said) and not any(rank.losses for rank in ranks)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's on private memory")
def test_what_does_not_fit_is_trained_when_it_is_sharded_and_what_then_does_not_fit_from_files(tmp_path: Path) -> None:
    plain, sharded, sharded_in_less, files = play(
        [
            {"limit_mib": ROOMY_MIB, "zero": {"stage": 0}},
            {"limit_mib": ROOMY_MIB, "zero": HOST},
            {"limit_mib": TIGHT_MIB, "zero": HOST},
            {"limit_mib": TIGHT_MIB, "zero": nvme(tmp_path)},
        ]
    )
    assert has_no_memory(plain), (ROOMY_MIB, plain)
    assert all(len(rank.losses) == 2 for rank in sharded), (ROOMY_MIB, sharded)
    assert has_no_memory(sharded_in_less), (TIGHT_MIB, sharded_in_less)
    assert [rank.losses for rank in files] == [rank.losses for rank in sharded], (TIGHT_MIB, files)
    assert list(tmp_path.iterdir()) == []
