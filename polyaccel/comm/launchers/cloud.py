"""Ranks that a cloud's training service started, by Open MPI and with its own variables for the rendezvous.

Variables and ports are those that DeepSpeed reads on AzureML and SageMaker. MPI is not asked.
"""

from __future__ import annotations

import json
from dataclasses import replace

from polyaccel.comm.base import Rendezvous
from polyaccel.comm.launchers.mpi import OPEN_MPI, read_rank
from polyaccel.comm.launchers.request import (
    DEFAULT_PORT,
    LOOPBACK,
    Detection,
    LaunchedRank,
    Request,
    check_agreement,
    meeting_port,
    shown,
)
from polyaccel.errors import CommError

AZURE = "AzureML"
AZURE_EXTRAS = {"NCCL_SOCKET_IFNAME": "^docker0,lo"}
"""The docker bridge has the same address on every node."""
SAGEMAKER = "SageMaker"
_AZURE_PORT = 6105
_AZURE_PORT_ONE_NODE = 54965


def look_azure(request: Request) -> Detection:
    env = request.environ
    if "DLTS_JOB_ID" in env:
        return Detection(False, f"{shown(env, ['DLTS_JOB_ID'])}: not AzureML's own")
    return _look(request, "AZUREML_EXPERIMENT_ID")


def read_azure(request: Request) -> Rendezvous:
    here = replace(read_rank(OPEN_MPI, request.environ), launcher=AZURE)
    one_node = here.local_world_size == here.world_size
    variable = "AZ_BATCHAI_MPI_MASTER_NODE" if one_node else "AZ_BATCH_MASTER_NODE"
    address = request.environ.get(variable, "").partition(":")[0]  # its port is Batch's own
    return _meeting(request, here, address, variable, _AZURE_PORT_ONE_NODE if one_node else _AZURE_PORT)


def look_sagemaker(request: Request) -> Detection:
    return _look(request, "SM_TRAINING_ENV")


def read_sagemaker(request: Request) -> Rendezvous:
    here = replace(read_rank(OPEN_MPI, request.environ), launcher=SAGEMAKER)
    try:
        address = str(json.loads(request.environ["SM_TRAINING_ENV"])["master_hostname"])
    except (ValueError, KeyError, TypeError):
        address = ""
    return _meeting(request, here, address, "SM_TRAINING_ENV", DEFAULT_PORT)


def _look(request: Request, variable: str) -> Detection:
    env = request.environ
    if variable not in env:
        return Detection(False, f"{variable} unset")
    # A service's job of one process has no ranks.
    return Detection(OPEN_MPI.rank in env, f"{variable} set, {shown(env, OPEN_MPI.variables)}")


def _meeting(request: Request, here: LaunchedRank, address: str, variable: str, port: int) -> Rendezvous:
    env = request.environ
    check_agreement(env, here)
    if here.world_size == here.local_world_size:
        address = address or LOOPBACK
    address = env.get("MASTER_ADDR") or address
    if not address and request.init_method is None:
        raise CommError(
            f"{here.launcher} does not set {variable}, which names rank 0's host",
            hint="set MASTER_ADDR to rank 0's host",
            value=env.get(variable),
        )
    return here.meeting(address or None, meeting_port(env, request.port or port), request.init_method)
