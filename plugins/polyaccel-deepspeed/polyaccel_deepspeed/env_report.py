"""`deepspeed.env_report` and the command `ds_report`: what `polyaccel doctor` finds, then DeepSpeed's own lines."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence

from polyaccel_deepspeed.version import __version__, git_branch, git_hash

GREEN, RED, YELLOW, END = "\033[92m", "\033[91m", "\033[93m", "\033[0m"
SUCCESS = f"{GREEN} [SUCCESS] {END}"
OKAY = okay = f"{GREEN}[OKAY]{END}"
WARNING = warning = f"{YELLOW}[WARNING]{END}"
FAIL = f"{RED}[FAIL]{END}"
INFO = "[INFO]"
color_len = len(GREEN) + len(END)
_COLUMN = 33
_LITTLE = 512 * 1024**2
_UNITS = ("B", "KB", "MB", "GB", "TB")


def op_report(verbose: bool = True) -> int:
    """Print what `polyaccel doctor` finds; there are no extensions to build. Return its exit code."""
    from polyaccel.cli.main import main as run

    return run(["doctor", "-v"] if verbose else ["doctor"])


def debug_report() -> None:
    """Print versions, places of packages and the size of the shared memory, as DeepSpeed does."""
    import deepspeed
    import torch

    size, warnings = get_shm_size()
    rows = {
        "torch install path": list(torch.__path__),
        "torch version": torch.__version__,
        "deepspeed install path": list(deepspeed.__path__),
        "deepspeed info": f"{__version__}, {git_hash}, {git_branch}",
    }
    if torch.version.cuda is not None:
        rows |= {"torch cuda version": torch.version.cuda, "nvcc version": nvcc_version()}
    print("DeepSpeed general environment info:")
    for name, value in (rows | {"shared memory (/dev/shm) size": size}).items():
        print(name, "." * (_COLUMN - len(name)), value)
    for line in warnings or ():
        print(line)


def nvcc_version() -> str:
    """Return the version of CUDA's compiler, or a line that says why there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        return f"{RED} [FAIL] cannot find CUDA_HOME via torch.utils.cpp_extension.CUDA_HOME={CUDA_HOME} {END}"
    try:
        words = subprocess.check_output([f"{CUDA_HOME}/bin/nvcc", "-V"], text=True).replace(",", "").split()
    except FileNotFoundError:
        return f"{RED} [FAIL] nvcc missing {END}"
    return words[words.index("release") + 1]


def get_shm_size() -> tuple[str, list[str] | None]:
    """Return the size of /dev/shm, and warnings where it is small; "UNKNOWN" and None without one."""
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, ValueError, AttributeError):
        return "UNKNOWN", None
    size = found.f_frsize * found.f_blocks
    small = (
        f" {YELLOW} [WARNING] /dev/shm size might be too small, "
        f"if running in docker increase to at least --shm-size='1gb' {END}"
    )
    return human_readable_size(size), [small] if size < _LITTLE else []


def human_readable_size(size: float) -> str:
    """Return a number of bytes in the largest unit of which there is at least one."""
    at = 0
    while size >= 1024 and at < len(_UNITS) - 1:
        size, at = size / 1024, at + 1
    return f"{size:.2f} {_UNITS[at]}"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of `ds_report`."""
    parser = argparse.ArgumentParser(prog="ds_report", description=__doc__)
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out what the doctor finds")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the doctor's details")
    return parser.parse_args(argv)


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> int:
    """Print both reports. Return the doctor's exit code, 0 without it."""
    code = 0 if hide_operator_status else op_report(verbose=not hide_errors_and_warnings)
    debug_report()
    return code


def cli_main(argv: Sequence[str] | None = None) -> int:
    """Run `ds_report`. Return the doctor's exit code."""
    given = parse_arguments(argv)
    return main(given.hide_operator_status, given.hide_errors_and_warnings)
