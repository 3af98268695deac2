"""Progress of a training on standard output: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from polyaccel.comm.default import default_communicator
from polyaccel.observability.metrics import StepMetrics

_LINES_EVERY_S = 10.0


class Progress(ABC):
    """The progress of a training, as a context manager."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @abstractmethod
    def step(self, metrics: StepMetrics) -> None:
        """Show an optimizer step.

        Args:
            metrics: The figures of the step, `engine.metrics`.
        """

    @abstractmethod
    def say(self, text: str) -> None:
        """Print text above the progress.

        Args:
            text: One line or several. Control characters in it, as a model may generate, are replaced.
        """

    def close(self) -> None:  # noqa: B027 - only the bar has something to put away
        """Give the terminal back."""


def open_progress(total: int, done: int = 0, *, rank: int | None = None, console: Console | None = None) -> Progress:
    """Return the progress of a training for its steps.

    Args:
        total: Optimizer steps of the whole run.
        done: Steps that were taken before, as by a resumed run.
        rank: This rank; None for that of the default communicator.
        console: Where it is shown; None for standard output.

    Returns:
        A bar where standard output is a terminal, else a line about every ten seconds. Ranks except 0 show nothing.
    """
    if (default_communicator().rank if rank is None else rank) != 0:
        return SilentProgress()
    console = console or Console(highlight=False)
    # Open MPI gives its first rank a terminal even where its own output is a file, which a bar would fill.
    draws = console.is_terminal and "OMPI_COMM_WORLD_RANK" not in os.environ
    return BarProgress(console, total, done) if draws else LineProgress(console, total, done)


class SilentProgress(Progress):
    """No output, for ranks except the first."""

    def step(self, metrics: StepMetrics) -> None:
        return None

    def say(self, text: str) -> None:
        return None


class BarProgress(Progress):
    """A bar with the figures of the last step, 80 columns or wider."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._bar = RichProgress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, completed=done, figures="")
        self._bar.start()

    def step(self, metrics: StepMetrics) -> None:
        self._bar.update(self._task, completed=metrics.step, figures=describe(metrics))

    def say(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False)

    def close(self) -> None:
        self._bar.stop()


class LineProgress(Progress):
    """A line for the first step, for the last, and about every ten seconds in between."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console = console
        self._total = total
        self._done = done
        self._began_s = self._shown_s = time.monotonic()

    def step(self, metrics: StepMetrics) -> None:
        now_s = time.monotonic()
        taken = metrics.step - self._done
        if taken > 1 and metrics.step < self._total and now_s - self._shown_s < _LINES_EVERY_S:
            return
        self._shown_s = now_s
        left_s = (self._total - metrics.step) * (now_s - self._began_s) / taken
        width = len(str(self._total))
        self.say(f"step {metrics.step:{width}}/{self._total}  {describe(metrics)}  {clock(left_s)} left")

    def say(self, text: str) -> None:
        self._console.print(printable(text), markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """Replace what would control a terminal in `text`."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def describe(metrics: StepMetrics) -> str:
    """A step's figures: loss, learning rate, gradient norm before clipping, tokens a second of all ranks."""
    figures = [
        ("loss", None if metrics.loss is None else f"{metrics.loss:.3f}"),
        ("lr", f"{metrics.lr[0]:.1e}"),
        ("norm", None if metrics.grad_norm is None else f"{metrics.grad_norm:.2f}"),
    ]
    shown = [f"{name} {value}" for name, value in figures if value is not None]
    if metrics.tokens_per_s is not None:
        shown.append(f"{metrics.tokens_per_s:,.0f} tokens/s")
    return "  ".join(shown)


def clock(seconds: float) -> str:
    """`seconds` as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
