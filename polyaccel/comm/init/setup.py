"""Start and end of the default process group: `init_distributed` and `destroy_process_group`."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import VARIABLES as ACCELERATOR_VARIABLES
from polyaccel.accelerators.detect import choose_accelerator, get_accelerator, set_accelerator
from polyaccel.comm.base import DEFAULT_TIMEOUT_S, Communicator, Rendezvous
from polyaccel.comm.default import (
    default_communicator,
    is_initialized,
    own_thread_communicator,
    set_default_communicator,
    set_thread_communicator,
)
from polyaccel.comm.discovery import discover, export_torchrun_env, is_torchrun_like
from polyaccel.comm.flight_recorder.dump import FOLDER_VARIABLE, FlightRecorderDumper
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.init.backends import comm_backend, default_backend
from polyaccel.comm.init.hosts import find_hosts, make_hierarchical, name_interfaces
from polyaccel.comm.secret import negotiate_job_secret
from polyaccel.comm.torch_group import initialized_world
from polyaccel.errors import CommError, HostsDifferError
from polyaccel.job.process_guard import end_with_torchrun
from polyaccel.job.readiness import JOINED, WAITS, enable_stack_dump_signal, report_to_launcher
from polyaccel.registry import PROBE_LIMIT_S

_log = logging.getLogger(__name__)

BACKEND_VARIABLE = "POLYACCEL_COMM"
DEBUG_VARIABLE = "POLYACCEL_COMM_DEBUG"
_MOST_TIMEOUT_S = 1e8  # three years; libraries count nanoseconds in 64 bits


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join all ranks in the default process group; does nothing if it exists. DeepSpeed's arguments and meaning.

    Collective: every rank calls it. A single process connects to no other.

    Args:
        dist_backend: Name of a comm plugin, or of a backend that a package registers with torch. None takes
            POLYACCEL_COMM, else the config's, else what `connect` chooses.
        auto_mpi_discovery: False finds the ranks of mpirun without mpi4py, which only the backend `mpi` then imports.
            They then need MASTER_ADDR and MASTER_PORT.
        distributed_port: Port of the rendezvous if MASTER_PORT is not set. None is a free port that rank 0 sends under
            mpirun, one that follows from the job under srun, and else the launcher's or 29500.
        verbose: Log the backend and the number of ranks on rank 0.
        timeout: Limit of every collective and of joining: a timedelta, or seconds. None takes the config's, else 600 s.
        init_method: URL of torch's form (`tcp://...`, `file://...`) that replaces address and port.
        dist_init_required: False requires that torch's process group exists already. True and None create a group if
            there is none.
        config: Mapping or config object. Its `comm` (backend, timeout_s, debug, dump_dir) counts less than arguments
            and variables; its `accelerator` chooses the device, unless a variable does.
        rank: This process's rank. Below 0 it is discovered (`comm.discovery`); under a launcher other than torchrun,
            torchrun's variables are then set to what was found.
        world_size: Number of ranks. Below 0 it is discovered.

    Raises:
        CommError: The ranks cannot join, the timeout is out of range, or `dist_init_required` is False and there is no
            group.
        CommTimeout: Some ranks do not come in time; `missing_ranks` names them.

    Example:
        ```python
        polyaccel.init_distributed()
        ones = torch.ones(4)  # on the accelerator's device
        polyaccel.comm.all_reduce(ones)
        polyaccel.comm.destroy_process_group()
        ```
    """
    if is_initialized():
        return
    section = _value(config, "comm")
    name = dist_backend or os.environ.get(BACKEND_VARIABLE) or _value(section, "backend")
    limit = timeout if timeout is not None else _value(section, "timeout_s")
    timeout_s = _seconds(limit)
    rendezvous = discover(
        rank=rank if rank >= 0 else None,
        world_size=world_size if world_size >= 0 else None,
        init_method=init_method,
        port=distributed_port,
        ask_mpi=auto_mpi_discovery,
        timeout_s=timeout_s,
    )
    end_with_torchrun(os.environ)
    export_torchrun_env(rendezvous, os.environ)
    if dist_init_required is False and initialized_world() is None:
        raise CommError(
            "dist_init_required=False, but there is no process group",
            hint="call torch.distributed.init_process_group first, or leave dist_init_required out",
            value=dist_init_required,
        )
    debug = bool(_value(section, "debug")) or os.environ.get(DEBUG_VARIABLE) == "1"
    wanted = _value(config, "accelerator")
    probe_s = min(PROBE_LIMIT_S, timeout_s / 2)
    is_named = any(os.environ.get(variable, "").strip() for variable in ACCELERATOR_VARIABLES)
    if wanted is not None and not is_named:
        set_accelerator(choose_accelerator(wanted, limit_s=probe_s))
    accelerator = get_accelerator(limit_s=probe_s)
    if accelerator.device_count() > rendezvous.local_rank:
        accelerator.set_device(rendezvous.local_rank)
    is_launched = is_torchrun_like(rendezvous)
    if is_launched:
        enable_stack_dump_signal()
        report_to_launcher(os.environ, rendezvous.rank, WAITS)
    communicator = connect(rendezvous, accelerator, backend=name, timeout_s=timeout_s, debug=debug)
    if is_launched:
        report_to_launcher(os.environ, rendezvous.rank, JOINED)
    if communicator.world_size > 1:
        folder = _value(section, "dump_dir") or os.environ.get(FOLDER_VARIABLE)
        dumper = FlightRecorderDumper(
            communicator.recorder,
            communicator.rank,
            communicator.world_size,
            Path(folder) if folder else None,
            communicator.leave,
        )
        dumper.start()
        communicator.at_close.append(dumper.stop)
    set_default_communicator(communicator)
    if verbose and communicator.rank == 0:
        _log.info(
            "process group of %d ranks over %s (%s)", communicator.world_size, communicator.backend, rendezvous.source
        )


