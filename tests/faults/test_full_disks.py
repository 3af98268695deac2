"""Disks that are full, or can only be read: the checkpoint before stays whole, and the error says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_table import TABLE, Ends
from one_value import installed_in

SAVES = Path(__file__).parents[1] / "support" / "saves"
REFUSED = Ends("names the file; hint: free space or check permissions", "the old checkpoint, or the new one, whole")
CASES, MOUNT = 12, ("unshare", "-rm", "mount", "-t", "tmpfs")


def is_permitted() -> bool:
    """Whether this process may have namespaces of its own, to mount in."""
    try:
        done = subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("mode", ["foreground", "background"])
def test_a_save_on_a_full_or_read_only_disk_loses_nothing(mode: str, tmp_path: Path) -> None:
    """On a real disk of 1 MiB, in a mount namespace; the next save, with room again, is whole."""
    if not is_permitted():
        pytest.skip("unshare -rm is not permitted here: no disk can be mounted")
    installed_in(tmp_path / "site", "filling", "full_disk_job:FillingStorage")
    path = os.pathsep.join([str(tmp_path / "site"), str(SAVES)])
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, str(SAVES / "full_disk_job.py"), str(tmp_path), mode],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == CASES
    for line in lines:
        with TABLE.case(f"{line['case']}, {mode}", REFUSED):
            assert not line["problem"], line
