"""A stage that dies or stalls is named by the others, with the operation and the micro-batch at which it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from failing_ranks import PATIENCE_S, WATCH_S
from pipeline_models import batches, pipeline_config, plain_layers
from torch import Tensor, nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator, set_default_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import CommError, CommTimeout, LaunchError
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.torch.pipeline import PipelineModule

STALL_S = 10.0
"""Limit of collectives where a stage stalls, several looks of its watchdog."""


class Failing(nn.Module):
    """Dies at its third call, or stops there until the others have said what they see."""

    def __init__(self, said: Path, *, dies: bool) -> None:
        super().__init__()
        self.said, self.dies, self.calls = said, dies, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and self.dies:
            board = default_communicator().board()
            while board is not None and "micro-batch 2" not in board.read(2).get(1, ""):
                sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        while self.calls == 3 and not self.said.exists():
            sleep(0.01)
        return hidden


def one_stage_fails(comm: Communicator, said: Path, dies: bool) -> None:
    set_default_communicator(RecordingCommunicator(comm, watch_s=WATCH_S))
    layers = [*plain_layers(), Failing(said, dies=dies)]
    model = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine: Any
    engine, *_ = polyaccel.initialize(model=model, config=pipeline_config(1))
    try:
        engine.train_batch(batches(0, 0))
    except CommError as error:
        part = said.with_suffix(f".{comm.rank}")
        part.write_text(f"{type(error).__name__}: {error}")
        part.rename(said)
        if comm.rank == 0:
            raise
    finally:
        set_default_communicator(None)


def test_a_stage_that_dies_is_named(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with (
        RankPool(2, comm_timeout_s=PATIENCE_S, grace_s=PATIENCE_S) as pool,
        pytest.raises(LaunchError) as caught,
    ):
        pool.run(one_stage_fails, said, True)
    assert caught.value.value == (1, -9)
    assert "rank 1" in str(caught.value)
    text = said.read_text()
    assert text.startswith("CommError: stage 0 of 2 was at gradient of micro-batch 2 from chunk 1")
    assert "stage 1 (rank 1) did not take part" in text
    assert "output of micro-batch 3 from chunk 0, begun before FORWARD of micro-batch 2 in chunk 1'" in text


def test_a_stage_that_stalls_is_named(tmp_path: Path) -> None:
    with RankPool(2, comm_timeout_s=STALL_S, grace_s=PATIENCE_S) as pool, pytest.raises(CommTimeout) as caught:
        pool.run(one_stage_fails, tmp_path / "said", False)
    text = str(caught.value)
    assert text.startswith("stage 0 of 2 was at gradient of micro-batch 2 from chunk 1")
    assert "stage 1 (rank 1) did not take part" in text
    assert "output of micro-batch 3 from chunk 0, begun before FORWARD of micro-batch 2 in chunk 1'" in text
