"""The environment variables of ranks: those of torchrun, and those that DeepSpeed's launcher adds."""

from __future__ import annotations

from collections.abc import Mapping

from polyaccel.errors import LaunchError

JOB_ID = "POLYACCEL_JOB_ID"
"""Says which job a process belongs to. Inherited by everything that a rank starts."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""`GLIBC_TUNABLES` that has malloc ask for huge pages (glibc 2.35 and later; others ignore it).

A process cannot say so once it runs. XLA on the CPU maps its temporary memory anew in every step: in pages of 4 KiB
that is 22,800 page faults, a tenth of the step, for a model of 29 M parameters."""


def check_not_nested(environment: Mapping[str, str]) -> None:
    """Raise LaunchError when `environment` is that of a rank: another launcher is there already."""
    found = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
    if found:
        shown = " ".join(f"{name}={value}" for name, value in found.items())
        ours = f"job {environment[JOB_ID]} of polyaccel run" if JOB_ID in environment else "another launcher"
        raise LaunchError(
            f"{shown} is set: this process is a rank of {ours} already, and would start a whole job in each rank",
            cure=f"let that launcher start the script itself, or unset {' and '.join(found)} if they are left over",
            value=found,
        )


def rank_environment(
    inherited: Mapping[str, str],
    *,
    job_id: str,
    local_rank: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    threads: int,
) -> dict[str, str]:
    """The whole environment of a rank of a job on one host. `threads` is for OpenMP unless the user chose a number."""
    ranks = {
        "RANK": local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "LOCAL_SIZE": local_world_size,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
    }
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last words of a rank that is killed are worth more than faster prints
        "GLIBC_TUNABLES": HUGE_PAGES,
    }
    return {**defaults, **inherited, **{name: str(value) for name, value in ranks.items()}, JOB_ID: job_id}
