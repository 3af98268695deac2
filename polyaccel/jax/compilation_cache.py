"""Compiled programs of JAX, kept on disk from one start of a training to the next.

[Note: Cache of compiled programs]
JAX has a persistent cache, which is off until a folder is set. Programs for a CPU use what this processor has, so each
kind of processor has a folder: a home may be shared by unlike hosts. Ranks of a host start together and compile the
same programs. JAX locks the folder only where its size is limited, and needs the package filelock for that; without
the lock a rank could read what another has written half. A folder that the script has set is left alone.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path

import jax

from polyaccel.core.processor import processor_identity
from polyaccel.core.user_dirs import cache_folder, ensure_private_dir

log = getLogger(__name__)

MOST_BYTES = 4 << 30
"""The size of the folder: JAX removes what was used longest ago."""


def keep_compiled_programs() -> None:
    """Let JAX keep programs in this user's cache, unless a folder is set or it cannot be locked."""
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    if find_spec("filelock") is None:
        log.info("compiled programs are not kept: the package filelock is missing")
        return
    try:
        folder = _folder()
    except OSError as error:
        log.info("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _folder() -> Path:
    """Make the folder of this kind of processor. Raises OSError."""
    digest = hashlib.sha256(processor_identity().encode()).hexdigest()[:16]
    cache_folder().parent.mkdir(parents=True, exist_ok=True)
    folder = cache_folder()
    for name in ("", "jax", digest):
        folder = ensure_private_dir(folder / name if name else folder)
    return folder
