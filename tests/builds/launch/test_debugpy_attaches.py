"""`polyaccel run --debugpy --wait` with the real debugpy: each rank waits, is attached to, and goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from polyaccel.job.ports import free_port

LIMIT_S = 120.0


class Debugger:
    """A client of the Debug Adapter Protocol, as an editor is one."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self.messages = self.connection.makefile("rb")
        self.number = 0

    def send(self, command: str, **arguments: Any) -> None:
        self.number += 1
        body = {"seq": self.number, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(body).encode()
        self.connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))

    def read_until(self, **wanted: Any) -> dict[str, Any]:
        while True:
            length = 0
            while (line := self.messages.readline()) != b"\r\n":
                if not line:
                    raise ConnectionResetError(f"debugpy closed the connection before it sent {wanted}")
                name, _, value = line.partition(b":")
                length = int(value) if name == b"Content-Length" else length
            found: dict[str, Any] = json.loads(self.messages.read(length))
            if all(found.get(name) == value for name, value in wanted.items()):
                return found

    def close(self) -> None:
        self.messages.close()
        self.connection.close()


def test_ranks_wait_for_a_debugger_and_go_on(tmp_path: Path) -> None:
    target = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--target", str(target)]
    subprocess.run([*pip, "debugpy"], check=True, timeout=LIMIT_S)
    (tmp_path / "train.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], 'has', sys.argv[1:])\n")
    port = free_port()
    job = subprocess.Popen(
        [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", "--debugpy", str(port), "--wait", "train.py", "x y"],
        cwd=tmp_path,
        # On a busy machine debugpy's own process may be there late: 0 lets debugpy wait for it without a limit.
        env={**os.environ, "PYTHONPATH": str(target), "DEBUGPY_PROCESS_SPAWN_TIMEOUT": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stderr is not None
        for rank in range(2):
            said = job.stderr.readline()
            assert f"rank {rank} listens for a debugger, and waits for it: attach to 127.0.0.1:{port + rank}" in said
        debuggers = [_attached(port + rank, job) for rank in range(2)]
        for debugger in debuggers:
            debugger.send("configurationDone")
        out, error = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0, error
    assert sorted(out.splitlines()) == [f"[rank {rank}] rank {rank} has ['x y']" for rank in range(2)]
    for debugger in debuggers:
        debugger.close()


def _attached(port: int, job: subprocess.Popen[str]) -> Debugger:
    """A debugger of the rank that listens on `port`; one that debugpy turns away comes again while the job lives."""
    while True:
        try:
            debugger = Debugger(port)
            debugger.send("initialize", adapterID="test", clientID="test")
            debugger.read_until(type="response", command="initialize", success=True)
            debugger.send("attach", justMyCode=True)
            debugger.read_until(type="event", event="initialized")
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            assert job.poll() is None, job.communicate()
        else:
            return debugger
