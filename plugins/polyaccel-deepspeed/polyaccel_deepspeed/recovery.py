"""`zero_to_fp32.py`, which `save_checkpoint` writes next to the checkpoints: scripts look for it, and users run it."""

from __future__ import annotations

from pathlib import Path

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
