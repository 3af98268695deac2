"""The life of a job on this host: start the ranks, stay until all have ended, and end the others when one fails.

[Note: Job termination]
It ends well when all ranks exit with 0. The first rank that fails (or is stopped for too long) decides the exit code;
then every process of the job gets SIGTERM, and SIGKILL after the grace period. A rank that exits with 0 fails the job
too where others wait for it in the rendezvous, as they report through the readiness pipe. A signal that the launcher
passes on asks the ranks to end as well, in their own time: they get no second one, but from the first rank that ends of
it, however much later, the grace period runs. A second SIGINT kills at once. Other signals are passed on too, and end
nothing here (`signals`). Processes that ranks leave behind are ended in the same way, so that nothing outlives the job.
Of a launcher that is killed itself, the guard ends the job (`guard`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import ClassVar, Protocol

from polyaccel.job.readiness import FAILS, JOINED, SHOW_STACK, STEP, WAITS, ReadinessPipe
from polyaccel.launch.base import JobResult, LaunchPlan, RankSpec, noop
from polyaccel.launch.output import JobOutput
from polyaccel.launch.process import (
    ProcessState,
    RankProcess,
    describe_absence,
    describe_end,
    describe_stop,
    exit_code,
    signal_name,
    start_rank,
    with_last_lines,
)
from polyaccel.launch.signals import ENDING, NOTICES, PASSED_ON, SILENT, SignalInbox
from polyaccel.launch.tree import OrphanReaper, ProcessTracker

_LINGER_S = 1.0  # for what ended ranks left behind to end by itself, as helpers of multiprocessing do
_POLL_S = 0.05  # only while waiting for processes that are not our children
_KILL_AGAIN_S = 1.0
_KILL_ROUNDS = 10
_DRAIN_S = 0.2
_STACKS_S = 1.0
_HANGS = 124
"""The exit code of a job that hangs, as that of timeout(1)."""


class ControlChannel(Protocol):
    """Control channel through which a supervisor receives signals and stop requests."""

    read_fd: int
    """Can be read when there is an order."""
    silent_at_s: float
    """When `take` will find that the peer is gone, unless something comes before; `monotonic`."""

    def take(self) -> tuple[list[int], str]:
        """The signals to pass on, and why the job is to end; empty where it is not."""
        ...

    def report(self, code: int, sentence: str) -> None:
        """The job ends with this exit code, and why."""
        ...


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why the job failed. `rank` is the one whose last lines explain it. `killed` ranks had been ended by signals of
    others by then. `was_asked`: a signal was passed on, which asks the ranks to end already."""

    code: int
    sentence: str
    rank: RankProcess | None = None
    killed: int = 0
    was_asked: bool = False


