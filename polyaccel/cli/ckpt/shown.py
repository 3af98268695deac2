"""How the verbs of `polyaccel ckpt` show sizes, tables and progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> None:
    """Print columns as wide as what they hold; those of `right` are flush right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


@contextmanager
def progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the block runs, if that is a terminal; it receives the bytes of each part."""
    if not sys.stderr.isatty():
        yield lambda part: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda part: bar.advance(task, part)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """The option for the storage that a verb reads."""
    what = """`checkpoint.storage` as in the config, a name or JSON (default: fsspec for a URL, else a folder)"""
    parser.add_argument("--storage", metavar="STORAGE", help=what)
