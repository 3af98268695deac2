"""What the tests of the backend `mpi` share: where there is an MPI to run them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from polyaccel.testkit.ranks.mpi import find_mpirun

needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or find_mpirun() is None, reason="needs mpi4py and an mpirun (make test-mpi)"
)
