"""The command of pip that adds an extra of polyaccel to this environment; `install_line` is all of it.

It imports no other module of polyaccel.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_line(extra: str) -> str:
    """Return a command that works for the way in which polyaccel was installed, for polyaccel is in no index yet.

    Args:
        extra: Name of an extra, such as `torch`.

    Returns:
        `pip install ...`: of the clone or folder from which polyaccel was installed, or of what the extra requires.
    """
    try:
        installed = metadata.distribution("polyaccel")
    except metadata.PackageNotFoundError:  # a source tree on the path
        return f"pip install '{Path(__file__).parents[2]}[{extra}]'"
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    folder = url2pathname(urlsplit(origin.get("url", "")).path)
    if "dir_info" in origin and Path(folder, "pyproject.toml").exists():
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{folder}[{extra}]'"
    of_extra = re.compile(rf"\bextra == ['\"]{re.escape(extra)}['\"]")
    wanted = [line.partition(";")[0].strip() for line in installed.requires or () if of_extra.search(line)]
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in wanted or [extra])])