class Supervisor:
    """Runs one job, once. `look` is called whenever something may have happened. See [Note: Job termination]."""

    signals: ClassVar[tuple[int, ...]] = (*PASSED_ON, signal.SIGCHLD)
    """Those that are waited for."""

    def __init__(
        self,
        plan: LaunchPlan,
        output: JobOutput,
        *,
        orders: ControlChannel | None = None,
        look: Callable[[], object] = noop,
    ) -> None:
        self._plan = plan
        self._output = output
        self._orders = orders
        self._look = look
        self._tree = ProcessTracker(plan.job_id)
        self._ranks: list[RankProcess] = []
        self._verdict: JobFailure | None = None
        self._passed_on: dict[int, float] = {}
        self._leftovers_until_s = inf
        self._is_ending = False
        self._kill_at_s = inf
        self._kill_rounds = 0
        self._guard: OrphanReaper | None = None
        self._arrivals = ReadinessPipe()
        self._words: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._raised: RankProcess | None = None
        self._moved_s = monotonic()
        self._hang: JobFailure | None = None

    def run(self) -> JobResult:
        """How the job ended, once nothing of it is left. Raises LaunchError when a rank cannot be started."""
        news = [self._arrivals.read_fd, *self._news()]
        with SignalInbox(self.signals, news) as inbox:
            try:
                self._start()
                while self._is_going_on():
                    self._handle(inbox.wait(self._patience_s()))
                while not self._output.drain(_DRAIN_S):
                    if set(ENDING) & set(inbox.wait(0)):
                        break
            finally:
                self._kill_what_is_left()
                if self._guard is not None:
                    self._guard.dismiss()
                self._arrivals.close()
                self._conclude()
        why = self._verdict
        return JobResult(why.code, why.sentence, why.killed, why.was_asked) if why else JobResult(0)

    def _start(self) -> None:
        self._guard = OrphanReaper(self._plan.job_id)
        for spec in self._plan.ranks:
            rank = self._started(spec)
            self._tree.add(rank.pid)
            self._guard.add(rank.pid)
            self._ranks.append(rank)
            self._output.attach(rank)
        self._output.start()  # last: a process with threads should not fork

    def _started(self, spec: RankSpec) -> RankProcess:
        owns_stdout, owns_stderr = self._output.owns(spec)
        return start_rank(spec, self._arrivals, owns_stdout=owns_stdout, owns_stderr=owns_stderr)

    def _news(self) -> list[int]:
        """Descriptors that are read where they can be."""
        return [] if self._orders is None else [self._orders.read_fd]

    def _is_going_on(self) -> bool:
        if any(rank.state is not ProcessState.ENDED for rank in self._ranks):
            return self._kill_rounds < _KILL_ROUNDS
        self._leftovers_until_s = min(self._leftovers_until_s, monotonic() + _LINGER_S)
        return self._kill_rounds < _KILL_ROUNDS and bool(self._tree.members())

    def _patience_s(self) -> float | None:
        """Seconds for which nothing needs to be done unless a signal comes; None without a limit."""
        if self._leftovers_until_s < inf:
            return _POLL_S
        silent_s = inf if self._orders is None or self._is_ending else self._orders.silent_at_s
        until = min(self._kill_at_s, silent_s, self._hangs_at_s(), *map(self._stopped_until_s, self._ranks))
        return None if until == inf else max(0.0, until - monotonic())

    def _stopped_until_s(self, rank: RankProcess) -> float:
        limit = self._plan.stop_timeout_s
        waits = rank.state is ProcessState.STOPPED and limit > 0 and not self._is_ending
        return rank.changed_s + limit if waits else inf

    def _hangs_at_s(self) -> float:
        """When the ranks count as hanging, or when they have shown their stacks, unless one makes a step before."""
        limit = self._plan.hang_timeout_s
        if not limit or self._is_ending or not self._words:
            return inf
        return self._moved_s + limit + (_STACKS_S if self._hang else 0.0)

    def _handle(self, signals: list[int]) -> None:
        self._look()
        if self._orders is not None:
            given, end = self._orders.take()
            signals = [*signals, *given]
            if end:
                self._fail(JobFailure(128 + signal.SIGTERM, end))
        for signum in signals:
            if signum in ENDING:
                self._pass_on(signum)
            elif signum in NOTICES and not self._is_ending:
                if signum not in SILENT:
                    self._output.say(f"{signal_name(signum)} is passed on to the ranks")
                for rank in self._ranks:  # not to what they started, which would end of it
                    rank.signal_rank(signum)
        changed = [rank for rank in self._ranks if rank.poll()]
        self._read_ranks()  # later: what a rank sent before it ended is there
        self._note_changes(changed)
        self._note_absence()
        now = monotonic()
        for rank in self._ranks:
            if self._stopped_until_s(rank) <= now:
                sentence = f"{rank.name} was stopped by {rank.stop_signal.name} and not continued"
                limit = f" within the {self._plan.stop_timeout_s:g} s of --stop-timeout"
                self._fail(JobFailure(128 + rank.stop_signal, sentence + limit, rank))
        if self._hangs_at_s() <= now:
            self._note_hang()
        if self._leftovers_until_s <= now and not self._is_ending:
            self._output.say(f"ending what the ranks left behind: pid {_listed(self._tree.members())}")
            self._end(is_asked=False)
        if self._kill_at_s <= now:
            self._kill()

    def _pass_on(self, signum: int) -> None:
        if signum == signal.SIGINT and signum in self._passed_on:
            self._fail(JobFailure(128 + signum, "killed by a second SIGINT", was_asked=True))
            self._kill_at_s = 0.0
            return
        self._output.say(f"{signal_name(signum)} is passed on to the ranks")
        self._passed_on[signum] = monotonic()
        for rank in self._ranks:
            for each in (signum, signal.SIGCONT):  # a stopped process would not see it
                with suppress(ProcessLookupError, PermissionError):
                    rank.signal_group(each)

    def _note_changes(self, changed: list[RankProcess]) -> None:
        for rank in changed:
            if rank.state is ProcessState.STOPPED and not self._is_ending:
                self._output.say(describe_stop(rank, self._plan.stop_timeout_s))
            elif rank.state is ProcessState.RUNNING and not self._is_ending:
                self._output.say(f"{rank.name} continues")
        self._note_failures(changed)

    def _note_failures(self, changed: list[RankProcess]) -> None:
        # Of several that ended at the same time, one that a signal killed is the likelier cause: its peers lose their
        # connection and exit with a code.
        failed = sorted((rank for rank in changed if rank.returncode), key=lambda rank: (rank.returncode or 0) > 0)
        for rank in failed[:1]:
            code = exit_code(rank.returncode or 0)
            if code - 128 in self._passed_on:
                name = signal_name(code - 128)
                self._fail(JobFailure(code, f"ended by {name}, which was passed on to the ranks", was_asked=True))
            else:
                killed = sum((each.returncode or 0) < 0 for each in self._ranks)
                sentence = describe_end(rank)
                if code < 128 and self._raised not in (rank, None):
                    sentence = f"{self._raised.name} raised an exception first; {sentence}"
                    rank = self._raised
                self._fail(JobFailure(code, sentence, rank, killed))

    def _read_ranks(self) -> None:
        for rank, word in self._arrivals.poll():
            self._moved_s, self._hang = monotonic(), None
            if word == STEP:
                self._steps[rank] = self._steps.get(rank, 0) + 1
            elif word == FAILS:
                self._raised = self._raised or next((each for each in self._ranks if each.spec.rank == rank), None)
                self._output.settle(rank)
            else:
                self._words[rank] = word

    def _note_hang(self) -> None:
        """No rank has made a step for too long: ask all for their stacks; later, end the job."""
        if self._hang is not None:
            self._fail(self._hang)
            return
        alive = [rank for rank in self._ranks if rank.state is not ProcessState.ENDED]
        counts = {rank.name: self._steps.get(rank.spec.rank, 0) for rank in alive}
        last = max(counts.values(), default=0)
        behind = ", ".join(name for name, count in counts.items() if count < last) or "all ranks equally"
        limit = f"the {self._plan.hang_timeout_s:g} s of --hang-timeout"
        what = f"no step was made for {limit}, after {last}; behind: {behind}"
        self._hang = JobFailure(_HANGS, what)
        self._output.say(f"{what}; what each rank's main thread does follows")
        for rank in alive:
            if rank.spec.rank in self._words:  # another would end of it
                rank.signal_rank(SHOW_STACK)

    def _note_absence(self) -> None:
        """Fail where ranks wait for one that has ended with code 0: it will not come."""
        waiting = [
            rank
            for rank in self._ranks
            if rank.state is not ProcessState.ENDED and self._words.get(rank.spec.rank) == WAITS
        ]
        gone = [rank for rank in self._ranks if rank.returncode == 0 and self._words.get(rank.spec.rank) != JOINED]
        if waiting and gone and not self._is_ending:
            self._fail(JobFailure(1, describe_absence(gone[0], waiting), gone[0]))

    def _fail(self, verdict: JobFailure) -> None:
        """The job ends for this reason."""
        if self._verdict is None:
            self._verdict = verdict
            if self._orders is not None:
                self._orders.report(verdict.code, verdict.sentence)
            if verdict.rank is not None:
                self._output.settle(verdict.rank.spec.rank)
            if verdict.rank is not None and any(rank.state is not ProcessState.ENDED for rank in self._ranks):
                self._output.say(f"{verdict.sentence}; ending the other ranks")
            self._end(is_asked=verdict.was_asked)

    def _end(self, *, is_asked: bool) -> None:
        """Let the grace period run."""
        self._is_ending = True
        now = monotonic()
        self._kill_at_s = min(self._kill_at_s, now + self._plan.grace_s)
        if not is_asked and not any(now - passed_s < self._plan.grace_s for passed_s in self._passed_on.values()):
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        self._tree.signal(signal.SIGTERM)
        self._tree.signal(signal.SIGCONT)

    def _kill(self) -> None:
        members = self._tree.signal(signal.SIGKILL)
        if members and self._kill_rounds == 0:
            self._output.say(f"killed with SIGKILL: pid {_listed(members)}")
        self._kill_rounds += 1
        self._kill_at_s = monotonic() + _KILL_AGAIN_S

    def _kill_what_is_left(self) -> None:
        """Kill the job's remaining processes: only after an exception, or if one hangs in a driver or NFS."""
        left = self._tree.signal(signal.SIGKILL)
        if left and self._kill_rounds >= _KILL_ROUNDS:
            self._output.say(f"pid {_listed(left)} could not be killed: it hangs within the kernel")
            return
        for rank in self._ranks:
            rank.wait()

    def _conclude(self) -> None:
        if self._output.drain(_DRAIN_S) and (verdict := self._verdict):
            if folded := self._output.folded:
                self._output.say(f"tracebacks of other ranks shown as one line: {folded}; `polyaccel -v run` shows all")
            lines = self._output.last_lines(verdict.rank.spec.rank) if verdict.rank else []
            self._output.say(with_last_lines(verdict.sentence, lines))
        self._output.close()


def _listed(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
