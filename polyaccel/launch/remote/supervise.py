"""A job on several hosts, as its launcher sees it: a process here for each way to hosts, agents at its other end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any, ClassVar

from polyaccel.errors import LaunchError
from polyaccel.launch.base import JOB_ID, Job, JobResult, LaunchPlan, RankSpec
from polyaccel.launch.output import JobOutput, merged_log
from polyaccel.launch.process import ProcessState, RankProcess, describe_end, exit_code
from polyaccel.launch.remote.control_messages import (
    BEAT_S,
    END,
    PAUSE,
    SIGNAL,
    SILENCE_S,
    AgentInput,
    AgentPipe,
    MessageFilter,
)
from polyaccel.launch.supervise import JobFailure, Supervisor

LOST = 255
"""The exit code of a job that has lost the way to an agent, as that of ssh."""
ANSWER_S = 60.0
"""Within this time every agent is there, or the job fails."""
_SEND_AGAIN_S = 0.02
_LAST_WORDS_S = 2.0
_LATE_S = 3 * BEAT_S
_PAUSE_S = 1.0
"""For sending agents that the launcher is about to be stopped."""
_LATER_S = 3.0
"""An agent's grace period ends so long before the launcher's."""


Hear = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class HostConnection:
    """A command that brings this machine's standard input to agents, and their output back.

    `hosts` are the numbers of their hosts, `name` stands for them in messages. A command that forwards no input has
    `inputs`, one for each number. See [Note: Input of pdsh agents].
    """

    name: str
    command: tuple[str, ...]
    hosts: tuple[int, ...]
    inputs: Mapping[int, AgentPipe] = field(default_factory=dict)


def plan_ways(job: Job, ways: Sequence[HostConnection]) -> LaunchPlan:
    """Return the ways' processes as those of a separate job; agents end what ranks leave here."""
    job_id = f"ways-{job.job_id}"
    environment = {**os.environ, JOB_ID: job_id}
    processes = tuple(RankSpec(place, place, way.command, environment) for place, way in enumerate(ways))
    port = job.master_port or 0
    return LaunchPlan(job_id, processes, job.master_addr or "", port, job.grace_s + _LATER_S, job.stop_timeout_s)


