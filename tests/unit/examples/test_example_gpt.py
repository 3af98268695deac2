"""The parts of examples/gpt: corpus, settings, run folders, progress, report."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_modules import example_modules
from rich.console import Console

from polyaccel import PolyaccelError
from polyaccel.observability.metrics import JsonlMonitor, StepMetrics


@pytest.fixture(scope="module")
def gpt() -> Iterator[SimpleNamespace]:
    with example_modules("gpt") as modules:
        yield modules


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library, with parts that are not the library's own."""
    root = tmp_path / "lib"
    for number in range(60):
        file = root / ("package" if number % 2 else ".") / f"module_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"name = {number}\n" * 5)
    for foreign in ("site-packages/other.py", "test/test_it.py", "data.txt"):
        (root / foreign).parent.mkdir(parents=True, exist_ok=True)
        (root / foreign).write_text("foreign")
    return root


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"size": None, "steps": None, "seed": None, "precision": None, "config": None, "eval_windows": None, **given}
    )


# Stopping.


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what listening replaces."""
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in former.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("is_torchrun", [False, True])
def test_the_first_signal_is_a_wish_and_the_second_ends_the_process(
    gpt: SimpleNamespace, handlers: None, monkeypatch: pytest.MonkeyPatch, is_torchrun: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if is_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    raised: list[tuple[int, Any]] = []
    now_s = 5.0
    wish = gpt.stopping.StopWish(lambda: now_s)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wish.listen()
    assert wish.signum == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert wish.signum == signal.SIGTERM
    monkeypatch.setattr(signal, "raise_signal", lambda number: raised.append((number, signal.getsignal(number))))
    if is_torchrun:
        now_s = 6.9
        os.kill(os.getpid(), signal.SIGTERM)  # the same press of a key
        assert raised == []
        now_s = 7.0
    os.kill(os.getpid(), signal.SIGINT)
    assert raised == [(signal.SIGINT, signal.SIG_DFL)]


def test_what_is_ignored_stays_ignored(gpt: SimpleNamespace, handlers: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wish = gpt.stopping.StopWish()
    wish.listen()
    os.kill(os.getpid(), signal.SIGINT)
    assert wish.signum == 0


# The model.


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.1), ("small", 10.8), ("medium", 28.6), ("large", 123.5)])
def test_sizes_are_what_the_help_says(gpt: SimpleNamespace, size: str, millions: float) -> None:
    with torch.device("meta"):
        model = gpt.model.Gpt(gpt.model.SHAPES[size])
    assert model.numel / 1e6 == pytest.approx(millions, abs=0.06)


def test_no_byte_sees_the_future(gpt: SimpleNamespace) -> None:
    torch.manual_seed(0)
    model = gpt.model.Gpt(gpt.model.SHAPES["tiny"]).eval()
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] += 1
    before, after = model(tokens), model(changed % 256)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-3)


def test_generation_is_a_function_of_the_seed_and_goes_past_the_context(gpt: SimpleNamespace) -> None:
    torch.manual_seed(0)
    shape = gpt.model.SHAPES["tiny"]
    model = gpt.model.Gpt(shape).eval()

    def draw(seed: int) -> bytes:
        return bytes(gpt.model.generate(model, shape, b"def ", 70, seed=seed, device=torch.device("cpu")))

    assert len(draw(1)) == 70 > shape.context
    assert draw(1) == draw(1) != draw(2)


# The corpus.


def test_every_file_of_the_library_is_in_one_part(gpt: SimpleNamespace, library: Path, tmp_path: Path) -> None:
    corpus = gpt.corpus.open_corpus(library, tmp_path / "cache")
    training, validation = corpus.files["training"], corpus.files["validation"]
    assert len(training) + len(validation) == len({*training, *validation}) == 60
    assert 0 < len(validation) < len(training)
    for part, names in corpus.files.items():
        text = getattr(corpus, part).read_bytes()
        assert text == b"".join((library / name).read_bytes() + b"\0" for name in names)


def test_a_files_part_does_not_depend_on_the_others(gpt: SimpleNamespace, library: Path, tmp_path: Path) -> None:
    before = gpt.corpus.open_corpus(library, tmp_path / "cache")
    (library / "zzz.py").write_text("new")
    after = gpt.corpus.open_corpus(library, tmp_path / "cache")
    assert set(before.files["training"]) <= set(after.files["training"])
    assert set(before.files["validation"]) <= set(after.files["validation"])
    assert before.digest != after.digest


def test_many_processes_may_open_it_at_once(gpt: SimpleNamespace, library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    barrier = threading.Barrier(4)
    found: list[Any] = []

    def open_it() -> None:
        barrier.wait(30)
        found.append(gpt.corpus.open_corpus(library, cache))

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert found.count(found[0]) == 4
    assert [folder.name.partition("-")[0] for folder in cache.iterdir()] == ["stdlib"]


def test_a_damaged_cache_and_an_empty_library_are_errors(gpt: SimpleNamespace, library: Path, tmp_path: Path) -> None:
    corpus = gpt.corpus.open_corpus(library, tmp_path / "cache")
    os.truncate(corpus.training, 10)
    with pytest.raises(PolyaccelError) as caught:
        gpt.corpus.open_corpus(library, tmp_path / "cache")
    assert caught.value.value == 2857
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolyaccelError) as caught:
        gpt.corpus.open_corpus(tmp_path / "empty", tmp_path / "cache")
    assert caught.value.value == str(tmp_path / "empty")


def test_windows_cover_the_bytes_and_targets_are_the_next_ones(gpt: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(25)))
    windows = gpt.windows.Windows(file, 8)
    assert len(windows) == 3
    tokens, targets = zip(*(windows[index] for index in range(3)), strict=True)
    assert torch.cat(tokens).tolist() == list(range(24))
    assert torch.cat(targets).tolist() == list(range(1, 25))
    with pytest.raises(IndexError):
        windows[3]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_validate_on_equally_many_windows(gpt: SimpleNamespace, tmp_path: Path, world_size: int) -> None:
    (tmp_path / "bytes").write_bytes(bytes(1001))
    windows = gpt.windows.Windows(tmp_path / "bytes", 10)
    shares = [
        gpt.corpus.validation_share(windows, count=12, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {12 // world_size}
    together = sorted(index for share in shares for index in share)
    assert together == gpt.corpus.validation_share(windows, count=12, rank=0, world_size=1)
    assert (together[0], together[-1]) == (0, 99)


# Settings.


def test_auto_is_decided_from_the_command_line(gpt: SimpleNamespace) -> None:
    settings = gpt.settings.Settings.begin(arguments(steps=60, precision="bf16"))
    scheduler = settings.config["scheduler"]["params"]
    assert (scheduler["total_num_steps"], scheduler["warmup_num_steps"]) == (60, 3)
    assert settings.config["bf16"] == {"enabled": True}
    assert gpt.settings.Settings.begin(arguments(precision="fp32")).config["bf16"] == {"enabled": False}
    assert "auto" not in json.dumps(settings.config)


@pytest.mark.parametrize(("section", "chosen"), [("bf16", "bf16"), ("fp16", "fp16"), ("none", "fp32")])
def test_a_config_may_decide_the_precision_itself(
    gpt: SimpleNamespace, tmp_path: Path, section: str, chosen: str
) -> None:
    config = {"train_batch_size": 4, **({section: {"enabled": True}} if section != "none" else {})}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    settings = gpt.settings.Settings.begin(arguments(config=file))
    assert (settings.precision, settings.config) == (chosen, config)
    other = "fp32" if chosen == "bf16" else "bf16"
    with pytest.raises(PolyaccelError) as caught:
        gpt.settings.Settings.begin(arguments(config=file, precision=other))
    assert caught.value.value == other
    assert all(part in str(caught.value) for part in ("--precision", chosen))


@pytest.mark.parametrize(
    ("flags", "fast"),
    [("fpu avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True), ("fpu avx2 avx512f", False), ("", False)],
)
def test_bf16_is_for_processors_that_are_fast_at_it(
    gpt: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, fast: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(gpt.settings, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("POLYACCEL_ACCELERATOR", "cpu")
    assert gpt.settings.has_fast_bf16() is fast
    assert gpt.settings.Settings.begin(arguments()).precision == ("bf16" if fast else "fp32")


def test_a_resumed_run_keeps_its_settings(gpt: SimpleNamespace, tmp_path: Path) -> None:
    settings = gpt.settings.Settings.begin(arguments(size="tiny", steps=8, precision="fp32"))
    settings.save(tmp_path / "settings.json")
    resumed = gpt.settings.Settings.load(tmp_path / "settings.json")
    assert resumed == settings
    resumed.check_same(arguments())
    resumed.check_same(arguments(size="tiny", steps=8, precision="auto"))
    with pytest.raises(PolyaccelError) as caught:
        resumed.check_same(arguments(steps=9))
    assert caught.value.value == {"steps": 9}
    assert "--steps" in str(caught.value)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**settings.config, "train_batch_size": 2}))
    with pytest.raises(PolyaccelError) as caught:
        resumed.check_same(arguments(config=other))
    assert "--config" in str(caught.value)


# Run folders.


def test_a_new_run_gets_a_folder_of_its_own(gpt: SimpleNamespace, tmp_path: Path) -> None:
    choose = gpt.run_dir.choose_folder
    names = []
    for _ in range(3):
        folder = choose(tmp_path, None, resume=False)
        folder.path.mkdir()
        folder.settings.write_text("{}")
        names.append(folder.path.name)
    assert names == ["gpt", "gpt-2", "gpt-3"]
    with pytest.raises(PolyaccelError) as caught:
        choose(tmp_path, "gpt-2", resume=False)
    assert caught.value.value == "gpt-2"
    assert "--resume" in str(caught.value)


def test_resuming_takes_the_named_run_or_the_one_active_last(gpt: SimpleNamespace, tmp_path: Path) -> None:
    choose = gpt.run_dir.choose_folder
    with pytest.raises(PolyaccelError) as caught:
        choose(tmp_path, None, resume=True)
    assert "--resume" in str(caught.value)
    for age, name in enumerate(["late", "early"]):
        folder = gpt.run_dir.RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.settings.write_text("{}")
        folder.metrics.write_text("")
        for file in folder.path.iterdir():
            os.utime(file, (1000 - age, 1000 - age))
    assert choose(tmp_path, None, resume=True).path.name == "late"
    assert choose(tmp_path, "early", resume=True).path.name == "early"
    with pytest.raises(PolyaccelError) as caught:
        choose(tmp_path, "never", resume=True)
    assert caught.value.value == "never"


# Progress and report.


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


def test_without_a_terminal_there_are_plain_lines(gpt: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt.progress, "time", SimpleNamespace(monotonic=itertools.count(100.0, 4.0).__next__))
    written = io.StringIO()
    console = Console(file=written, width=80)
    with gpt.progress.open_progress(total=5, done=0, rank=0, console=console) as progress:
        for step in (1, 2, 3, 4, 5):
            progress.step(metrics(step))
        progress.say("[bold]as it is[/bold]")
    first, later, last, said = written.getvalue().splitlines()
    assert first == "step 1/5  loss 5.000  lr 1.0e-03  norm 0.50  9,000 tokens/s  0:16 left"
    assert later.startswith("step 4/5  loss 1.250")
    assert last.startswith("step 5/5  loss 1.000")
    assert last.endswith("0:00 left")
    assert said == "[bold]as it is[/bold]"


def test_a_terminal_that_an_mpirun_made_shows_plain_lines(
    gpt: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(gpt.progress.open_progress(total=5, done=0, rank=0, console=console), gpt.progress.LineProgress)


def test_a_terminal_shows_a_bar_within_80_columns(gpt: SimpleNamespace) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=80, legacy_windows=False)
    with gpt.progress.open_progress(total=1000, done=0, rank=0, console=console) as progress:
        progress.step(metrics(500))
        progress.say("step 500: validation loss 1.5")
    assert "500/1000" in written.getvalue()
    for figure in ("loss 0.010", "lr 1.0e-03", "norm 0.50", "9,000 tokens/s", "step 500: validation loss 1.5"):
        assert figure in written.getvalue()


def test_other_ranks_show_nothing(gpt: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    with gpt.progress.open_progress(total=3, done=0, rank=1) as progress:
        progress.step(metrics(1))
        progress.say("text")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3700, "1:01:40")])
def test_clock(gpt: SimpleNamespace, seconds: float, shown: str) -> None:
    assert gpt.progress.clock(seconds) == shown


def test_the_report_needs_no_other_file_and_says_what_happened(gpt: SimpleNamespace, tmp_path: Path) -> None:
    folder = gpt.run_dir.RunFolder(tmp_path / "run<1>")
    monitor = JsonlMonitor()
    monitor.open(folder.path, {})
    monitor.write_events([("validation_loss", 5.5, 0)])
    for step in (1, 2, 2, 3):  # a resumed run writes a step again
        monitor.write(metrics(step))
    monitor.write_events([("validation_loss", 1.75, 3)])
    monitor.close()
    summary = {
        "accelerator": "cpu",
        "comm": "gloo",
        "world_size": 2,
        "zero_stage": 2,
        "parameters": 10_000_000,
        "precision": "bf16",
        "peak_memory_nbytes": [2**20 * 1234, 2**20 * 567],
        "traffic_numel": [10_500_000, None],
    }
    folder.summary.write_text(json.dumps(summary))
    folder.sample.write_text("def <script>():")
    folder.settings.write_text('{"zero_optimization": 2}')
    gpt.report.write_report(folder)

    page = folder.report.read_text()
    for told in ("run&lt;1&gt;", "5.500 at first, 1.750 at last", "1,234 MiB", "567 MiB", "10.50 M elements"):
        assert told in page
    assert "10.00 M elements" in page  # the formula
    assert "<td>steps</td><td>3</td>" in page
    assert "zero_optimization" in page
    assert "def &lt;script&gt;():" in page
    assert all(link not in page for link in ("http", "src=", "<script>", "<link"))
    forward, other = 3 * 0.2 / 1.5, 3 * 0.05 / 1.5
    assert f'<td>forward</td><td class="n">0.6 s</td><td class="n">{forward:.0%}</td>' in page
    assert f'<td>other</td><td class="n">0.2 s</td><td class="n">{other:.0%}</td>' in page
    assert folder.loss_png.read_bytes().startswith(b"\x89PNG")


def test_the_report_of_a_run_without_steps_is_a_page_too(gpt: SimpleNamespace) -> None:
    assert gpt.report.loss_svg([], []) == "<p>no step was taken</p>"
    assert "polyline" in gpt.report.loss_svg([], [(0, 5.5)])


def test_a_sample_never_controls_the_terminal(gpt: SimpleNamespace) -> None:
    assert gpt.train.readable(b"a\x1b[31m\x00b\xff\tc\n") == "a\ufffd[31m\nb\ufffd\tc\n"
