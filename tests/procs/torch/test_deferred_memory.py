"""How much memory a process needs to build a model inside zero.Init and to place it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.job.ports import free_port

TIMEOUT_S = 100
LAYERS, WIDTH = 24, 2048
MODEL_MIB = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 2**20
LAYER_MIB = MODEL_MIB / LAYERS
SLACK_MIB = 50
"""Code that is loaded on first use, and what malloc keeps."""

BUILD = """
import json, sys
import torch
import torch.utils.flop_counter  # it imports Triton where a wheel for CUDA brings it: 115 MiB of code
from torch import nn
import polyaccel

stage, make = int(sys.argv[1]), sys.argv[2]
layers, width = int(sys.argv[3]), int(sys.argv[4])


class Drawn(nn.Module):  # parameters that come from calls which allocate themselves
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.zeros(width))


def mib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024


polyaccel.init_distributed()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again here
start = mib("VmRSS")
with polyaccel.zero.Init():
    model = nn.Sequential(*((nn.Linear(width, width) if make == "linear" else Drawn()) for _ in range(layers)))
built = mib("VmHWM") - start
zero = {"stage": stage, "reduce_bucket_size": width * width + width}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
polyaccel.initialize(model=model, config=config)
print(json.dumps([built, mib("VmHWM") - start, mib("VmRSS") - start]))
"""


def measure(stage: int, make: str, world: int) -> list[list[float]]:
    """For each rank: MiB above the start at the peak of building, at the peak of all, and in the end."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(stage), make, str(LAYERS), str(WIDTH)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "POLYACCEL_COMM": "gloo",  # over shm parameters exist once a host, and each rank's pages count them all
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        answers = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), answers
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize(("stage", "make", "world"), [(2, "linear", 1), (3, "drawn", 2)])
def test_building_a_hundred_million_parameters_takes_the_shards_and_two_layers(stage, make, world):
    own = MODEL_MIB / world
    for built, peak, now in measure(stage, make, world):
        assert built < 2 * LAYER_MIB + SLACK_MIB
        assert own < peak < own + 2 * LAYER_MIB + SLACK_MIB
        assert now <= peak
