"""What else lies in a folder of checkpoints: `zero_to_fp32.py`, which scripts look for and users run, and outputs."""

from __future__ import annotations

from pathlib import Path

from polyaccel.checkpoint.format.commit import LATEST, MARKER, tag_names
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.file import FileStorage

RECOVERY_SCRIPT = "zero_to_fp32.py"
_CONTENT = """#!/usr/bin/env python
\"\"\"Write the whole weights of a checkpoint in float32: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT

It needs polyaccel and its package `deepspeed`. Import it for the functions of `deepspeed.utils.zero_to_fp32`.
\"\"\"

import sys

from deepspeed.utils.zero_to_fp32 import (  # noqa: F401
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

if __name__ == "__main__":
    from polyaccel_deepspeed.commands import zero_to_fp32

    sys.exit(zero_to_fp32())
"""


def write_recovery_script(storage: Storage) -> None:
    """Write the script into the folder of `storage`, unless it is there. Other storages than folders get none."""
    if isinstance(storage, FileStorage) and RECOVERY_SCRIPT not in storage.names():
        storage.write(RECOVERY_SCRIPT, [_CONTENT.encode()])
        path = Path(storage.location, RECOVERY_SCRIPT)
        path.chmod(path.stat().st_mode | 0o100)


def has_saves(storage: Storage) -> bool:
    """Tell whether any checkpoint was begun there, whole or not: logs and other outputs may lie there before."""
    return LATEST in storage.names() or any(
        name == MARKER or name.startswith("save-") for tag in tag_names(storage) for name in storage.names(tag)
    )
