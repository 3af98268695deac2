"""Virtual environments with polyaccel and what it declares to require, and truly nothing else: links into this one."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

import polyaccel


class BareEnvironment:
    """An environment in `folder` with the packages that polyaccel requires, and `packages` with what those require."""

    def __init__(self, folder: Path, *packages: str) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self._site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self._linked = {"polyaccel"}
        ours = distribution("polyaccel")
        self._link_polyaccel(ours)
        for name in (*_required(ours), *packages):
            self._link(name)

    def run(self, *arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Python with `arguments`, working in `folder`; none of this environment's own variables for Python."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "POLYACCEL_", "DS_"))
        }
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=folder,
            env={**kept, "XDG_CACHE_HOME": str(folder / "cache"), **variables},
            capture_output=True,
            text=True,
            timeout=150,
        )

    def _link_polyaccel(self, ours: Distribution) -> None:
        """Its sources and its compiled library, which lie apart where it is installed for development."""
        package = self._site / "polyaccel"
        package.mkdir()
        installed = Path(str(ours.locate_file("polyaccel")))
        for source in {Path(polyaccel.__file__).parent, installed}:
            for entry in source.iterdir() if source.exists() else ():
                (package / entry.name).symlink_to(entry)
        self._link_entries(ours, {file.parts[0] for file in ours.files or () if file.parts[0].endswith(".dist-info")})

    def _link(self, name: str) -> None:
        if name not in self._linked:
            self._linked.add(name)
            found = distribution(name)
            self._link_entries(found, {file.parts[0] for file in found.files or () if file.parts[0] != ".."})
            for required in _required(found):
                self._link(required)

    def _link_entries(self, found: Distribution, entries: set[str]) -> None:
        for entry in entries - {"__pycache__"}:
            link = self._site / entry
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(entry))))


def _required(found: Distribution) -> list[str]:
    """The packages that it requires here, without those of its extras."""
    requirements = map(Requirement, found.requires or ())
    return [one.name.lower() for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
