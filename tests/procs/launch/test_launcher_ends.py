"""However a job ends, the launcher names the rank, gives its exit code, and leaves nothing running."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from time import sleep

import pytest
from launcher_job import Job, is_alive, let_go, wait_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

FOR_EVER = """
ready()
while True:
    signal.pause()
"""
UNTIL_LET_GO = """
ready()
wait()
"""


def test_a_rank_that_raises_ends_the_job_and_is_quoted(tmp_path: Path) -> None:
    script = """
ready()
if rank == 1:
    wait()
    raise ValueError("loss is not finite")
while True:
    signal.pause()
"""
    with Job(tmp_path, script) as job:
        ranks, _ = job.pids()
        let_go(ranks[1])
        code, _, stderr = job.finish()
    assert code == 1
    assert f"rank 1 (pid {ranks[1]}) exited with code 1" in stderr
    assert stderr.rstrip().splitlines()[-1] == "polyaccel:   | ValueError: loss is not finite"
    assert not any(map(is_alive, ranks))


RAISES_WHEN_ASKED_TO_END = """
def fails(*_):
    try:
        {}["lost"]
    except KeyError:
        raise RuntimeError("connection lost")
signal.signal(signal.SIGTERM, fails)
print("caught\\nTraceback (most recent call last):\\n  of an earlier attempt\\nKeyError: 7\\nretried", file=sys.stderr)
ready()
if rank == 1:
    wait()
    fails()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("is_verbose", [False, True])
def test_only_the_first_failing_rank_shows_its_traceback_in_full(tmp_path: Path, is_verbose: bool) -> None:
    with Job(tmp_path, RAISES_WHEN_ASKED_TO_END, *["-v"][: int(is_verbose)], "--log-dir", "logs") as job:
        ranks, _ = job.pids()
        let_go(ranks[1])
        code, _, stderr = job.finish()
    lines = {rank: [line for line in stderr.splitlines() if line.startswith(f"[rank {rank}] ")] for rank in (0, 1)}
    assert code == 1
    for rank, has_all in ((0, is_verbose), (1, True)):
        shown = lines[rank][lines[rank].index(f"[rank {rank}] retried") + 1 :]
        assert sum("Traceback" in line for line in shown) == 2 * has_all, stderr
        assert has_all or shown == ["[rank 0] RuntimeError: connection lost"]
        assert f"[rank {rank}]   of an earlier attempt" in lines[rank]  # the rank lived on
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("Traceback") == 3


def test_a_rank_that_raised_first_is_quoted_although_another_ends_before_it(tmp_path: Path) -> None:
    script = """
import traceback
from polyaccel.job.readiness import FAILS, report_to_launcher
if rank == 1:
    report_to_launcher(os.environ, 1, FAILS)
    try:
        raise ValueError("bad sample")
    except ValueError:
        traceback.print_exc()
ready()
wait()
raise RuntimeError("connection lost")
"""
    with Job(tmp_path, script) as job:
        ranks, _ = job.pids()
        let_go(ranks[0])
        code, _, stderr = job.finish()
    assert code == 1
    assert "[rank 1] Traceback (most recent call last):" in stderr
    assert [line for line in stderr.splitlines() if line.startswith("[rank 0]")] == [
        "[rank 0] RuntimeError: connection lost"
    ]
    assert stderr.rstrip().splitlines()[-1] == "polyaccel:   | ValueError: bad sample"


