"""The commit-msg hook accepts the subjects that CONTRIBUTING describes, and git's own, and refuses other ones."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
HOOKS = [hook for repository in CONFIG["repos"] for hook in repository["hooks"]]
(ENTRY,) = (hook["entry"].split() for hook in HOOKS if hook.get("stages") == ["commit-msg"])
ACCEPTED = [
    "zero: reduce a bucket when it is full",
    "drop-in: honour the options of zero_to_fp32",
    "torch/pipeline: pass tuples between stages",
    ".ci: check the subject of a commit",
    "comm: embed the seed in each message",
    "tests: suppress a warning of jax\n\nBecause it is one line of each run.",
    "x: add " + "y" * 65,
    "docs: name the rooms\n# Please enter the commit message for your changes.\n#\n",
    "docs: show the diff\n\n# ------------------------ >8 ------------------------\ndiff --git a/b b/b\n",
    "Merge branch 'w-habits'",
    "merge: habits",
    'Revert "zero: ' + "y" * 90 + '"',
    "fixup! zero: reduce a bucket when it is full",
]
REFUSED = [
    "",
    "reduce a bucket when it is full",
    "zero: ",
    "zero : reduce a bucket",
    "zero: reduced a bucket when it is full",
    "zero: reduces a bucket when it is full",
    "zero: reducing a bucket when it is full",
    "zero: the bucket that is full",
    "zero: Reduce a bucket when it is full",
    "zero: reduce a bucket.",
    "x: add " + "y" * 66,
    "zero: reduce a bucket\nwhen it is full",
    "merging",
]


PROBLEMS = runpy.run_path(str(ROOT / ENTRY[1]))["problems"]


@pytest.mark.parametrize("message", ACCEPTED)
def test_a_good_message_passes(message: str) -> None:
    assert PROBLEMS(message) == []


@pytest.mark.parametrize("message", REFUSED)
def test_another_message_is_refused(message: str) -> None:
    assert PROBLEMS(message) != []


@pytest.mark.parametrize(("message", "code"), [(ACCEPTED[0], 0), (REFUSED[0], 1)])
def test_the_hook_ends_with_the_code_that_pre_commit_expects(message: str, code: int, tmp_path: Path) -> None:
    (file := tmp_path / "message").write_text(message, encoding="utf-8")
    done = subprocess.run([sys.executable, "-IS", ROOT / ENTRY[1], file], capture_output=True, timeout=280)
    assert done.returncode == code
    assert bool(done.stderr) is bool(code)


def test_pre_commit_installs_both_kinds_of_hooks_and_runs_the_others_before_a_commit() -> None:
    assert set(CONFIG["default_install_hook_types"]) == {"pre-commit", "commit-msg"}
    assert CONFIG["default_stages"] == ["pre-commit"]
    assert ENTRY[0] == ".venv/bin/python"
