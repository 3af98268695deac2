"""The picture of README: a terminal that trains, and the page that the run leaves.

`python docs/generate/demo_picture.py` runs `make train`, shows its report in a headless Chromium, and writes
docs/pictures/demo.svg. Other arguments are another command that writes below runs/, such as a short one for a try:
`python docs/generate/demo_picture.py polyaccel run --ranks 2 examples/gpt/train.py --size tiny`.
"""

from __future__ import annotations

import base64
import html
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COLUMNS, _LINES = 84, 22
_LINE = 18
_PAGE = (820, 620)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def recorded(command: Sequence[str]) -> list[str]:
    """Run a command and return the lines that it printed, without colours and progress that was overwritten."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    return [line.rpartition("\r")[2].rstrip() for line in plain.splitlines()]


def screenshot(page: Path) -> bytes:
    """Return a PNG of a page as a browser shows it."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise SystemExit("no Chromium was found\n  hint: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.png"
        quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        size = ",".join(map(str, _PAGE))
        command = [browser, "--headless", "--no-sandbox", *quiet, f"--user-data-dir={folder}/profile"]
        command += ["--hide-scrollbars", f"--window-size={size}", f"--screenshot={file}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return file.read_bytes()


def shown(command: str, lines: Sequence[str]) -> list[str]:
    """Return what fits into the terminal: the command, the first lines, and the last ones."""
    cut = [line[:_COLUMNS] for line in lines if line]
    room = _LINES - 1
    if len(cut) > room:
        first = room // 2
        cut = [*cut[:first], "...", *cut[len(cut) - (room - first - 1) :]]
    return [f"$ {command}", *cut]


def picture(lines: Sequence[str], page: bytes) -> str:
    """Return the SVG: a terminal, and the page below it."""
    width, terminal = _PAGE[0], len(lines) * _LINE + 40
    height = terminal + 16 + _PAGE[1]
    bold = ' font-weight="bold"'
    texts = "\n".join(
        f'<text x="16" y="{44 + index * _LINE}" xml:space="preserve"{"" if index else bold}>{html.escape(line)}</text>'
        for index, line in enumerate(lines)
    )
    colours = ("#ff5f56", "#ffbd2e", "#27c93f")
    dots = "".join(f'<circle cx="{18 + 18 * n}" cy="14" r="5" fill="{colour}"/>' for n, colour in enumerate(colours))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>A run in a terminal, and the page that it leaves</title>
<rect width="{width}" height="{terminal}" rx="8" fill="#1e1e2e"/>{dots}
<g font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14" fill="#e0e0e0">
{texts}
</g>
<image x="0" y="{terminal + 16}" width="{width}" height="{_PAGE[1]}" href="data:image/png;base64,{base64.b64encode(page).decode()}"/>
<rect x="0.5" y="{terminal + 16.5}" width="{width - 1}" height="{_PAGE[1] - 1}" fill="none" stroke="#9e9e9e"/>
</svg>
"""  # noqa: E501


if __name__ == "__main__":
    given = sys.argv[1:] or ["make", "train"]
    printed = shown(shlex.join(given), recorded(given))
    report = max(ROOT.glob("runs/*/report.html"), key=lambda file: file.stat().st_mtime)
    (ROOT / "docs" / "pictures" / "demo.svg").write_text(picture(printed, screenshot(report)), encoding="utf-8")
