"""What a user's settings of JAX do to an engine's calls: transfer guards, meshes, devices that nothing uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from logging import getLogger
from typing import ParamSpec, TypeVar

import jax

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError

log = getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def engine_call(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a call of users: what it moves between host and devices is asked for, whatever `jax.transfer_guard` is.

    The call raises PolyaccelError inside a mesh of several devices.
    """

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        _require_no_mesh(function.__name__)
        with jax.transfer_guard("allow"):
            return function(*args, **named)

    return call


def _require_no_mesh(name: str) -> None:
    """Raise PolyaccelError inside `jax.set_mesh`, under which JAX would put the engine's arrays on other devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        raise PolyaccelError(
            f"{name} was called inside jax.set_mesh of {mesh.size} devices, axes {dict(mesh.shape)}",
            hint='leave the mesh before the call; several devices of a process train with "jax": {"execution": '
            '"native"}, which makes the mesh itself',
            value=dict(mesh.shape),
        )


def warn_of_idle_devices(communicator: Communicator) -> None:
    """Log how many devices of this host no rank computes on: in views mode a rank computes on one."""
    devices, ranks = jax.local_device_count(), communicator.host_topology.local_size
    if devices > ranks and communicator.rank == 0:
        log.warning(
            "JAX has %d devices here and the job %d ranks: views mode computes on one device a rank, and the others "
            'stay idle. Start a rank for each device, or use "jax": {"execution": "native"}, which uses all of them',
            *(devices, ranks),
        )
