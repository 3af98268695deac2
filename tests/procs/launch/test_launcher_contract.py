"""The built-in launchers of this machine keep the contract of launchers, with real processes."""

from __future__ import annotations

import os

import pytest

from polyaccel.launch.elastic.launcher import TorchElasticLauncher
from polyaccel.launch.local import LocalLauncher
from polyaccel.testkit.launcher import LauncherContract


class TestLocal(LauncherContract):
    def make(self) -> LocalLauncher:
        return LocalLauncher()


@pytest.mark.skipif(os.environ.get("TESTS_ELASTIC") != "full", reason="TESTS_ELASTIC=full runs it: make test-elastic")
class TestTorchElastic(LauncherContract):
    def make(self) -> TorchElasticLauncher:
        return TorchElasticLauncher()
