"""The built-in launcher keeps the contract of launchers, with real processes."""

from __future__ import annotations

from polyaccel.launch.local import LocalLauncher
from polyaccel.testkit.launcher import LauncherContract


class TestLocal(LauncherContract):
    def make(self) -> LocalLauncher:
        return LocalLauncher()
