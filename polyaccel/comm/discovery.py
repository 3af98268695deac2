"""Who this process is among how many: the only reader of rank variables.

A table of sources is asked in order; the first that applies answers. Explicit arguments come first, then the variables
that torchrun and `polyaccel run` set; then cloud services, whose jobs are MPI's with their own meeting place; then
launchers of MPI, which may have been started by Slurm's; then tasks of Slurm; then a process group that the script made
itself. Else the world is one process, for which nothing is looked up: no host name, no MPI, no network.

[Note: Leftover or nested variables]
RANK and WORLD_SIZE may stand in the environment because torchrun or `polyaccel run` was started by mpirun or srun, once
a host: they and the outer launcher's numbers differ, rightly. Or a user exported them in a shell before mpirun: then
every rank would train alone as rank 0. The launchers of our field leave a mark; without one, both must agree.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from time import monotonic
from typing import NamedTuple

from polyaccel.comm import host_address
from polyaccel.comm.base import DEFAULT_TIMEOUT_S, Rendezvous
from polyaccel.comm.launchers import cloud, mpi, slurm
from polyaccel.comm.launchers.request import (
    DEFAULT_PORT,
    LOOPBACK,
    MEETING_VARIABLES,
    RANK_VARIABLES,
    VARIABLES,
    Detection,
    LaunchedRank,
    Request,
    check_agreement,
    check_rank,
    integer,
    meeting_port,
    shown,
)
from polyaccel.comm.mpi import rendezvous
from polyaccel.comm.torch_group import initialized_world
from polyaccel.core.install_line import install_line
from polyaccel.errors import CommError

_log = logging.getLogger(__name__)

_TORCHRUN = "torchrun variables"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where gloo reads which network interface to use."""
_MARKS = ("TORCHELASTIC_RUN_ID", "POLYACCEL_JOB_ID", "CROSS_SIZE")
"""Set by torchrun, `polyaccel run` and DeepSpeed's launcher for each of their ranks."""
_PASSED_ON: Mapping[str, Mapping[str, str]] = {
    cloud.AZURE: cloud.AZURE_EXTRAS,
    **{name: {} for name in (cloud.SAGEMAKER, *mpi.NAMES, slurm.NAME)},
}
"""Launchers with their own variables, and what else their processes need."""


class Source(NamedTuple):
    """A row of the table: the source's name, what it sees, and how it is read."""

    name: str
    look: Callable[[Request], Detection]
    read: Callable[[Request], Rendezvous]


class DiscoveryRow(NamedTuple):
    """A row of the table as `polyaccel doctor` shows it."""

    source: str
    matched: bool
    text: str
    problem: str = ""
    """Why `discover()` fails with what this source sees."""


