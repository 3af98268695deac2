"""Ranks as threads keep the contract of communicators, on torch's memory and on numpy's, recorded and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.ranks.threads import run_threads


class TestLocal(CommContract):
    world_sizes = (1, 2, 3, 4, 5)

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return run_threads(world_size, body, *args)


class TestLocalNumpy(CommContract):
    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return run_threads(world_size, body, *args, accelerator=CpuAccelerator("numpy"))


class TestLocalRecordedInDebugMode(CommContract):
    world_sizes = (3,)

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        def recorded(comm: Communicator, *args: Any) -> Any:
            return body(RecordingCommunicator(comm, debug=True, watch_s=None), *args)

        return run_threads(world_size, recorded, *args)
