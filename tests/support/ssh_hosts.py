"""Hosts on one machine: each with a network, a host name and processes of its own, and a real ssh server.

A host is a network namespace on a bridge, and a space of process ids and of host names within it, so that nothing but
the network leads from one to another. That takes root, `ip`, `unshare` and sshd: `why_absent` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from time import monotonic, sleep

_SSHD = "/usr/sbin/sshd"
_UP_S = 120.0


def why_absent() -> str:
    """Why hosts cannot be brought up here; empty where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, to make network namespaces"
    missing = [name for name in ("ip", "unshare", "ssh", "ssh-keygen", _SSHD) if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: apt install iproute2 openssh-server)"
    probe = subprocess.run(["unshare", "--net", "--pid", "--uts", "--mount", "--fork", "true"], capture_output=True)
    return "" if probe.returncode == 0 else f"no namespaces: {probe.stderr.decode().strip()}"


@dataclass(frozen=True)
class SshHost:
    """A host: its name, its address, and the process that is the first of its own."""

    name: str
    address: str
    namespace: str
    first: subprocess.Popen[bytes]

    def entered(self, *command: str) -> list[str]:
        """A command on it, as one on this machine."""
        return ["nsenter", "-t", str(self._inner_pid()), "--net", "--uts", "--pid", "--mount", *command]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Do something on it."""
        return subprocess.run(self.entered(*command), capture_output=True, text=True, timeout=60, check=False)

    def processes(self) -> list[str]:
        """The command lines of its processes, but for ssh's server."""
        said = self.run("ps", "-eo", "args=").stdout.splitlines()
        return [line for line in said if not line.startswith(("sshd", _SSHD, "ps ", "unshare", "/usr/sbin/sshd"))]

    def cut(self) -> None:
        """Nothing comes from it or reaches it any more."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def heal(self) -> None:
        """The network is back."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def _inner_pid(self) -> int:
        children = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text().split()
        return int(children[0])


class SshHosts:
    """`count` hosts until the block is left, with addresses of IPv4 alone or of IPv6 alone. `ssh_config` is the file by
    which ssh finds them by name, `bridge` the interface of this machine that leads to their `network`."""

    def __init__(self, folder: Path, count: int, *, ipv6: bool = False) -> None:
        self._folder = folder
        self._count = count
        self._length = 64 if ipv6 else 24
        self._number = 0
        self._prefix = self.bridge = self.network = ""
        self.hosts: list[SshHost] = []
        self.ssh_config = folder / "ssh_config"

    def __enter__(self) -> SshHosts:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            with suppress(ProcessLookupError, IndexError, FileNotFoundError):
                os.kill(host._inner_pid(), signal.SIGKILL)  # the first of its process ids: all others go with it
            host.first.kill()
            host.first.wait()
            _ip("netns", "del", host.namespace, check=False)
        if self.bridge:
            _ip("link", "del", self.bridge, check=False)

    def _start(self) -> None:
        keys = self._folder / "keys"
        keys.mkdir()
        for name in ("id", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
        (keys / "authorized").write_text((keys / "id.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)
        self._take_network()
        _ip("link", "set", self.bridge, "up")
        self._add_address(254, self.bridge)
        lines = []
        for number in range(1, self._count + 1):
            name, address = f"host{number}", f"{self._prefix}{number}"
            self.hosts.append(self._host(name, address, number, keys))
            lines += [f"Host {name}", f"  HostName {address}"]
        lines += [f"Host host* {self._prefix}*", "  Port 2222", "  User root", f"  IdentityFile {keys / 'id'}"]
        lines += ["  StrictHostKeyChecking no", "  UserKnownHostsFile /dev/null", "  LogLevel ERROR"]
        self.ssh_config.write_text("\n".join(lines) + "\n")
        for host in self.hosts:
            self._await(host)

    def _take_network(self) -> None:
        """Make the bridge. Its name has the number of the network: of processes that want the same, one gets it."""
        used = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
        for number in SystemRandom().sample(range(1, 255), 254):
            prefix = f"fd77:{number}::" if self._length == 64 else f"10.77.{number}."
            if f" {prefix}254/" in used:
                continue
            try:
                _ip("link", "add", f"pab{number}", "type", "bridge")
            except subprocess.CalledProcessError:
                if not Path(f"/sys/class/net/pab{number}").exists():
                    raise
                continue
            self._number, self._prefix, self.bridge = number, prefix, f"pab{number}"
            self.network = f"{prefix}/64" if self._length == 64 else f"{prefix}0/24"
            return
        raise RuntimeError("all 254 networks of these tests are in use: see `ip link`, and delete what is left")

    def _host(self, name: str, address: str, number: int, keys: Path) -> SshHost:
        namespace, outside = f"pa{self._number}h{number}", f"pv{self._number}h{number}"
        _ip("netns", "add", namespace)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", outside, "master", self.bridge, "up")
        self._add_address(number, "eth0", "-n", namespace)
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        config = self._folder / f"sshd{number}"
        config.write_text(
            f"Port 2222\nListenAddress {address}\nHostKey {keys / 'host'}\nAuthorizedKeysFile {keys / 'authorized'}\n"
            f"StrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\nMaxStartups 100\n"
        )
        # bash reads it for each command of ssh, and what it prints (pyenv's locks) would stand among a job's lines
        settings = Path.home() / ".bashrc"
        empty = f"mount --bind /dev/null {settings}; " if settings.exists() else ""
        inside = f"{empty}mount -t tmpfs none /dev/shm; hostname {name}; exec {_SSHD} -D -e -f {config}"
        shell = ["unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child", "sh", "-c", inside]
        with (self._folder / f"sshd{number}.log").open("wb") as log:
            first = subprocess.Popen(["ip", "netns", "exec", namespace, *shell], stdin=subprocess.DEVNULL, stderr=log)
        return SshHost(name, address, namespace, first)

    def _add_address(self, number: int, device: str, *where: str) -> None:
        at_once = ["nodad"] if self._length == 64 else []  # no wait for who else may have it
        _ip(*where, "addr", "add", f"{self._prefix}{number}/{self._length}", "dev", device, *at_once)

    def _await(self, host: SshHost) -> None:
        until = monotonic() + _UP_S
        command = ["ssh", "-F", str(self.ssh_config), "-o", "BatchMode=yes", host.name, "true"]
        while subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode:
            if monotonic() > until:
                raise RuntimeError(f"{host.name} does not answer: {(self._folder / 'sshd1.log').read_text()}")
            sleep(0.05)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)
