"""A job for mpirun whose ranks meet a fault, named by the first argument; the second is the time limit in seconds, once
all have joined."""

from __future__ import annotations

import os
import signal
import sys
import threading

from polyaccel import comm
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.detect import set_accelerator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.types import DType

HOST = CpuAccelerator("numpy")  # starts sooner than torch
NEVER_S = 500.0
"""Of a collective: beyond the test's own limit, so that what ends the job is not that."""


def main(fault: str, timeout_s: float) -> None:
    set_accelerator(HOST)
    comm.init_distributed("mpi", timeout=NEVER_S, verbose=False)
    ranks = comm.default_communicator()
    assert isinstance(ranks, RecordingCommunicator)
    buffer = HOST.allocate(1000, DType.FLOAT32)
    ranks.all_reduce(buffer)
    ranks.inner.timeout_s = timeout_s
    print(f"rank {ranks.rank} joined", flush=True)
    if ranks.rank == 1:
        fail(fault, ranks)
    elif fault == "unfinished":
        ranks.all_reduce(buffer, async_op=True)
        print(f"rank {ranks.rank} left something under way", flush=True)
    elif fault != "nothing":
        ranks.all_reduce(buffer)
        if fault == "thread":
            ranks.all_reduce(buffer)
        print(f"rank {ranks.rank} went on", flush=True)


def fail(fault: str, ranks: comm.base.Communicator) -> None:
    if fault == "raise":
        raise ValueError("of rank 1")
    if fault == "interrupt":
        signal.raise_signal(signal.SIGINT)  # to this thread, whichever others there are
    if fault == "thread":
        thread = threading.Thread(target=collective_and_raise, args=(ranks,))
        thread.start()
        thread.join()
        ranks.barrier()
    if fault == "other thread":
        thread = threading.Thread(target=int, args=("of a thread that is no rank",))
        thread.start()
        thread.join()
        ranks.all_reduce(HOST.allocate(1000, DType.FLOAT32))
        print("rank 1 went on", flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("stop", "unfinished"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(0)


def collective_and_raise(ranks: comm.base.Communicator) -> None:
    ranks.all_reduce(HOST.allocate(1000, DType.FLOAT32))
    raise ValueError("of rank 1's thread")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