def test_the_first_failing_rank_decides_the_exit_code(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end"), sys.exit(9)))
ready()
if rank == 1:
    wait()
    sys.exit(7)
while True:
    signal.pause()
"""
    with Job(tmp_path, script, "--grace-period", "60") as job:
        ranks, _ = job.pids()
        let_go(ranks[1])
        code, stdout, stderr = job.finish()
    assert code == 7
    assert "[rank 0] asked to end\n" in stdout
    assert f"rank 1 (pid {ranks[1]}) exited with code 7" in stderr
    assert "code 9" not in stderr


def test_one_rank_may_end_well_before_the_others(tmp_path: Path) -> None:
    with Job(tmp_path, UNTIL_LET_GO) as job:
        ranks, _ = job.pids()
        let_go(ranks[0])
        assert wait_gone(ranks[0])
        assert is_alive(ranks[1])
        let_go(ranks[1])
        code, _, stderr = job.finish()
    assert (code, stderr) == (0, "")


def test_a_killed_rank_is_named_with_the_likely_cause(tmp_path: Path) -> None:
    with Job(tmp_path, FOR_EVER) as job:
        ranks, _ = job.pids()
        os.kill(ranks[1], signal.SIGKILL)
        code, _, stderr = job.finish()
    assert code == 128 + 9
    assert f"rank 1 (pid {ranks[1]}) was killed by SIGKILL after" in stderr
    assert "(out of memory? check dmesg)" in stderr
    assert not any(map(is_alive, ranks))


def test_of_ranks_that_failed_together_the_killed_one_is_the_cause(tmp_path: Path) -> None:
    with Job(tmp_path, "ready()\nwait()\nsys.exit('connection lost')") as job:
        ranks, _ = job.pids()
        job.process.send_signal(signal.SIGSTOP)  # so that it sees both at once
        let_go(ranks[0])
        os.kill(ranks[1], signal.SIGKILL)
        assert all(map(wait_gone, ranks))
        job.process.send_signal(signal.SIGCONT)
        code, _, stderr = job.finish()
    assert code == 128 + 9
    assert f"rank 1 (pid {ranks[1]}) was killed by SIGKILL" in stderr


def test_a_failing_rank_ends_the_job_although_nobody_reads_its_output(tmp_path: Path) -> None:
    script = """
ready()
while rank == 0:
    print("x" * 1000)
signal.pause()
"""
    with Job(tmp_path, script) as job:
        ranks, _ = job.pids()
        os.kill(ranks[1], signal.SIGKILL)
        assert all(map(wait_gone, ranks))
        code, _, stderr = job.finish()
    assert code == 128 + 9
    assert f"rank 1 (pid {ranks[1]}) was killed by SIGKILL" in stderr


def test_a_stopped_rank_is_said_and_ends_the_job(tmp_path: Path) -> None:
    with Job(tmp_path, FOR_EVER, "--stop-timeout", "0.3") as job:
        ranks, _ = job.pids()
        os.kill(ranks[1], signal.SIGSTOP)
        job.wait_for(rf"rank 1 \(pid {ranks[1]}\) is stopped by SIGSTOP; .*the job ends in 0.3 s", "stderr")
        code, _, stderr = job.finish()
    assert code == 128 + signal.SIGSTOP
    assert f"rank 1 (pid {ranks[1]}) was stopped by SIGSTOP and not continued" in stderr
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize(("limit_s", "notice"), [("30", "the job ends in 30 s"), ("0", r"kill -CONT \d+$")])
def test_a_stopped_rank_that_is_continued_goes_on(tmp_path: Path, limit_s: str, notice: str) -> None:
    with Job(tmp_path, UNTIL_LET_GO, "--stop-timeout", limit_s) as job:
        ranks, _ = job.pids()
        os.kill(ranks[0], signal.SIGSTOP)
        job.wait_for(rf"rank 0 \(pid {ranks[0]}\) is stopped .*{notice}", "stderr")
        os.kill(ranks[0], signal.SIGCONT)
        job.wait_for(rf"rank 0 \(pid {ranks[0]}\) continues", "stderr")
        for pid in ranks:
            let_go(pid)
        code, _, _ = job.finish()
    assert code == 0


@pytest.mark.parametrize("options", [", env={}", ", start_new_session=True"], ids=["same session", "own session"])
def test_the_whole_tree_ends_with_a_failing_rank(tmp_path: Path, options: str) -> None:
    script = f"""
start("import signal; signal.pause()" {options})
ready()
if rank == 0:
    wait()
    os._exit(3)
while True:
    signal.pause()
"""
    with Job(tmp_path, script) as job:
        ranks, children = job.pids(children=2)
        let_go(ranks[0])
        code, _, _ = job.finish()
    assert code == 3
    assert all(map(wait_gone, ranks + children))


def test_what_finished_ranks_leave_behind_is_ended_and_said(tmp_path: Path) -> None:
    script = """
if rank == 0:
    start("import signal; signal.pause()", start_new_session=True)
ready()
os._exit(0)
"""
    with Job(tmp_path, script) as job:
        _, (child,) = job.pids(children=1)
        code, _, stderr = job.finish()
    assert code == 0
    assert f"polyaccel: ending what the ranks left behind: pid {child}\n" in stderr
    assert wait_gone(child)


def test_a_process_that_escaped_does_not_keep_the_job(tmp_path: Path) -> None:
    script = """
if rank == 0:  # has the rank's standard error, and nothing by which it could be found
    start("import signal; signal.pause()", start_new_session=True, env={})
ready()
os._exit(0)
"""
    with Job(tmp_path, script) as job:
        _, (child,) = job.pids(children=1)
        code, _, stderr = job.finish()
        os.kill(child, signal.SIGKILL)
    assert (code, stderr) == (0, "")


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()")
ready()
if rank == 0:
    wait()
    sys.exit(4)
while True:
    signal.pause()
"""
    with Job(tmp_path, script, "--grace-period", "0.3") as job:
        ranks, children = job.pids(children=2)
        let_go(ranks[0])
        code, _, stderr = job.finish()
    assert code == 4
    assert "killed with SIGKILL: pid " in stderr
    assert all(map(wait_gone, ranks + children))


def test_a_stopped_rank_does_not_survive_a_failing_one(tmp_path: Path) -> None:
    with Job(tmp_path, FOR_EVER) as job:
        ranks, _ = job.pids()
        os.kill(ranks[0], signal.SIGSTOP)
        job.wait_for("is stopped", "stderr")
        os.kill(ranks[1], signal.SIGKILL)
        code, _, _ = job.finish()
    assert code == 128 + 9
    assert not is_alive(ranks[0])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_and_ends_the_job(tmp_path: Path, signum: signal.Signals) -> None:
    with Job(tmp_path, FOR_EVER) as job:
        ranks, _ = job.pids()
        job.process.send_signal(signum)
        code, _, stderr = job.finish()
    assert code == 128 + signum
    assert stderr.rstrip().endswith(f"polyaccel: ended by {signum.name}, which was passed on to the ranks")
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ranks_that_handle_a_signal_may_end_well(tmp_path: Path, signum: signal.Signals) -> None:
    script = f"""
signal.signal({int(signum)}, lambda *_: (print("saved", flush=True), sys.exit(0)))
ready()
while True:
    signal.pause()
"""
    with Job(tmp_path, script) as job:
        job.pids()
        job.process.send_signal(signum)
        code, stdout, _ = job.finish()
    assert code == 0
    assert "[rank 0] saved\n" in stdout
    assert "[rank 1] saved\n" in stdout


def test_ranks_that_end_long_after_a_signal_get_no_second_one(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: print("asked twice", flush=True))
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
ready()
if rank == 1:
    wait()
    sys.exit(130)
while True:
    signal.pause()
"""
    with Job(tmp_path, script, "--grace-period", "0.5") as job:
        ranks, _ = job.pids()
        job.process.send_signal(signal.SIGINT)
        job.wait_for("rank 0. asked")
        sleep(0.5)  # at least the grace period
        let_go(ranks[1])
        code, stdout, stderr = job.finish()
    assert code == 130
    assert "asked twice" not in stdout
    assert "ending the other ranks" not in stderr
    assert stderr.rstrip().splitlines()[-1] == "polyaccel: ended by SIGINT, which was passed on to the ranks"


def test_sigusr1_reaches_every_rank_and_ends_nobody(tmp_path: Path) -> None:
    script = """
ready()
wait()
print("asked", flush=True)
"""
    with Job(tmp_path, script) as job:
        job.pids()
        job.process.send_signal(signal.SIGUSR1)
        code, stdout, stderr = job.finish()
    assert code == 0
    assert "[rank 0] asked\n" in stdout
    assert "[rank 1] asked\n" in stdout
    assert "SIGUSR1 is passed on to the ranks" in stderr


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGINT, lambda *_: print("not now", flush=True))
ready()
while True:
    signal.pause()
"""
    with Job(tmp_path, script, "--grace-period", "1000") as job:
        ranks, _ = job.pids()
        job.process.send_signal(signal.SIGINT)
        job.wait_for("not now")
        job.process.send_signal(signal.SIGINT)
        code, _, stderr = job.finish()
    assert code == 128 + signal.SIGINT
    assert "killed by a second SIGINT" in stderr
    assert not any(map(is_alive, ranks))


def test_a_hang_up_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    with Job(tmp_path, UNTIL_LET_GO, ignored=(signal.SIGHUP,)) as job:
        ranks, _ = job.pids()
        job.process.send_signal(signal.SIGHUP)
        for pid in ranks:
            let_go(pid)
        code, _, stderr = job.finish()
    assert (code, stderr) == (0, "")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_quits_with_0_before_it_has_met_the_others_is_named(late: int, tmp_path: Path) -> None:
    """And at once, whichever of the two acts later: the others wait for ever here."""
    script = f"""
from polyaccel.job.readiness import WAITS, report_to_launcher
ready()
if rank == {late}:
    wait()
if rank == 1:
    sys.exit(0)
report_to_launcher(os.environ, 0, WAITS)
while True:
    signal.pause()
"""
    with Job(tmp_path, script) as job:
        ranks, _ = job.pids()
        if late == 0:
            assert wait_gone(ranks[1])
        let_go(ranks[late])
        code, _, stderr = job.finish()
    assert code == 1
    assert f"rank 1 (pid {ranks[1]}) exited with code 0 after" in stderr
    assert f"before it had joined the others (init_distributed); rank 0 (pid {ranks[0]}) waited for it" in stderr


def test_a_rank_that_has_met_the_others_may_quit_before_them(tmp_path: Path) -> None:
    script = """
from polyaccel.job.readiness import JOINED, WAITS, report_to_launcher
if rank == 1:
    report_to_launcher(os.environ, 1, JOINED)
ready()
if rank == 0:
    report_to_launcher(os.environ, 0, WAITS)
    wait()
"""
    with Job(tmp_path, script) as job:
        ranks, _ = job.pids()
        assert wait_gone(ranks[1])
        let_go(ranks[0])
        code, _, stderr = job.finish()
    assert (code, stderr) == (0, "")


def test_a_rank_that_makes_no_step_is_named_with_its_stack(tmp_path: Path) -> None:
    script = """
from polyaccel.job.readiness import JOINED, STEP, enable_stack_dump_signal, report_to_launcher
def hang_here():
    while True:
        signal.pause()
enable_stack_dump_signal()
ready()
wait()
report_to_launcher(os.environ, rank, JOINED)
for step in range(3 - rank):
    report_to_launcher(os.environ, rank, STEP)
hang_here()
"""
    with Job(tmp_path, script, "--hang-timeout", "3") as job:
        ranks, _ = job.pids()
        for pid in ranks:
            let_go(pid)
        code, _, stderr = job.finish()
    assert code == 124
    what = "no step was made for the 3 s of --hang-timeout, after 3; behind: rank 1"
    assert f"{what} (pid {ranks[1]})" in stderr
    for rank in range(2):
        assert re.search(rf"\[rank {rank}\]   File .*script\.py.*, line \d+ in hang_here", stderr)
    assert not any(map(is_alive, ranks))


def test_ranks_and_what_they_started_die_with_a_killed_launcher(tmp_path: Path) -> None:
    script = """
start("import time; time.sleep(1000)", start_new_session=True)
start("import time; time.sleep(1000)", env={})
"""
    with Job(tmp_path, script + FOR_EVER) as job:
        ranks, children = job.pids(children=4)
        job.process.kill()
        assert all(map(wait_gone, (*ranks, *children)))
