"""Throw-away distributions: wheels of one module, installed by pip into a directory of their own."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Distribution:
    """`package` at `version`: the module `package` with `source`, and entry points `{group: {name: value}}`."""

    package: str
    version: str
    source: str
    entry_points: Mapping[str, Mapping[str, str]]

    def build(self, directory: Path) -> Path:
        """The wheel, written by hand: a build backend for every one of them would take seconds."""
        info = f"{self.package}-{self.version}.dist-info"
        files = {
            f"{self.package}.py": self.source,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.package}\nVersion: {self.version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": "".join(
                f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
                for group, names in self.entry_points.items()
            ),
        }
        record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in files.items())
        directory.mkdir(parents=True, exist_ok=True)
        wheel = directory / f"{self.package}-{self.version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
                archive.writestr(path, text)
        return wheel


def install(site: Path, *distributions: Distribution) -> None:
    """Let pip install them under `site`, replacing older versions."""
    wheels = [str(distribution.build(site.parent / "wheels")) for distribution in distributions]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    subprocess.run(
        [*pip, "--target", str(site), *wheels],
        check=True,
        timeout=100,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )


def python(code: str, *sites: Path, cache: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter that sees `sites` first and keeps stevedore's cache below `cache`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("POLYACCEL_", "DS_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, sites)), "XDG_CACHE_HOME": str(cache)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    if check and done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
