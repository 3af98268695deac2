"""What a training loop of one's own asks of the engine: a run's folder, progress, and stopping together."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import polyaccel
from polyaccel import PolyaccelError, StopRequest
from polyaccel.engine import run_folder, stop_request
from polyaccel.observability import progress_view
from polyaccel.observability.metrics import StepMetrics


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what listening replaces."""
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in former.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("is_torchrun", [False, True])
def test_the_first_signal_is_a_request_and_the_second_ends_the_process(
    handlers: None, monkeypatch: pytest.MonkeyPatch, is_torchrun: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if is_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    raised: list[tuple[int, Any]] = []
    now_s = 5.0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = StopRequest(lambda: now_s)
    assert request.signum == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.signum == signal.SIGTERM
    monkeypatch.setattr(signal, "raise_signal", lambda number: raised.append((number, signal.getsignal(number))))
    if is_torchrun:
        now_s = 6.9
        os.kill(os.getpid(), signal.SIGTERM)  # the same press of a key
        assert raised == []
        now_s = 7.0
    os.kill(os.getpid(), signal.SIGINT)
    assert raised == [(signal.SIGINT, signal.SIG_DFL)]


def test_what_is_ignored_stays_ignored(handlers: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = StopRequest()
    os.kill(os.getpid(), signal.SIGINT)
    assert request.signum == 0


# The folder of a run.


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose broadcasts are its own values."""
    ranks = SimpleNamespace(rank=0, broadcast_object=lambda value: value, all_gather_object=lambda value: [value])
    for module in (run_folder, stop_request):
        monkeypatch.setattr(module, "default_communicator", lambda: ranks)


def test_one_rank_agrees_with_itself(alone: None, handlers: None) -> None:
    request = StopRequest()
    assert request.agreed() == 0
    request.signum = signal.SIGTERM
    assert request.agreed() == signal.SIGTERM


def test_a_new_run_gets_a_folder_of_its_own(alone: None, tmp_path: Path) -> None:
    base = str(tmp_path / "runs" / "gpt")
    usual = {"steps": 2, "seed": 7}
    found = [polyaccel.begin_run(base, {"steps": steps}, defaults=usual)[0] for steps in (1, None, 3)]
    assert found == [base, f"{base}-2", f"{base}-3"]
    assert json.loads(Path(found[1], "settings.json").read_text()) == usual


def test_a_resumed_run_is_the_one_written_last_and_keeps_its_settings(alone: None, tmp_path: Path) -> None:
    base = str(tmp_path / "gpt")
    for age, steps in ((0, 1), (5, 2)):
        found, _ = polyaccel.begin_run(base, {"steps": steps, "size": None})
        os.utime(Path(found, "settings.json"), (1000 - age, 1000 - age))
    assert polyaccel.begin_run(base, {"steps": None}, resume=True) == (base, {"steps": 1, "size": None})
    assert polyaccel.begin_run(base, {"steps": 1}, resume=True)[0] == base
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.begin_run(base, {"steps": 9}, resume=True)
    assert "steps 9 (it has 1)" in str(caught.value)
    assert polyaccel.begin_run(f"{base}-2", {}, resume=True)[1] == {"steps": 2, "size": None}


def test_what_is_no_run_and_no_folder_is_an_error(alone: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, resume in ((tmp_path / "absent", True), (tmp_path / "file" / "run", False)):
        with pytest.raises(PolyaccelError) as caught:
            polyaccel.begin_run(str(folder), {}, resume=resume)
        assert str(folder) in str(caught.value)


# Progress.


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=5.0 / step,
        lr=(1e-3,),
        grad_norm=0.5,
        step_time_s=0.5,
        tokens_per_s=9000.0,
        phase_s={"forward": 0.2, "backward": 0.25, "other": 0.05},
    )


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_view, "time", SimpleNamespace(monotonic=itertools.count(100.0, 4.0).__next__))
    written = io.StringIO()
    console = Console(file=written, width=80)
    with progress_view.open_progress(5, rank=0, console=console) as progress:
        for step in (1, 2, 3, 4, 5):
            progress.step(metrics(step))
        progress.say("[bold]as it is[/bold]\x1b[31m")
    first, later, last, said = written.getvalue().splitlines()
    assert first == "step 1/5  loss 5.000  lr 1.0e-03  norm 0.50  9,000 tokens/s  0:16 left"
    assert later.startswith("step 4/5  loss 1.250")
    assert last.startswith("step 5/5  loss 1.000")
    assert last.endswith("0:00 left")
    assert said == "[bold]as it is[/bold]\ufffd[31m"


def test_a_terminal_that_an_mpirun_made_shows_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(progress_view.open_progress(5, rank=0, console=console), progress_view.LineProgress)


def test_a_terminal_shows_a_bar_within_80_columns() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=80, legacy_windows=False)
    with progress_view.open_progress(1000, rank=0, console=console) as progress:
        progress.step(metrics(500))
        progress.say("step 500: validation loss 1.5")
    assert "500/1000" in written.getvalue()
    for figure in ("loss 0.010", "lr 1.0e-03", "norm 0.50", "9,000 tokens/s", "step 500: validation loss 1.5"):
        assert figure in written.getvalue()


def test_other_ranks_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_view.open_progress(3, rank=1) as progress:
        progress.step(metrics(1))
        progress.say("text")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3700, "1:01:40")])
def test_clock(seconds: float, shown: str) -> None:
    assert progress_view.clock(seconds) == shown
