"""NCCL's variables of every node in the log of rank 0."""

from __future__ import annotations

import logging

import pytest
from polyaccel_deepspeed.initialize import log_nccl_variables

from polyaccel import comm
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads


def test_rank_0_logs_what_each_node_has(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def body(communicator: Communicator) -> None:
        log_nccl_variables({"NCCL_DEBUG": f"of {communicator.rank}", "OTHER": "1"})

    monkeypatch.setattr(comm, "get_local_rank", lambda: comm.get_rank() % 2)  # two nodes of two ranks
    logger = logging.getLogger("polyaccel.deepspeed")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("polyaccel"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="polyaccel.deepspeed"):
        run_threads(4, body)
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert lines == ["NCCL_DEBUG=of 0", "NCCL_DEBUG=of 2"]
