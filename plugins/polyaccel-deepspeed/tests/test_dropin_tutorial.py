"""The tutorial for the Trainer and Accelerate: its files are written, and each of its jobs runs on two ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from client_runs import LAUNCH, TIMEOUT_S, run, torchrun

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "from_trainer.md"
TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = {
    "torchrun --standalone --nproc-per-node 2 trainer.py": [*torchrun(), "trainer.py"],
    "polyaccel run --ranks 2 trainer.py": ["-m", "polyaccel", "run", "--ranks", "2", "trainer.py"],
    "accelerate launch --use_deepspeed --num_processes 2 accelerated.py": [
        *LAUNCH, "--use_deepspeed", "accelerated.py",
    ],
}  # fmt: skip
"""Commands of the page, and how this Python starts them."""
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_of_the_page_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert re.search(rf"^( *)```text\n\1{re.escape(command)}\n\1```$", page, re.MULTILINE)
    for name, text in TITLED.findall(page):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    printed = run(*COMMANDS[command])
    assert sorted(re.findall(r"rank (\d): loss", printed)) == ["0", "1"]
