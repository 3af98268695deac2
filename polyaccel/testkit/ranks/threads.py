"""Ranks as threads of this process, as tests of plugins start them."""

from polyaccel.comm.init.threads import run_threads

__all__ = ["run_threads"]