def connect(
    rendezvous: Rendezvous,
    accelerator: Accelerator,
    *,
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    debug: bool = False,
) -> RecordingCommunicator:
    """Join all ranks of `rendezvous` in a recorded communicator. Collective.

    Args:
        rendezvous: This process's rank, and the address where the ranks join.
        accelerator: Accelerator whose buffers the communicator moves.
        backend: Name of a comm plugin. None chooses `local` for one process, `shm` if ranks on one host would use gloo
            and can do without it, else the accelerator's default. Gloo over hosts with equally many ranks, two or more
            each, is then combined with `shm` inside them.
        timeout_s: Seconds that joining and every later collective may take.
        debug: Check that all ranks call the same collective, at each call.

    Returns:
        Communicator over all ranks, which the caller closes.

    Raises:
        CommError: The ranks cannot join by this backend.
        CommTimeout: Some ranks do not come in time; `missing_ranks` names them.
    """
    name = backend or default_backend(rendezvous, accelerator)

    def join(name: str) -> Communicator:
        return comm_backend(name)().connect(rendezvous, accelerator, timeout_s=timeout_s)

    try:
        communicator = join(name)
    except HostsDifferError as error:
        own = accelerator.capabilities().default_comm
        if backend is not None or own in (name, "local"):
            raise
        # LOCAL_WORLD_SIZE is not set, so all ranks were taken to be on one host.
        _log.info("%s; using %s", error.message, own)
        communicator = join(own)
    topology = communicator.host_topology
    if communicator.world_size > 1:
        topology = find_hosts(communicator, rendezvous.local_rank)
    if communicator.backend == "gloo" and topology.num_hosts > 1:
        name_interfaces(communicator, topology)
    if backend is None and communicator.backend == "gloo" and accelerator.works_on_host_memory:
        communicator = make_hierarchical(communicator, topology)
    negotiate_job_secret(communicator)
    communicator.host_topology = topology
    return RecordingCommunicator(communicator, debug=debug)


def destroy_process_group(group: Communicator | None = None) -> None:
    """Close a group. After the default group is closed, `init_distributed` may be called again.

    Args:
        group: Group to close. None closes the default group, if there is one.
    """
    if group is not None:
        group.close()
        return
    if not is_initialized():
        return
    default_communicator().close()
    if own_thread_communicator() is not None:
        set_thread_communicator(None)
    else:
        set_default_communicator(None)


def _seconds(limit: timedelta | float | None) -> float:
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    if seconds is None:
        return DEFAULT_TIMEOUT_S
    if not 0 < seconds <= _MOST_TIMEOUT_S:
        raise CommError(
            f"a timeout of {seconds:g} s",
            hint=f"give a number of seconds above 0, at most {_MOST_TIMEOUT_S:g}",
            value=seconds,
        )
    return float(seconds)


def _value(section: Any, key: str) -> Any:
    """`key` of a mapping or a config object; None if it has none."""
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)
