"""A sample of small faults in zero/, comm/ and checkpoint/, and how many of them the tests of that package catch.

    python tests/mutants --count 300 --seed 12

Cosmic Ray's operators make the mutants, one change each. They are drawn with a seed, every place of the source that can
be changed being as likely as any other, and run in a copy of the tree: the checkout is never touched. A mutant is
caught when a test fails or hangs. It survives when all test files of its package pass, which says less than the whole
suite would: the share that is printed is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any, NoReturn

from packages import ROOT, sources, tests_of
from sites import Site, mutated, sites_of

SITE = """
import sys  # an editable installation finds the checkout before every path; here the copy is meant
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in type(finder).__name__
                    and "ScikitBuild" not in type(finder).__name__]
"""
LEAST_S, SLOWER = 240.0, 5.0
"""A mutant hangs after this time, and after so many times that of the tests without a mutation."""


def copy_tree(folder: Path) -> None:
    """The files that git knows, as they are now, and what makes Python read them rather than the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "polyaccel", "tests"], cwd=folder, check=True)


def preload(folder: Path) -> None:
    """Import here what every run needs, and have polyaccel found in `folder`, by this process's children too."""
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(folder), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    exec(SITE)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    for module in ("numpy", "torch", "torch.distributed", "pydantic", "rich", "safetensors", "pytest"):
        import_module(module)
    assert "polyaccel" not in sys.modules, "a run imports it, with its mutant"


def run_tests(folder: Path, tests: tuple[str, ...], limit_s: float) -> tuple[int | None, float, str]:
    """pytest's exit code (None: it ran past the limit and was killed), its time, and the first failing test."""
    start = monotonic()
    log = folder / "tests.log"
    child = os.fork()
    if child == 0:
        _run_here(folder, log, tests)
    code: int | None = None
    while code is None and monotonic() - start < limit_s:
        sleep(0.1)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
    kill_group(child)
    if code is None:
        os.waitpid(child, 0)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))]
    return code, monotonic() - start, lines[0] if lines else ""


def _run_here(folder: Path, log: Path, tests: tuple[str, ...]) -> NoReturn:
    """pytest in this process, in a group of its own; never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(file, standard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-o", "addopts="]
        code = int(import_module("pytest").main([*options, "--rootdir", str(folder), *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill_group(group: int) -> None:
    """Kill what is left of a process group."""
    for _ in range(3):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        sleep(0.05)


def drawn(seed: int) -> Iterator[tuple[Site, str]]:
    """Mutants and their files' text, place by place in an order that the seed gives."""
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in sources()}
    places = [place for file, text in texts.items() for place in sites_of(file, text)]
    random = Random(seed)
    random.shuffle(places)
    for place in places:
        site = random.choice(place)
        changed = mutated(texts[site.file], site)
        if changed is not None:
            yield site, changed


def run_mutant(folder: Path, site: Site, changed: str, baseline_s: float) -> dict[str, Any]:
    file = folder / site.file
    source, times = file.read_text(encoding="utf-8"), file.stat()
    try:
        file.write_text(changed, encoding="utf-8")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10))  # not what its bytecode was made of
        code, seconds, test = run_tests(folder, tests_of(site.file, folder), max(LEAST_S, SLOWER * baseline_s))
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    line = changed.splitlines()[site.line - 1].strip() if site.line <= len(changed.splitlines()) else ""
    found = "survived" if code == 0 else "hung" if code is None else "caught"
    return {
        "found": found,
        "file": site.file,
        "line": site.line,
        "operator": site.operator,
        "before": source.splitlines()[site.line - 1].strip(),
        "after": line,
        "seconds": round(seconds, 1),
        "test": test,
    }


def report(results: list[dict[str, Any]]) -> str:
    """The share by package, and the survivors."""
    packages: dict[str, Counter[str]] = {}
    for result in results:
        packages.setdefault("/".join(result["file"].split("/")[:2]), Counter())[result["found"]] += 1
    lines = ["package | mutants | caught | share", "--- | --- | --- | ---"]
    for package, found in [*sorted(packages.items()), ("all", sum(packages.values(), Counter()))]:
        caught = found["caught"] + found["hung"]
        lines.append(f"{package} | {found.total()} | {caught} | {100 * caught / found.total():.0f} %")
    lines += ["", "Survivors:"]
    for result in results:
        if result["found"] == "survived":
            lines.append(f"{result['file']}:{result['line']} {result['operator']}")
            lines.append(f"    - {result['before']}\n    + {result['after']}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--begin", type=int, default=0, help="the first one to run, to go on with an earlier sample")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl", help="results are added to it")
    parser.add_argument(
        "--healthy-s", type=float, help="what a package's tests take without a mutation, rather than to run them first"
    )
    options = parser.parse_args()

    sample = list(islice(drawn(options.seed), options.begin, options.count))  # of the checkout
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="polyaccel-mutants-") as name:
        folder = Path(name)
        copy_tree(folder)
        preload(folder)
        baselines: dict[frozenset[str], float] = {}
        for number, (site, changed) in enumerate(sample, options.begin):
            tests = tests_of(site.file, folder)
            if options.healthy_s is not None:
                baselines[frozenset(tests)] = options.healthy_s
            if frozenset(tests) not in baselines:
                code, baselines[frozenset(tests)], test = run_tests(folder, tests, 3600.0)
                if code != 0:
                    print(f"without a mutation the tests of {site.file} fail already: {test or code}", flush=True)
                    print((folder / "tests.log").read_text(errors="replace")[-4000:])
                    return 1
            result = run_mutant(folder, site, changed, baselines[frozenset(tests)])
            results.append(result)
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{number} {result['found']:8} {result['file']}:{result['line']} {result['seconds']} s", flush=True)
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
