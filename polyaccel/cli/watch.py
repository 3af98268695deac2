"""`polyaccel watch`: the page of a run, live or frozen."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.document import open_runs, write_page
from polyaccel.observability.dashboard.server import PageServer


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "show runs on a page of this machine, while they train or later"
    parser = subparsers.add_parser("watch", help=what, description=what)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run (its `run_dir`)")
    parser.add_argument("--port", type=int, default=0, help="the port on 127.0.0.1; default: any that is free")
    parser.add_argument("--open", action="store_true", help="open the page in this machine's browser")
    parser.add_argument(
        "--export-html", type=Path, metavar="FILE", help="write the page with the runs into FILE, and end"
    )
    parser.set_defaults(func=watch)


def watch(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write it. Raises PolyaccelError for what is not a run's folder."""
    if args.export_html is not None:
        try:
            write_page(args.export_html, args.runs)
        except OSError as error:
            raise PolyaccelError(f"{args.export_html} cannot be written: {error}", hint="name another file") from error
        print(args.export_html)
        return 0
    server = PageServer(open_runs(args.runs), args.port)
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