class HostProcess(RankProcess):
    """The process of a way. `spec.rank` is its place among the ways."""

    def __init__(
        self,
        spec: RankSpec,
        process: subprocess.Popen[bytes],
        way: HostConnection,
        receive: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(spec, process)
        self.way = way
        self.codes: dict[int, int] = {}
        """How the agents report that their parts of the job ended, by host."""
        self.done_s = inf
        """When all of them had reported that."""
        own = [] if process.stdin is None else [AgentInput(process.stdin.fileno())]
        self._inputs = [*own, *way.inputs.values()]
        self._filter = MessageFilter(receive)

    @property
    def name(self) -> str:
        return f"{self.way.name} (pid {self.pid})"

    @property
    def has_unsent(self) -> bool:
        """Whether lines wait for room in a pipe: `send` an empty one after a moment."""
        return any(each.has_unsent for each in self._inputs) and self.state is not ProcessState.ENDED

    @property
    def prefix(self) -> bytes:
        return b""

    def filter_output(self, data: bytes, *, is_error: bool) -> bytes:
        return data if is_error else self._filter.feed(data)

    def send(self, line: str) -> None:
        """Send a line to the agents. One that has gone receives nothing."""
        for each in self._inputs:
            each.send(line)

    def flush(self) -> None:
        """Send what there is room for."""
        for each in self._inputs:
            each.flush()

    def give_up(self) -> None:
        """End the connection: its other end is silent."""
        super().signal_group(signal.SIGKILL)

    def signal_rank(self, signum: int) -> None:
        self.send(f"{SIGNAL} {int(signum)}")

    def signal_group(self, signum: int) -> None:
        if signum != signal.SIGCONT:
            self.send(f"{SIGNAL} {int(signum)}")


class HostsSupervisor(Supervisor):
    """Runs one job on several hosts, once."""

    signals: ClassVar[tuple[int, ...]] = (*Supervisor.signals, signal.SIGTSTP)

    def __init__(
        self,
        job: Job,
        ways: Sequence[HostConnection],
        *,
        first_address: str | None,
        look: Callable[[], object],
    ) -> None:
        """`first_address` is where the other hosts find the first one, if the job does not have it."""
        self._job = job
        self._ways = tuple(ways)
        self._first_address = first_address
        self._hellos: dict[int, dict[str, Any]] = {}
        self._last_message_s: dict[int, float] = {}
        """When an agent sent something, among what its ranks print."""
        self._handled_s = monotonic()
        self._unjudged: list[HostProcess] = []
        """Connections that have ended with output that is not read yet."""
        self._messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._beat_s = monotonic()
        self._answer_until_s = monotonic() + ANSWER_S
        self._has_job = False
        plan = plan_ways(job, ways)
        super().__init__(plan, JobOutput(plan, merged=merged_log(job)), look=look)

    def run(self) -> JobResult:
        try:
            return super().run()
        finally:
            os.close(self._read_fd)
            os.close(self._write_fd)

    def _started(self, spec: RankSpec) -> RankProcess:
        way = self._ways[spec.rank]
        try:
            process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL if way.inputs else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(spec.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{spec.command[0]} cannot be started: {error}", value=spec.command) from error
        return HostProcess(spec, process, way, self._take_note)

    def _take_note(self, said: dict[str, Any]) -> None:
        """Called where output is read, by another thread."""
        self._messages.put(said)
        os.write(self._write_fd, b"!")

    def _news(self) -> list[int]:
        return [self._read_fd]

    def _patience_s(self) -> float | None:
        until = min(self._beat_s, inf if self._has_job else self._answer_until_s) - monotonic()
        until = min(until, self._lingers_at_s() - monotonic())
        if any(process.has_unsent for process in self._processes()) or self._unjudged:
            until = _SEND_AGAIN_S
        before = super()._patience_s()
        return max(0.0, until if before is None else min(until, before))

    def _handle(self, signals: list[int]) -> None:
        with suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        while not self._messages.empty():
            self._receive(self._messages.get())
        if signal.SIGTSTP in signals:
            self._stop_oneself()
        self._note_silence()
        super()._handle(signals)
        self._judge()
        if self._lingers_at_s() <= monotonic():
            self._kill_at_s = 0.0
        if monotonic() >= self._beat_s or any(process.has_unsent for process in self._processes()):
            self._beat_s = monotonic() + BEAT_S
            for process in self._processes():
                process.send("")
        if not self._has_job and not self._is_ending and monotonic() >= self._answer_until_s:
            self._fail(JobFailure(1, f"{self._absent()} did not answer within {ANSWER_S:g} s"))

    def _note_silence(self) -> None:
        """Give up hosts of silent agents, unless this process or its reader stood still."""
        now, before_s = monotonic(), self._handled_s
        self._handled_s = now
        if now - before_s >= _LATE_S:
            self._last_message_s = dict.fromkeys(self._last_message_s, now)
        if self._is_ending:
            return
        since_s = now - SILENCE_S
        silent = [number for number, last_s in self._last_message_s.items() if last_s < since_s]
        if silent and self._output.waited_s < since_s:
            names = ", ".join(tuple(self._job.hosts)[number] for number in silent)
            self._fail(JobFailure(LOST, f"{names}: the agent does not answer, or the connection to it is lost"))
            for number in silent:
                self._note_end(number, LOST)  # no last word can be expected
            for process in self._processes():
                if set(process.way.hosts) <= set(silent):
                    process.give_up()

    def _lingers_at_s(self) -> float:
        """Return when lingering ways are killed after all agents' last messages; one may be stopped."""
        there = [process.done_s for process in self._processes() if process.state is not ProcessState.ENDED]
        if not self._is_ending or not there or self._kill_rounds:
            return inf
        return max(*there, self._output.waited_s) + _LAST_WORDS_S

    def _stop_oneself(self) -> None:
        """Announce to the agents that nothing will be sent for a while, and stop."""
        for process in self._processes():
            process.send(PAUSE)
        until_s = monotonic() + _PAUSE_S
        while any(process.has_unsent for process in self._processes()) and monotonic() < until_s:
            sleep(_SEND_AGAIN_S)
            for process in self._processes():
                process.flush()
        stopped_s = monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._answer_until_s += monotonic() - stopped_s
        self._beat_s = monotonic()

    def _receive(self, said: dict[str, Any]) -> None:
        number = int(said["number"])
        if number in self._last_message_s:
            self._last_message_s[number] = monotonic()
        if "alive" in said:
            return
        if "ended" in said:
            self._note_end(number, int(said["ended"]))
            self._last_message_s.pop(number, None)
        elif "way" in said:
            if not any(number in process.codes for process in self._processes()):
                name = tuple(self._job.hosts)[number]
                self._fail(JobFailure(LOST, f"{name}: the agent, or the connection to it, is lost"))
        elif "code" in said:
            host, code = tuple(self._job.hosts)[number], int(said["code"])
            why, was_asked = f"the part of the job on {host} failed: {said['why']}", code - 128 in self._passed_on
            self._fail(JobFailure(code, why, was_asked=was_asked))
        else:
            self._hellos[number] = said
            self._last_message_s[number] = monotonic()
            if len(self._hellos) == len(self._job.hosts):
                self._tell()

    def _note_end(self, number: int, code: int) -> None:
        for process in self._processes():
            if number in process.way.hosts:
                process.codes[number] = code
                if set(process.codes) >= set(process.way.hosts):
                    process.done_s = min(process.done_s, monotonic())

    def _is_going_on(self) -> bool:
        return bool(self._unjudged) or super()._is_going_on()

    def _note_failures(self, changed: list[RankProcess]) -> None:
        ended = (each for each in changed if each.state is ProcessState.ENDED)
        self._unjudged += [each for each in ended if isinstance(each, HostProcess)]

    def _judge(self) -> None:
        """See how ways have ended. An agent's last word may wait for the reader of our output, or be read just now."""
        for each in list(self._unjudged):
            waited_s = each.changed_s if self._passed_on else max(each.changed_s, self._output.waited_s)
            is_late = self._is_ending or monotonic() - waited_s >= _LAST_WORDS_S
            if set(each.codes) >= set(each.way.hosts) or self._output.has_read(each.spec.rank) or is_late:
                self._unjudged.remove(each)
                while not self._messages.empty():
                    self._receive(self._messages.get())
                lost = [number for number in each.way.hosts if number not in each.codes]
                failed = [code for code in each.codes.values() if code]
                if lost:
                    names = ", ".join(tuple(self._job.hosts)[number] for number in lost)
                    how = f"{describe_end(each)} without a word of the ranks on {names}"
                    self._fail(JobFailure(exit_code(each.returncode or 1), how, each))
                elif failed:
                    self._fail(JobFailure(failed[0], f"{each.name} ended with code {failed[0]}"))

    def _tell(self) -> None:
        """Send all agents, which are there, the job."""
        self._has_job = True
        names = tuple(self._job.hosts)
        for what in ("version", "python"):
            found = {self._hellos[number][what] for number in range(len(names))}
            if len(found) > 1:
                shown = "; ".join(f"{name} has {self._hellos[number][what]}" for number, name in enumerate(names))
                known = {"version": "version of polyaccel", "python": "version of Python"}[what]
                self._fail(JobFailure(1, f"the hosts differ in the {known}: {shown}"))
                return
        first = self._hellos[0]
        job = replace(
            self._job,
            master_addr=self._job.master_addr or self._first_address or str(first["host"]),
            master_port=self._job.master_port or int(first["port"]),
        )
        for process in self._processes():
            process.send(job.to_json())

    def _absent(self) -> str:
        return ", ".join(name for number, name in enumerate(self._job.hosts) if number not in self._hellos)

    def _processes(self) -> list[HostProcess]:
        return [rank for rank in self._ranks if isinstance(rank, HostProcess)]

    def _ask_to_end(self) -> None:
        for process in self._processes():
            process.send(END)
