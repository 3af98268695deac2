"""The kernels' threads: torch's OpenMP ones where torch is loaded, their own without it and in a forked child."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polyaccel.ops.native import native

SCRIPT = """
import os, signal, threading
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.ops.base import REDUCE
from polyaccel.ops.native import native_kernels
from polyaccel.core.types import DType, ReduceOp

def tasks():
    return len(os.listdir("/proc/self/task"))

def add(table, cpu, times):
    one, sum_ = cpu.allocate(1 << 20, DType.FLOAT32), cpu.allocate(1 << 20, DType.FLOAT32)
    one.fill(1)
    for _ in range(times):
        table[REDUCE](sum_, one, ReduceOp.SUM)
    assert (sum_.raw == times).all()

memory = {memory!r}
if memory == "torch":
    import torch
    torch.set_num_threads(3)
    torch.ones(1 << 20) + 1
cpu = CpuAccelerator(memory)
table = native_kernels(cpu.kernels(), lambda: 3)
before = tasks()
add(table, cpu, 5)
print("threads made:", tasks() - before)

child = os.fork()
if child == 0:
    code = 1
    try:
        signal.alarm(60)
        alone = tasks()
        memory == "torch" and torch.set_num_threads(1)
        add(table, cpu, 5)
        code = 0 if tasks() - alone >= 2 else 2
    finally:
        os._exit(code)
print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

callers = [threading.Thread(target=add, args=(table, cpu, 20)) for _ in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join(60)
print("callers left:", sum(caller.is_alive() for caller in callers))
"""


@pytest.mark.skipif(native().library is None, reason=native().reason)
@pytest.mark.parametrize(("memory", "made"), [("torch", 0), ("numpy", 2)])
def test_threads_are_shared_with_torch_and_made_where_it_is_not(memory: str, made: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(memory=memory)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.splitlines() == [f"threads made: {made}", "child: 0", "callers left: 0"], done.stderr
