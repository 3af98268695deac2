"""The process of a host's elastic agent: `python -m polyaccel.launch.elastic.torch_agent`, started by the launcher.

It reads the job from standard input, and writes jobs to start to standard output; see [Note: Roles on an elastic host].
torch's agent finds out which hosts there are. Added here: which of their ranks train where not every number of
ranks can, and that hosts are noticed which are lost without a word.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import sleep
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from polyaccel.job.ports import free_port
from polyaccel.launch.base import Job
from polyaccel.launch.elastic.torch_heartbeats import AgentHeartbeats
from polyaccel.launch.elastic.torch_rendezvous_store import RendezvousStore, say
from polyaccel.launch.remote.control_messages import BEAT_S, END
from polyaccel.launch.restarts import RESTART_VARIABLE

_MONITOR_S = 0.2
_HAS_ENDED = "polyaccel/ended"


class LauncherLines:
    """The launcher next to this process: it starts the ranks of the jobs that it receives, and reports how they
    ended."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._file = os.fdopen(read_fd, "r", encoding="utf-8")
        self._write_fd = write_fd
        self._lock = threading.Lock()
        self._codes: SimpleQueue[int] = SimpleQueue()
        self._is_running = False
        self.beats: AgentHeartbeats | None = None
        """The callback for the end of the launcher."""
        self.job = Job.from_json(self._file.readline())
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True, name="polyaccel launcher").start()

    def start(self, job: Job) -> None:
        """Let it start these ranks."""
        self._is_running = True
        self._send(job.to_json())

    def code(self) -> int | None:
        """Return the code that the ranks ended with, once; None while they run, or where there are none."""
        try:
            code = self._codes.get_nowait()
        except Empty:
            return None
        self._is_running = False
        return code

    def stop(self) -> None:
        """Let it end the ranks, and wait until it has."""
        if self._is_running:
            self._send(END)
            self._codes.get()
            self._is_running = False

    def _read(self) -> None:
        for line in self._file:
            self._codes.put(int(line.split()[1]))
        if self.beats is not None:
            self.beats.leave()
        os._exit(0)

    def _beat(self) -> None:
        while True:
            sleep(BEAT_S)
            self._send("")

    def _send(self, line: str) -> None:
        data = line.encode() + b"\n"
        with self._lock, suppress(BrokenPipeError):  # `_read` finds out
            while data:
                data = data[os.write(self._write_fd, data) :]


