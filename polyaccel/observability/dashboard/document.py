"""The page as one HTML file: layout, style and script, and with them the runs, where it is frozen."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.run import WatchedRun

_SCRIPTS = ("charts.js", "cards.js", "page.js")


def live_page() -> str:
    """The page that asks its server for the runs."""
    return _document({"runs": None})


def frozen_page(runs: Sequence[WatchedRun]) -> str:
    """The page with the runs as they are now. It needs no other file, and no server."""
    return _document({"runs": [run.shown() for run in runs]})


def write_page(path: Path, folders: Sequence[Path]) -> None:
    """Write the runs in `folders` as one page, whole or not at all."""
    runs = open_runs(folders)
    for run in runs:
        run.look()
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(frozen_page(runs), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def open_runs(folders: Sequence[Path]) -> list[WatchedRun]:
    """Open the runs in `folders` under their shortest distinct names."""
    whole = [folder.resolve() for folder in folders]
    if len(set(whole)) < len(whole):
        twice = next(folder for at, folder in enumerate(whole) if folder in whole[:at])
        raise PolyaccelError(f"{twice} is named twice", hint="name each run once", value=str(twice))
    for length in range(1, max(len(folder.parts) for folder in whole) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in whole]
        if len(set(names)) == len(names):
            break
    return [WatchedRun(folder, name) for folder, name in zip(folders, names, strict=True)]


def as_json(state: Any) -> str:
    """Strict JSON that can stand in a script of HTML: nothing in it looks like a tag."""
    text = json.dumps(state, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _document(state: Any) -> str:
    style, layout = _part("page.css"), _part("page.html")
    script = "\n".join(_part(name) for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": style, "DATA": as_json(state), "SCRIPT": script}
    return re.sub(f"@({'|'.join(parts)})@", lambda mark: parts[mark[1]], layout)


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """What a content security policy calls an inline part by."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
