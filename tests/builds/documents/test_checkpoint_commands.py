"""The guides to checkpoints: their script runs, then every command, in order, on what the script has saved. What starts
ranks is a dry run: a test of its own starts such a job (`tests/procs/launch/test_elastic_job.py`)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "guide"
PAGES = [GUIDE / name for name in ("checkpoints.md", "crashes.md", "formats.md")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_command_of_the_pages_works_after_the_script(tmp_path: Path) -> None:
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
    for name in ("page.py", "train.py"):
        (tmp_path / name).write_text("\n".join(text for language, text in blocks if language == "python"))
    lines = [line for language, text in blocks if language == "sh" for line in text.splitlines()]
    assert all(line.startswith(("polyaccel ckpt ", "polyaccel run ")) for line in lines)
    lines = [line.replace("polyaccel run ", "polyaccel run --dry-run ") for line in lines]
    assert len(lines) >= 4
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    for command in (["page.py"], *(["-m", *shlex.split(line)] for line in lines)):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
