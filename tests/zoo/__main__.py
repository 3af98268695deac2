"""Train tiny models of all of transformers' auto classes under each mesh, and write docs/zoo.md.

    python tests/zoo --jobs 2 --only causal

Rows are added to build/zoo/rows.jsonl as they end: a walk that is stopped goes on where it was.
"""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from datetime import date
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["POLYACCEL_MATRIX_KERNELS"] = "off"

from zoo_models import entries
from zoo_page import page
from zoo_walk import rows_of, walk

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run the walk."""
    parser = ArgumentParser(description="Train tiny models of transformers under each mesh.")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--only", default="", help="a part of the models' names")
    parser.add_argument(
        "--file", type=Path, default=ROOT / "build" / "zoo" / "rows.jsonl", help="rows, as lines of JSON"
    )
    parser.add_argument(
        "--again", nargs="*", default=(), metavar="RESULT", help="run rows with these results again, such as refused"
    )
    parser.add_argument("--page", action="store_true", help="write docs/zoo.md from the rows, and train nothing")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if not arguments.page:
        walk([one for one in entries() if arguments.only in one.key], arguments.file, arguments.jobs, arguments.again)
    if arguments.page or not arguments.only:
        text = page(rows_of(arguments.file), date.today())
        (ROOT / "docs" / "zoo.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
