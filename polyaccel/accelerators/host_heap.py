"""The C library's heap in this process, from which frameworks take activations and gradients."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_ in malloc.h
_MMAP_THRESHOLD_NBYTES = (4 << 20) * ctypes.sizeof(ctypes.c_long)  # the most that glibc allows
_NEVER = -1
_COMPATIBLE = "glibc.malloc.hugetlb="  # a tunable about the pages themselves, which the launcher sets
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let malloc keep the memory that a training step frees, because the next step needs it again. Whether that was
    done: not where the C library is another than glibc, nor where the user has set malloc up in the environment.

    Left to itself, glibc gives the end of its heap back to the system with every large block that is freed there, and
    touches new pages for the next one: up to 6,000 page faults of 1 to 2 us in each step of a model of 29 M parameters,
    or none, as the blocks happen to lie. Blocks of more than 32 MiB still come from the system and return to it.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
    is_set_up = any("glibc.malloc" in tunable and not tunable.startswith(_COMPATIBLE) for tunable in tunables)
    if sys.platform != "linux" or is_set_up or any(name in os.environ for name in _USERS_OWN):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    # The first alone would freeze the other at 128 KiB, and have every larger block mapped anew.
    is_set = library.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_NBYTES) and library.mallopt(_TRIM_THRESHOLD, _NEVER)
    return bool(is_set)
