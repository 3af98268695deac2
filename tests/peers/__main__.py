"""Peers' own tests of their DeepSpeed integrations, over the drop-in: `make test-peers`.

`python tests/peers` fetches a suite at its commit and runs what stands in `outcomes.json`: the tests that pass under
DeepSpeed 0.19.8 on CPUs. `--record` writes that list, in an environment that has DeepSpeed. `--sources DIR`
takes DIR/NAME in place of a fetch. Nothing of a suite is kept in this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from stand_ins import make_hub

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = HERE / "outcomes.json"
LIMIT_S = 3600


@dataclass(frozen=True)
class Suite:
    """A suite: where it is from, and the files of it that concern DeepSpeed. Those in `folder` are named from there."""

    url: str
    commit: str
    folder: str
    files: tuple[str, ...]
    package: str = "."
    """The folder of its package, where the tests are not those of a released one."""
    choice: str = ""
    """What the names of tests of DeepSpeed have in them, where files have others too: pytest's `-k`."""


SUITES = {
    "accelerate": Suite(
        "https://github.com/huggingface/accelerate",
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        "tests",
        (
            "deepspeed/test_deepspeed.py",
            "deepspeed/test_deepspeed_gradient_accumulation.py",
            "deepspeed/test_deepspeed_multiple_model.py",
        ),
    ),
    "lightning": Suite(
        "https://github.com/Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "tests",
        (
            "tests_pytorch/strategies/test_deepspeed.py",
            "tests_pytorch/plugins/precision/test_deepspeed_precision.py",
            "tests_pytorch/utilities/test_deepspeed_collate_checkpoint.py",
            "tests_fabric/strategies/test_deepspeed.py",
            "tests_fabric/strategies/test_deepspeed_integration.py",
            "tests_fabric/plugins/precision/test_deepspeed.py",
            "tests_fabric/plugins/precision/test_deepspeed_integration.py",
        ),
        package="src",
    ),
    "transformers": Suite(
        "https://github.com/huggingface/transformers",
        "d6a6c82680cba9c51decdacac6dd6315ea4a766a",
        "tests",
        ("deepspeed/test_deepspeed.py", "deepspeed/test_alst_ulysses_sp.py"),
        package="src",
    ),
    "trl": Suite(
        "https://github.com/huggingface/trl",
        "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        "tests",
        ("distributed/test_distributed.py",),
        choice="zero",
    ),
}


def fetch(suite: Suite, into: Path) -> None:
    """Get the suite at its commit, once."""
    if (into / "tests").is_dir():
        return
    into.mkdir(parents=True, exist_ok=True)
    for command in (
        ("init", "-q"),
        ("fetch", "-q", "--depth", "1", suite.url, suite.commit),
        ("checkout", "-q", "FETCH_HEAD"),
    ):
        subprocess.run(["git", *command], cwd=into, check=True)


def outcomes_of(name: str, source: Path, hub: Path, tests: list[str], extra: list[str]) -> dict[str, tuple[str, str]]:
    """Run `tests` of a suite, or all; return outcome and text by test."""
    suite = SUITES[name]
    where = source / suite.folder
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcomes")
        out.touch()
        environment = {
            **os.environ,
            "PEERS_SUITE": name,
            "PEERS_OUTCOMES": str(out),
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(where), str(source / suite.package), str(source), os.environ.get("PYTHONPATH", "")]
            ),
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(hub),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        options = ["-q", "-p", "skips", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(where)]
        if suite.choice:
            options += ["-k", suite.choice]
        command = [sys.executable, "-m", "pytest", *options, *extra, *(tests or suite.files)]
        subprocess.run(command, cwd=where, env=environment, timeout=LIMIT_S, check=False)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {test: (outcome, text) for test, outcome, text in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what passes under the DeepSpeed that is installed")
    parser.add_argument("--sources", type=Path, default=ROOT / "build" / "peers", help="folder of the suites")
    parser.add_argument("--suite", choices=SUITES, action="append", help="one suite (repeatable); all without")
    given, extra = parser.parse_known_args()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = 0
    for name in given.suite or SUITES:
        fetch(SUITES[name], given.sources / name)
        hub = given.sources.resolve() / "hub" / name
        make_hub(hub, name, given.sources / name)
        wanted = [] if given.record else recorded[name]
        found = outcomes_of(name, (given.sources / name).resolve(), hub, wanted, extra)
        passed = sorted(test for test, (outcome, _) in found.items() if outcome == "passed")
        if given.record:
            recorded[name] = passed
            print(f"{name}: {len(passed)} of {len(found)} pass")
            continue
        missing = [test for test in wanted if test not in passed]
        print(f"{name}: {len(wanted) - len(missing)} of {len(wanted)} that pass under DeepSpeed pass")
        for test in missing:
            print(f"  {test}: {' '.join(found.get(test, ('no outcome', ''))[1].split())[-300:]}")
        failed += len(missing)
    if given.record:
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
