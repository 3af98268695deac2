"""The contract of every plugin before it is used: its class loads and its probe answers, in its own process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cached_property
from typing import Any

from polyaccel.registry import PluginGroup
from polyaccel.testkit.comparison import equal
from polyaccel.testkit.contract import BrokenPromise

_START_TIMEOUT_S = 60.0
_HINT = "\n  hint: "  # between an error's message and its hint
_OUR_ERROR = re.compile(r"^polyaccel(\.\w+)+: ")
_PROGRAM = """
import faulthandler, json, sys
from polyaccel.registry import PATIENCE_S, PluginGroup, find_plugin, probe_plugin
from polyaccel.testkit.suites import load
before = set(sys.modules)
faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
group, name = PluginGroup(sys.argv[1]), sys.argv[2]
plugin = load(group, name)
print("\\nloaded", flush=True)
faulthandler.dump_traceback_later(PATIENCE_S + float(sys.argv[3]), exit=True)  # one that holds the interpreter's lock
probe = probe_plugin(find_plugin(group, name), plugin, limit_s=PATIENCE_S)
faulthandler.cancel_dump_traceback_later()
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before} & {"torch", "jax"})
print("\\n" + json.dumps({"usable": probe.usable, "reason": probe.reason, "loaded": loaded}))
"""


class LoadingContract:
    """Tests of the plugin called `name`. The first to run starts the process, in which no other test has loaded a
    framework; importing the plugin may take `timeout_s`, probing it five seconds."""

    def __init__(self, group: PluginGroup, name: str, timeout_s: float) -> None:
        self._group, self._name, self._timeout_s = group, name, timeout_s

    def test_the_class_loads(self) -> None:
        """The entry point names a class of the contract for this API version, without an abstract method left: nothing
        else can be called."""
        if "loaded" not in self._done.stdout.splitlines():
            raise self._broken("importing it")

    def test_the_probe_answers(self) -> None:
        """`probe` returns a Probe with a reason within five seconds and raises nothing: every start of every job asks
        all plugins."""
        self.test_the_class_loads()
        if self._answer is None:
            raise self._broken("probing it")
        if not self._answer["reason"]:
            raise AssertionError("reason of the probe: expected a sentence, got an empty one")

    def test_probing_loads_no_framework(self) -> None:
        """Importing and probing it imports neither torch nor JAX, which takes seconds in each start of every job."""
        self.test_the_probe_answers()
        equal(self._answer and self._answer["loaded"], [], "frameworks that importing and probing it imports")

    def test_it_can_be_used_here(self) -> None:
        """The probe finds what the plugin needs, so that what follows can be tried."""
        self.test_the_probe_answers()
        if self._answer is not None and not self._answer["usable"]:
            hint = "fix what is missing here, or run the check where it is there"
            raise BrokenPromise(f"cannot be used here: {self._answer['reason']}", hint=hint)

    @cached_property
    def _done(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _PROGRAM, self._group.value, self._name, str(self._timeout_s)]
        most_s = _START_TIMEOUT_S + 3 * self._timeout_s
        return subprocess.run(command, capture_output=True, text=True, timeout=most_s, check=False)

    @property
    def _answer(self) -> dict[str, Any] | None:
        lines = self._done.stdout.splitlines()
        if self._done.returncode or not lines:
            return None
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    def _broken(self, doing: str) -> BrokenPromise:
        """The failure of what the process was doing, its error's message and hint apart."""
        message, _, hint = self._complaint(doing).partition(_HINT)
        return BrokenPromise(message, hint=hint or f"fix what {doing} runs: it may wait for nothing and raise nothing")

    def _complaint(self, doing: str) -> str:
        """What ended the process, or that its time limit did, with the place where it stood."""
        stderr = self._done.stderr
        if not stderr.startswith("Timeout (") and "\nTimeout (" not in stderr:
            return f"{doing}: {complaint(stderr)}"
        stack = [line.strip() for line in stderr.rpartition("Timeout (")[2].splitlines()]
        frames = [line for line in stack if line.startswith("File")]
        late = f"{doing}: expected an end within {self._timeout_s:g} s, got none"
        return f"{late}; it stood at {frames[0]}" if frames else late


def complaint(stderr: str) -> str:
    """The error that ended a Python process: the line that starts the message, without the traceback above it."""
    lines = stderr.strip().splitlines() or ["the process died without a word"]
    starts = [index for index, line in enumerate(lines) if _OUR_ERROR.match(line)]
    return _OUR_ERROR.sub("", "\n".join(lines[starts[-1] :]), count=1) if starts else lines[-1]
