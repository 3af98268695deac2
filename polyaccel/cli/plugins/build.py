"""`polyaccel plugins build`: compile the part that uses a third-party library of this machine."""

from __future__ import annotations

import argparse


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "compile the part of a comm backend that its library needs here"
    parser = actions.add_parser("build", help=summary, description=summary)
    parser.add_argument(
        "part", choices=["ccl"], help="ccl: collectives by oneCCL (pip install oneccl-devel, and a C++ compiler)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compile, load what was compiled, and print where it is; the exit code is 0. Raises CommError."""
    from polyaccel.comm.backends.ccl.build import build
    from polyaccel.comm.backends.ccl.library import load

    path = build()
    version = load(path).pa_ccl_loaded().decode()
    print(f"compiled for oneCCL {version}: {path}")
    return 0
