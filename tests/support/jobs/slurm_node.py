"""A Slurm of one node, this one, started by hand in a folder of its own: no systemd, no accounting. Needs root."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from polyaccel.job.ports import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
UP_TIMEOUT_S = 60
CONFIG = """
ClusterName=polyaccel
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={controller_port}
SlurmdPort={node_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


def why_no_slurm() -> str:
    """Why there can be no Slurm here; empty if it can be tried."""
    missing = [program for program in (*DAEMONS, "srun") if _find(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt install slurm-wlm munge)"
    return "needs root" if os.geteuid() else ""


@contextmanager
def slurm_node() -> Iterator[dict[str, str]]:
    """The environment in which srun and its like talk to a Slurm that is up. Raises TimeoutError if it stays down."""
    with ExitStack() as stack:
        # The socket's path must be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pa-slurm-")))
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        folder.chmod(0o755)
        user = "munge" if "munge" in {entry.pw_name for entry in pwd.getpwall()} else "root"
        for path in (folder / "munge", key):
            shutil.chown(path, user)
        config = folder / "slurm.conf"
        config.write_text(
            CONFIG.format(
                host=os.uname().nodename.partition(".")[0],
                folder=folder,
                controller_port=free_port(),
                node_port=free_port(),
            )
        )
        options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder / 'munge' / name}" for option, name in options.items()]
        commands = (
            ["munged", "--force", "--foreground", *munge],
            ["slurmctld", "-D", "-f", str(config)],
            ["slurmd", "-D", "-f", str(config)],
        )
        environment = {**os.environ, "SLURM_CONF": str(config)}
        for (program, *arguments), run_as in zip(commands, (user, None, None), strict=True):
            daemon = subprocess.Popen(
                [str(_find(program)), *arguments],
                env=environment,
                user=run_as,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(_end, daemon)
        _wait_until_up(folder, environment)
        yield environment


def _wait_until_up(folder: Path, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + UP_TIMEOUT_S
    while time.monotonic() < deadline:
        state = subprocess.run(
            ["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True, timeout=30
        )
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join(file.read_text() for file in sorted(folder.glob("*.log")))
    raise TimeoutError(f"no idle node within {UP_TIMEOUT_S} s:\n{logs}")


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(10)


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
