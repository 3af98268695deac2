"""The training of `torch_training` under torchrun, whose agent holds the port of the rendezvous: comm backends that
bind it themselves die there.

`python -m polyaccel.testkit.training.torch_launched` is what torchrun starts.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from itertools import takewhile
from secrets import token_hex
from time import monotonic, sleep

from polyaccel import comm
from polyaccel.comm.default import default_communicator
from polyaccel.launch.process import end_with_parent
from polyaccel.launch.tree import ProcessTracker
from polyaccel.testkit.training.torch_training import check_torch_stages

_GRACE_S = 10.0
_MARK = "POLYACCEL_CHECK_ID"
"""The variable by which all that torchrun has started is found: its ranks lead their own sessions."""
_POLL_S = 0.02
_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ERROR = re.compile(
    r"(\[rank\d+\]: ?)?([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Timeout|Apart|Exit|Conflict|NotFound)\b"
)
"""How the last line of a traceback begins; torch puts the rank before it."""
_SHOWN = 20
"""The last lines of the ranks' output that an error shows."""


def check_under_torchrun(accelerator: str, backend: str, ranks: int, *, timeout_s: float) -> None:
    """Train at every stage on `ranks` ranks that torchrun starts, with the plugins of these names. AssertionError with
    the ranks' output where that fails, or takes longer than `timeout_s`."""
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    plugins = {"DS_ACCELERATOR": accelerator, "POLYACCEL_ACCELERATOR": accelerator, "POLYACCEL_COMM": backend}
    environ = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    mark = token_hex(16)
    job = subprocess.Popen(
        [*module, "-m", __name__],
        env=environ | {"OMP_NUM_THREADS": "1", "POLYACCEL_MATRIX_KERNELS": "off", _MARK: mark} | plugins,
        preexec_fn=end_with_parent(os.getpid(), signal.SIGTERM),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        said = _end(job)
        raise AssertionError(f"{ranks} ranks of torchrun were not done after {timeout_s:g} s: {_last(said)}") from None
    finally:
        kill_marked(mark)
    if job.returncode:
        raise AssertionError(f"{ranks} ranks of torchrun ended with exit code {job.returncode}: {_last(said)}")


def _end(job: subprocess.Popen[str]) -> str:
    """End the agent, which ends its ranks; returns their output."""
    job.terminate()
    try:
        return job.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        job.kill()
        return ""


def kill_marked(mark: str) -> None:
    """Kill what torchrun has started and left: a rank that waits inside a library heeds no other signal."""
    tree, until_s = ProcessTracker(mark, _MARK), monotonic() + _GRACE_S
    while tree.signal(signal.SIGKILL) and monotonic() < until_s:
        sleep(_POLL_S)


def _last(said: str) -> str:
    """The first error that a rank ended with, of ours if there is one, and what follows it of its text; else the last
    lines."""
    lines = [line for line in said.strip().splitlines() if "ChildFailedError" not in line] or ["no output"]
    starts = [index for index, line in enumerate(lines) if _ERROR.match(line)]
    starts = [index for index in starts if "polyaccel.errors." in lines[index]] or starts
    if not starts:
        return "\n".join(lines[-_SHOWN:])
    first, *after = lines[starts[0] : starts[0] + _SHOWN]
    rank = first.partition(" ")[0] if first.startswith("[") else ""
    further = re.compile(rf"{re.escape(rank)} +(?!File )\S")  # further in, and no frame: the hint among them
    return "\n".join([first, *takewhile(further.match, after)])


def main() -> None:
    """One rank. It ends with torchrun's agent: see [Note: Guard process]."""
    comm.init_distributed()
    check_torch_stages(default_communicator())
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
