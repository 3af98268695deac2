"""Where flight recorders are written, whom they trust there, and what becomes of those of jobs that have ended."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyaccel.comm.flight_recorder.dump import (
    MOST_OLD_JOBS,
    FlightRecorderDumper,
    forget_old_jobs,
    job_folder,
    read_dump,
)
from polyaccel.comm.flight_recorder.record import FlightRecorder
from polyaccel.comm.host_address import start_of


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of this user, which nobody has made yet."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "polyaccel"


@pytest.fixture
def dumper(runtime: Path) -> Iterator[FlightRecorderDumper]:
    dumper = FlightRecorderDumper(FlightRecorder(), 1, 2, None)
    yield dumper
    dumper.stop()


def test_a_dump_goes_to_a_folder_of_the_user_and_the_job(runtime: Path, dumper: FlightRecorderDumper) -> None:
    path = dumper.write("a test")
    assert path is not None
    assert path == runtime / f"dump-{os.getppid()}-{start_of(os.getppid())}" / "rank-1.json"
    assert read_dump(path).reason == "a test"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, runtime)] == [0o600, 0o700, 0o700]


@pytest.mark.parametrize("planted", ["the runtime folder", "the job's folder", "the record"])
def test_planted_links_are_not_followed(
    planted: str, runtime: Path, dumper: FlightRecorderDumper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    folder = job_folder(os.environ)
    if planted == "the runtime folder":
        runtime.symlink_to(victim)
    elif planted == "the job's folder":
        runtime.mkdir(mode=0o700)
        folder.symlink_to(victim)
    else:
        folder.mkdir(parents=True)
        (victim / "precious").write_text("precious")
        (folder / "rank-1.json").symlink_to(victim / "precious")
    with caplog.at_level(logging.WARNING):
        path = dumper.write("a test")
    if planted == "the record":
        assert (victim / "precious").read_text() == "precious"
        assert path is not None
        assert not path.is_symlink()
    else:
        assert path is None
        assert "is a link" in caplog.text
        assert list(victim.iterdir()) == []


def test_old_jobs_are_forgotten_but_the_last_ones_and_those_that_run(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        running = runtime / f"dump-{launcher.pid}-{start_of(launcher.pid)}"
        another_of_its_number = runtime / f"dump-{launcher.pid}-1"
        dead = [runtime / f"dump-{number}" for number in range(MOST_OLD_JOBS)]
        for age, folder in enumerate((*reversed(dead), another_of_its_number, running)):
            folder.mkdir()
            (folder / "rank-0.json").write_text("{}")
            os.utime(folder, (1000 - age, 1000 - age))
        (runtime / "other").mkdir()
        forget_old_jobs(runtime)
        launcher.communicate(b"")
    assert {folder.name for folder in runtime.iterdir()} == {"other", running.name, *(folder.name for folder in dead)}


def test_a_start_forgets_old_jobs(runtime: Path, dumper: FlightRecorderDumper) -> None:
    runtime.mkdir(mode=0o700)
    for number in range(MOST_OLD_JOBS + 5):
        (runtime / f"dump-{number}-1").mkdir()
    dumper.start()
    assert len(list(runtime.iterdir())) == MOST_OLD_JOBS


SIGNAL_WHILE_WRITING = """
import logging, os, signal, sys
from pathlib import Path
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.flight_recorder import dump
from polyaccel.comm.flight_recorder.record import FlightRecorder
logging.basicConfig(stream=sys.stdout, format="%(message)s")
dump._WRITING_S = dump._SAYING_S = 3600.0
recorder = FlightRecorder()
if len(sys.argv) > 2:
    recorder.start((0, 1), Collective(Operation.BARRIER), 0).started_s -= float(sys.argv[2])
dumper = dump.FlightRecorderDumper(recorder, 0, 2, Path(sys.argv[1]))
dumper.start()
write = dump.write_dump
def interrupted(*arguments):
    dump.write_dump = write
    os.kill(os.getpid(), signal.SIGTERM)
    return write(*arguments)
dump.write_dump = interrupted
dumper.write("a collective failed")
print("went on")
"""


@pytest.mark.parametrize(("call", "is_said"), [([], False), (["0"], False), (["3600"], True)])
def test_a_signal_that_comes_while_the_main_thread_writes_waits_for_nothing(
    call: list[str], is_said: bool, tmp_path: Path
) -> None:
    """The waits of the handler are an hour here, and so are those for a line of the log. A rank that is stopped says
    where its record is if a call has been under way for a while: others may wonder about it."""
    ended = subprocess.run(
        [sys.executable, "-c", SIGNAL_WHILE_WRITING, str(tmp_path), *call], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == -15, ended.stderr
    assert "a collective failed; the last calls are in" in ended.stdout
    assert ("SIGTERM; the last calls are in" in ended.stdout) == is_said
    assert "went on" not in ended.stdout
    assert read_dump(tmp_path / "rank-0.json").reason == "SIGTERM"
