"""The backend `mpi` where there are no ranks of MPI: it starts none, and says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.mpi import backend as mpi
from polyaccel.comm.backends.mpi.backend import MpiBackend
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.launchers.request import Detection
from polyaccel.core.install_line import install_line
from polyaccel.errors import CommError

PAIR = Rendezvous(0, 2, 0, 2, "127.0.0.1", 29500, "this test")


def test_without_mpi4py_the_probe_says_so_and_connecting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    assert MpiBackend.probe().reason == "mpi4py is not installed"
    assert not MpiBackend.probe().usable
    with pytest.raises(CommError) as caught:
        MpiBackend().connect(PAIR, CpuAccelerator(), timeout_s=1.0)
    assert caught.value.value == "mpi"
    assert "mpi4py" in str(caught.value)
    assert install_line("mpi") in caught.value.hint


def test_ranks_that_no_mpirun_started_are_refused_before_mpi_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    monkeypatch.setattr(mpi, "may_start", lambda environ: False)
    monkeypatch.setattr(mpi, "look", lambda request: Detection(False, "nothing is set"))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(CommError) as caught:
        MpiBackend().connect(PAIR, CpuAccelerator(), timeout_s=1.0)
    assert caught.value.value == "mpi"
    assert "mpirun" in caught.value.hint
    assert "mpi4py.MPI" not in sys.modules


def test_one_process_needs_no_mpi() -> None:
    script = """
import sys
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.backends.mpi.backend import MpiBackend
alone = MpiBackend().connect(Rendezvous(0, 1, 0, 1, None, None, "x"), CpuAccelerator("numpy"), timeout_s=1.0)
assert (alone.backend, alone.world_size) == ("mpi", 1)
assert not {"mpi4py", "torch"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