class HostAgent(SimpleElasticAgent):
    """torch's agent of this host, for which the whole of a host's ranks is one worker."""

    def __init__(self, spec: WorkerSpec, launcher: LauncherLines, beats: AgentHeartbeats, starts: int) -> None:
        super().__init__(spec)
        self._own_address = str(spec.local_addr)
        self._launcher = launcher
        self._beats = beats
        self._has_ranks = False
        self.code = 1
        """The code of this host's ranks when they failed the last time."""
        self.starts = starts
        """How often ranks were started before, as far as this host has counted."""

    @property
    def restarts_left(self) -> int:
        """How often ranks may still fail."""
        return int(self._remaining_restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        store: Any = worker_group.store
        number, count = int(worker_group.group_rank or 0), int(worker_group.group_world_size or 1)
        own = self._launcher.job
        own_facts: dict[str, Any] = {"name": socket.gethostname(), "slots": next(iter(own.hosts.values()))}
        own_facts |= {"address": self._own_address, "port": free_port()}
        own_facts |= {"starts": self.starts, "token": secrets.token_hex(8)}
        store.set(f"polyaccel/host/{number}", json.dumps(own_facts))
        found = [json.loads(text) for text in store.multi_get([f"polyaccel/host/{each}" for each in range(count)])]
        self.starts = max(int(each["starts"]) for each in found) + 1
        self._beats.begin(found[0]["token"], number, count)
        hosts = hosts_that_train(own, found)
        self._has_ranks = number < len(hosts)
        idle = len(own_facts["slots"]) - (len([*hosts.values()][number]) if self._has_ranks else 0)
        if idle:
            total = sum(len(each["slots"]) for each in found)
            say(f"{sum(map(len, hosts.values()))} of {total} ranks can train: {idle} of this host wait")
        if self._has_ranks:
            start = replace(
                own,
                hosts=hosts,
                node=number,
                master_addr=str(found[0]["address"]),
                master_port=int(found[0]["port"]),
                job_id=uuid.uuid4().hex,
                exports={**own.exports, RESTART_VARIABLE: str(self.starts - 1)},
            )
            self._launcher.start(start)
        return {0: "the ranks of this host"}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._launcher.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._launcher.stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        code = self._launcher.code() if self._has_ranks else self._code_of_others(worker_group)
        if code == 0:
            return RunResult(
                state=State.SUCCEEDED, return_values={worker.global_rank: 0 for worker in worker_group.workers}
            )
        if code is not None:
            self.code = code
            left = self.restarts_left
            say(f"the ranks begin again, {left} more times at most" if left else "no restart is left")
            return RunResult(state=State.FAILED)
        if lost := self._beats.lost():
            say(f"{'a host is' if len(lost) == 1 else f'{len(lost)} hosts are'} lost")
            return RunResult(state=State.UNHEALTHY)
        return RunResult(state=State.HEALTHY)

    def _code_of_others(self, worker_group: WorkerGroup) -> int | None:
        store: Any = worker_group.store
        return 0 if store.check([_HAS_ENDED]) else None

    def _exit_barrier(self) -> None:
        """Wait until the ranks of all hosts have ended well; or those of one have not, which leaves it for itself."""
        store: Any = self._worker_group.store
        self._beats.end_well()
        with suppress(RendezvousConnectionError, RuntimeError):  # the host that has the store has ended
            store.set(_HAS_ENDED, "")
            while self._beats.awaits_others() and not self._worker_group.spec.rdzv_handler.num_nodes_waiting():
                sleep(_MONITOR_S)


def hosts_that_train(job: Job, found: list[dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    """The slots of the hosts of the rendezvous, by their names: the first ones, as many as can train together."""
    left = job.elastic.largest(sum(len(each["slots"]) for each in found))
    hosts: dict[str, tuple[int, ...]] = {}
    for number, each in enumerate(found):
        slots = tuple(each["slots"][:left])
        left -= len(slots)
        if slots:
            name = str(each["name"])
            hosts[f"{name}#{number}" if name in hosts else name] = slots
    return hosts


def main() -> int:
    """Be the agent until the job has ended. Returns its exit code: that of this host's ranks."""
    write_fd, read_fd = os.dup(1), os.dup(0)
    os.dup2(2, 1)  # whatever torch prints is not an order
    launcher = LauncherLines(read_fd, write_fd)
    job = launcher.job
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # ranks of each start have their own rendezvous
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # a host is one worker: their numbers need no agreement
    place = RendezvousStore.from_job(job)
    handler = place.handler(job.elastic)
    launcher.beats = beats = AgentHeartbeats(place)
    left, starts = job.elastic.restarts, 0
    while True:
        spec = WorkerSpec(
            role="host",
            local_world_size=1,
            rdzv_handler=handler,
            entrypoint="polyaccel",
            max_restarts=left,
            monitor_interval=_MONITOR_S,
            local_addr=place.own,
        )
        agent = HostAgent(spec, launcher, beats, starts)
        try:
            result = agent.run()
            break
        except DistStoreError:
            say("a host was lost during the rendezvous; it starts again")
            left, starts = agent.restarts_left, agent.starts
        except (RendezvousConnectionError, DistNetworkError):
            say(f"nothing is received from {place.address}, the rendezvous of the hosts")
            return 1
        except RendezvousClosedError:
            say("the job has ended already")
            return agent.code
    with suppress(Exception):  # the host that keeps it may have ended before
        handler.shutdown()
    return agent.code if result.is_failed() else 0


if __name__ == "__main__":
    sys.exit(main())
