"""`polyaccel watch`: the page of a run, live or frozen."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from polyaccel.cli.parser import describe, nearest
from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.document import open_runs, write_page
from polyaccel.observability.dashboard.run import is_run, runs_in
from polyaccel.observability.dashboard.server import PageServer

_DEFAULT = Path("runs")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "show runs on a page of this machine, while they train or later"
    parser = subparsers.add_parser("watch", help=what, description=what)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="FOLDER",
        help="folders of runs (run_dir in a config), or a folder that has such folders (default: the newest in runs/)",
    )
    parser.add_argument("--port", type=int, default=0, help="the port on 127.0.0.1 (default: any that is free)")
    parser.add_argument("--open", action="store_true", help="open the page in this machine's browser")
    parser.add_argument(
        "--export-html", type=Path, metavar="FILE", help="write the page with the runs into FILE, and end"
    )
    describe(
        parser,
        examples=(
            "polyaccel watch",
            "polyaccel watch runs/gpt runs/other",
            "polyaccel watch runs/gpt --export-html report.html",
        ),
    )
    parser.set_defaults(func=watch)


def watch(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write it. Raises PolyaccelError for a folder without runs."""
    runs = chosen_runs(args.runs)
    if args.export_html is not None:
        try:
            write_page(args.export_html, runs)
        except OSError as error:
            raise PolyaccelError(f"{args.export_html} cannot be written: {error}", hint="name another file") from error
        print(args.export_html)
        return 0
    server = PageServer(open_runs(runs), args.port)
    print(*(f"watching {run}" for run in runs), sep="\n")
    print(f"{server.url}\nThis machine shows it to anyone who has the address. Ctrl-C ends it.", flush=True)
    if args.open:
        webbrowser.open(server.url)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
    finally:
        server.close()
    return 0


def chosen_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the runs of `folders`: each that is a run, and of any other the runs in it. Without folders it is the
    newest run in `runs`. Raises PolyaccelError where there is none."""
    if not folders:
        found = runs_in(_DEFAULT)
        if not found:
            hint = 'name a folder, or set "run_dir" in a config'
            raise PolyaccelError(f"no run in {_DEFAULT.absolute()}", hint=hint, value=str(_DEFAULT))
        return found[:1]
    chosen: list[Path] = []
    for folder in folders:
        found = [folder] if is_run(folder) else runs_in(folder)
        if not folder.exists():
            name = nearest(folder.name, _with_runs(folder.parent))
            hint = f"did you mean {folder.with_name(name)}?" if name else 'name the folder of "run_dir" in a config'
            raise PolyaccelError(f"no such folder: {folder}", hint=hint, value=str(folder))
        chosen += found or [folder]  # the last is refused by its name
    return chosen


def _with_runs(parent: Path) -> list[str]:
    """Return the names of the folders in `parent` that are runs or have runs."""
    folders = (each for each in parent.iterdir() if each.is_dir()) if parent.is_dir() else ()
    return [each.name for each in folders if is_run(each) or runs_in(each)]