def discover(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
    ask_mpi: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Rendezvous:
    """The rendezvous of this process. `port` is used where the environment names none.

    Where a launcher of MPI is seen and the environment is incomplete, mpi4py is imported, unless `ask_mpi` is False;
    the call is then collective. Raises CommError when the source that applies is incomplete or contradicts itself or
    another one, and the message shows all of it; CommTimeout when ranks do not answer within `timeout_s`.
    """
    variables = os.environ if environ is None else environ
    began_s = monotonic()
    request = Request(variables, rank, world_size, init_method, port, initialized_world(), ask_mpi, timeout_s)
    for source in SOURCES:
        if source.look(request).applies:
            return replace(source.read(request), began_s=began_s)
    if integer(request.environ, "SLURM_NTASKS", 1) > 1:
        _log.warning("one process, alone: %s; start ranks with srun", slurm.look(request).text)
    return Rendezvous(0, 1, 0, 1, None, None, "no launcher")


def list_sources(environ: Mapping[str, str] | None = None) -> Iterator[DiscoveryRow]:
    """Return a row for each source: its variables, whether `discover()` reads it, and its error. Sends nothing."""
    request = Request(os.environ if environ is None else environ)
    matched = False
    for source in SOURCES[1:]:
        applies, text = source.look(request)
        problem = _problem(source, request) if applies and not matched else ""
        yield DiscoveryRow(source.name, applies and not matched, text, problem)
        matched = matched or applies


def export_torchrun_env(rendezvous: Rendezvous, environ: MutableMapping[str, str]) -> None:
    """Export other launchers' variables as torchrun's, and gloo's interface where its choice is wrong."""
    if rendezvous.world_size == 1:
        return
    values: dict[str, object] = {}
    if rendezvous.source in _PASSED_ON:
        numbers = (rendezvous.rank, rendezvous.world_size, rendezvous.local_rank, rendezvous.local_world_size)
        values |= zip(VARIABLES, (*numbers, rendezvous.address, rendezvous.port), strict=True)
        values |= _PASSED_ON[rendezvous.source]
    if rendezvous.address is not None and GLOO_INTERFACE not in environ:
        values[GLOO_INTERFACE] = _gloo_interface(rendezvous, environ)
    for name, value in values.items():
        if value is not None:
            environ.setdefault(name, str(value))


def is_torchrun_like(rendezvous: Rendezvous) -> bool:
    """Whether the ranks are those of torchrun or `polyaccel run`, all of them, by the variables."""
    return rendezvous.source == _TORCHRUN and rendezvous.world_size > 1


def local_rank(*, default: int) -> int:
    """This rank's number on its host, as the launcher set it; `default` where it set none."""
    return integer(os.environ, "LOCAL_RANK", default)


def meeting_address() -> str:
    """Where rank 0's host is reached; this host if unset."""
    return os.environ.get("MASTER_ADDR", LOOPBACK)


def _problem(source: Source, request: Request) -> str:
    """Why reading `source` would fail, as far as that can be found without MPI."""
    try:
        if source.read is _from_mpi:
            mpi.checked_rank(request)
        else:
            source.read(request)
    except CommError as error:
        return error.message
    return ""


def _look_at_arguments(request: Request) -> Detection:
    text = f"rank={request.rank}, world_size={request.world_size}"
    return Detection(request.rank is not None or request.world_size is not None, text)


def _from_arguments(request: Request) -> Rendezvous:
    given = f"rank={request.rank}, world_size={request.world_size}, init_method={request.init_method!r}"
    if request.rank is None or request.world_size is None:
        raise CommError(
            f"only part of the rendezvous was given: {given}",
            hint="give both rank and world_size, or neither",
            value=(request.rank, request.world_size),
        )
    check_rank(request.rank, request.world_size, given)
    env = request.environ
    local_rank = integer(env, "LOCAL_RANK", request.rank)
    local_world_size = integer(env, "LOCAL_WORLD_SIZE", request.world_size)
    launched = LaunchedRank("arguments", request.rank, request.world_size, local_rank, local_world_size, given)
    port = meeting_port(env, request.port or DEFAULT_PORT)
    return launched.meeting(env.get("MASTER_ADDR", LOOPBACK), port, request.init_method)


def _look_at_torchrun(request: Request) -> Detection:
    env = request.environ
    return Detection("RANK" in env and "WORLD_SIZE" in env, shown(env, RANK_VARIABLES))


def _from_torchrun(request: Request) -> Rendezvous:
    env = request.environ
    found = shown(env)
    rank, world_size = integer(env, "RANK", 0), integer(env, "WORLD_SIZE", 1)
    check_rank(rank, world_size, found)
    if not any(mark in env for mark in _MARKS):  # [Note: Leftover or nested variables]
        for outer in (mpi.find_rank(request), slurm.find_rank(request)):
            if outer is not None:
                check_agreement(env, outer)
                break
    if world_size == 1:
        return Rendezvous(0, 1, integer(env, "LOCAL_RANK", 0), 1, None, None, _TORCHRUN)
    # DeepSpeed's launcher and ours also set LOCAL_SIZE; without either, all ranks are on this host.
    local_world_size = integer(env, "LOCAL_WORLD_SIZE", integer(env, "LOCAL_SIZE", world_size))
    local_rank = integer(env, "LOCAL_RANK", rank % max(1, local_world_size))
    check_rank(local_rank, local_world_size, found, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if request.init_method is None and not env.get("MASTER_ADDR"):
        raise CommError(
            f"{world_size} ranks, but MASTER_ADDR is not set: {found}",
            hint="set MASTER_ADDR to the address of rank 0's host (127.0.0.1 for one host)",
            value=None,
        )
    # torchrun's agent already listens on the port; only torch's own `env://` handles that.
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    launched = LaunchedRank(_TORCHRUN, rank, world_size, local_rank, local_world_size, found)
    port = meeting_port(env, request.port or DEFAULT_PORT)
    return launched.meeting(env.get("MASTER_ADDR"), port, request.init_method or ("env://" if by_agent else None))


def _from_mpi(request: Request) -> Rendezvous:
    env = request.environ
    here = mpi.checked_rank(request)
    if here.world_size == 1:
        return here.meeting(None, None, request.init_method)
    meets_otherwise = request.init_method is not None or request.joined is not None
    problem = rendezvous.why_not() if request.ask_mpi else "auto_mpi_discovery=False"
    if not problem and not (meets_otherwise and here.is_complete):
        return rendezvous.mpi_rendezvous(here, request)
    if not here.is_complete:
        raise CommError(
            f"{here.launcher} started this process, but does not set how many ranks there are, here and in all "
            f"({here.shown}), and MPI cannot be asked: {problem}",
            hint=f"{install_line('mpi')}, or set torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK",
            value=here.shown,
        )
    if not (meets_otherwise or request.has_meeting):
        raise CommError(
            f"{here.launcher} started {here.world_size} ranks, but they cannot agree on a rendezvous: {problem}; "
            f"{shown(env, MEETING_VARIABLES)}",
            hint=f"{install_line('mpi')} (mpi4py of the same MPI as mpirun), "
            "or set MASTER_ADDR and MASTER_PORT for all ranks",
            value=problem,
        )
    return here.meeting(env.get("MASTER_ADDR"), meeting_port(env, request.port or DEFAULT_PORT), request.init_method)


def _look_at_process_group(request: Request) -> Detection:
    world = request.joined
    return Detection(world is not None, f"initialised as rank {world[0]} of {world[1]}" if world else "not initialised")


def _from_process_group(request: Request) -> Rendezvous:
    rank, world_size = request.joined or (0, 1)
    local_rank = integer(request.environ, "LOCAL_RANK", rank)
    local_world_size = integer(request.environ, "LOCAL_WORLD_SIZE", world_size)
    return Rendezvous(rank, world_size, local_rank, local_world_size, None, None, "torch.distributed, initialised")


def _look_at_the_rest(request: Request) -> Detection:
    found = [name for name in RANK_VARIABLES if name in request.environ]
    return Detection(bool(found), f"only {', '.join(found)} set" if found else "none")


def _refuse_the_rest(request: Request) -> Rendezvous:
    env = request.environ
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    raise CommError(
        f"{' and '.join(missing)} not set, but other rank variables are: {shown(env)}",
        hint="start the ranks with `polyaccel run`, torchrun, mpirun or srun, or unset the others",
        value=missing,
    )


SOURCES = (
    Source("arguments", _look_at_arguments, _from_arguments),
    Source(_TORCHRUN, _look_at_torchrun, _from_torchrun),
    Source(cloud.AZURE, cloud.look_azure, cloud.read_azure),
    Source(cloud.SAGEMAKER, cloud.look_sagemaker, cloud.read_sagemaker),
    Source("MPI", mpi.look, _from_mpi),
    Source(slurm.NAME, slurm.look, slurm.read),
    Source("torch.distributed", _look_at_process_group, _from_process_group),
    Source("incomplete variables", _look_at_the_rest, _refuse_the_rest),
)


def _gloo_interface(rendezvous: Rendezvous, environ: Mapping[str, str]) -> str | None:
    """Return the interface to set for gloo, which takes the one that this host's name leads to.

    Ranks of one host need no other host to reach them: the loopback, unless other hosts are configured. Between hosts
    it is the one on the way to rank 0's, whatever the name leads to: often the loopback, or a container's bridge.
    """
    address = rendezvous.address or LOOPBACK
    if rendezvous.local_world_size < rendezvous.world_size:
        return host_address.interface_between_hosts(address)
    is_said = "LOCAL_WORLD_SIZE" in environ or host_address.means_this_host(address)
    return host_address.loopback_interface() if is_said else None
