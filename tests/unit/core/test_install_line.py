"""The line that installs an extra works for the way in which polyaccel was installed."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from polyaccel.core.install_line import install_line

ROOT = Path(__file__).parents[3]


class _Installed:
    """A distribution as pip leaves it, with this origin."""

    requires = ("numpy>=1.24", "fsspec>=2024.6; extra == 'fsspec'", 's3fs>=2024.6; extra == "fsspec"')

    def __init__(self, origin: object) -> None:
        self._origin = json.dumps(origin) if origin else None

    def read_text(self, name: str) -> str | None:
        return self._origin if name == "direct_url.json" else None


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({"url": ROOT.as_uri(), "dir_info": {"editable": True}}, f"pip install -e '{ROOT}[fsspec]'"),
        ({"url": ROOT.as_uri(), "dir_info": {}}, f"pip install '{ROOT}[fsspec]'"),
        ({"url": "file:///gone", "dir_info": {}}, "pip install 'fsspec>=2024.6' 's3fs>=2024.6'"),
        ({"url": "file:///a.whl", "archive_info": {}}, "pip install 'fsspec>=2024.6' 's3fs>=2024.6'"),
        (None, "pip install 'fsspec>=2024.6' 's3fs>=2024.6'"),
    ],
)
def test_the_line_follows_the_installation(origin: object, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: _Installed(origin))
    assert install_line("fsspec") == line


def test_a_source_tree_on_the_path_is_installed_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_line("jax") == f"pip install '{ROOT}[jax]'"


def test_no_text_names_a_package_that_is_not_published() -> None:
    """Pages, messages and comments of the project ask pip for a clone, or for what an extra requires."""
    named = re.compile(r"pip install[^`\n]*[ '\"]polyaccel[-\w]*[\['\" `)]")
    files = [
        *ROOT.glob("polyaccel/**/*.py"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("recipes/*"),
        *ROOT.glob("plugins/*/README.md"),
        ROOT / "README.md",
    ]
    found = [file for file in files if named.search(file.read_text(encoding="utf-8"))]
    assert found == []
