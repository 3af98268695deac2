"""The MPI library of this process, started when this module is imported.

[Note: Device addresses in MPI]
Whether MPI takes addresses of a device's memory it says itself, in one of three ways, asked in this order: the info key
`mpi_memory_alloc_kinds` (MPI 4.1, section 12.4.3), the functions MPIX_Query_*_support of Open MPI and MPICH, and the
variables that switch it on in libraries that have neither.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from mpi4py import MPI

from polyaccel.errors import CommError

_KINDS = {"cuda": ("cuda", "rocm"), "xpu": ("level_zero",)}
"""Kinds of memory in MPI's names, by the type of a torch device; ROCm's devices are called cuda there."""
_QUERIES = {
    "cuda": ("MPIX_Query_cuda_support",),
    "rocm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
    "level_zero": ("MPIX_Query_ze_support",),
}
_SWITCHES = {
    "cuda": ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA"),
    "rocm": ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_ROCM"),
    "level_zero": ("I_MPI_OFFLOAD",),
}


def world() -> MPI.Intracomm:
    """All ranks of the job. Raises CommError after finalize."""
    if MPI.Is_finalized():
        raise CommError("MPI is finalized in this process", hint="connect before MPI.Finalize is called")
    if not MPI.Is_initialized():  # a script has set mpi4py not to
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI.COMM_WORLD


def name() -> str:
    """The library and its version, in one line."""
    return str(MPI.Get_library_version()).strip("\0").split("\n")[0].split(",")[0]


def allows_threads() -> bool:
    """Whether several threads may call MPI at a time."""
    level: Any = MPI.Query_thread()
    return bool(level == MPI.THREAD_MULTIPLE)


def takes_memory_of(device_type: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether buffers on devices of this type may be passed to MPI as they are. See [Note: Device addresses in MPI]."""
    environ = os.environ if environ is None else environ
    return any(
        _is_announced(kind)
        or any(_answers_yes(query) for query in _QUERIES[kind])
        or any(_is_on(environ, name) for name in _SWITCHES[kind])
        for kind in _KINDS.get(device_type, ())
    )


def _is_announced(kind: str) -> bool:
    announced = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    return kind in {one.strip().partition(":")[0] for one in announced.split(",")}


def _answers_yes(query: str) -> bool:
    """The answer of a function of the loaded library; False where it has none of this name."""
    function = getattr(ctypes.CDLL(MPI.__file__), query, None)
    return function is not None and bool(function())


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") not in ("", "0")
