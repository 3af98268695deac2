"""What a plugin's pyproject.toml installs is every package in its folder: an editable install would hide one that is
not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

PLUGINS = sorted((Path(__file__).parents[2] / "plugins").glob("*/pyproject.toml"))


@pytest.mark.parametrize("described", PLUGINS, ids=[path.parent.name for path in PLUGINS])
def test_every_package_is_installed(described: Path) -> None:
    listed = tomllib.loads(described.read_text())["tool"]["setuptools"]["packages"]
    modules = described.parent.glob("*/**/*.py")
    folders = {path.parent.relative_to(described.parent) for path in modules}
    there = {".".join(folder.parts) for folder in folders if folder.parts[0] not in ("tests", "build")}
    assert sorted(there) == sorted(listed)
