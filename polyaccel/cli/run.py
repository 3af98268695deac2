"""`polyaccel run`: the ranks of a training script, here and on other hosts."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from polyaccel.cli.elastic import check_size, elastic_job, elastic_sizes, refuse_elastic
from polyaccel.cli.emit import add_emit_options, manifest
from polyaccel.cli.job import is_far, job_of, load_launcher
from polyaccel.cli.options import add_options
from polyaccel.cli.parser import describe
from polyaccel.cli.streams import flush_output
from polyaccel.errors import LaunchError
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.launch.affinity import find_cores, node_count, usable_cpus
from polyaccel.launch.base import Job, Launcher, LaunchPlan
from polyaccel.launch.program import check_not_nested, how_to_attach
from polyaccel.launch.restarts import RestartPolicy, run_with_restarts
from polyaccel.redaction import redact_variables, redact_words, secrets_in
from polyaccel.registry import PATIENCE_S, PluginGroup, find_plugin, list_plugins, probe_plugin

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DEFAULT_LAUNCHER, _DEFAULT_FAR, _ELASTIC = "local", "ssh", "torchelastic"
_DESCRIPTION = """\
Start one process a rank, each with the variables of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT) and of DeepSpeed (CROSS_RANK, CROSS_SIZE, LOCAL_SIZE), show what they print with the rank's
number before each line, and end all of them when one fails."""


def add_parser(subparsers: _SubParsers) -> None:
    """Add `run` to the command."""
    parser = subparsers.add_parser(
        "run",
        help="start the ranks of a training script",
        description=_DESCRIPTION,
        usage="polyaccel run [options] script.py [arguments of the script]",
        allow_abbrev=False,  # or an option of the script that is a prefix of ours would be taken from it
    )
    add_options(parser)
    add_emit_options(parser)
    describe(
        parser,
        examples=(
            "polyaccel run --ranks 2 train.py --epochs 3",
            "polyaccel run --hosts a:8,b:8 --restarts 3 train.py",
            "polyaccel run --emit k8s --image registry/train --num-nodes 2 --ranks 8 train.py",
        ),
        codes={
            0: "every rank exited with 0",
            124: "no rank made a step for --hang-timeout",
            130: "interrupted by Ctrl-C",
            "N": "that of the first rank that failed; 128 + N for signal N",
        },
        missing="give a script: polyaccel run [options] train.py",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Start the job that the arguments describe; return its exit code."""
    if args.emit is not None:
        print(manifest(args, os.environ), end="")
        return 0
    check_not_nested(os.environ)
    if args.verbose:
        os.environ["POLYACCEL_DEBUG"] = "1"  # the launcher shows all tracebacks in full
    job = job_of(args, os.environ, count_ranks)
    code = run_job(job, args)
    if not args.dry_run:
        flush_output()  # the exit code is the job's, whether or not its output is read
    return code


def run_job(job: Job, args: argparse.Namespace) -> int:
    """Start a job by the options of its start. Returns its exit code."""
    sizes = elastic_sizes(args)
    is_there = is_far(dict(job.hosts), job.node, force=args.force_multi)
    default = _ELASTIC if args.elastic_training else _DEFAULT_FAR if is_there else _DEFAULT_LAUNCHER
    launcher = choose_launcher(args.launcher or default)
    if launcher.restarts_itself:
        job = elastic_job(job, args, sizes, os.environ)
    else:
        refuse_elastic(args, launcher.name)
        check_size(job.world_size, sizes)
    if args.dry_run:
        shown = shown_plan(launcher.plan(job), os.environ, job.secret)
        print(shown.encode(errors="backslashreplace").decode())  # bytes of the user's that are not text
        return 0
    for sentence in how_to_attach(job):
        print(f"polyaccel: {sentence}", file=sys.stderr)
    with pid_file(args.save_pid) if args.save_pid else nullcontext():
        return _run(launcher, job, args, sizes)


def _run(launcher: Launcher, job: Job, args: argparse.Namespace, sizes: tuple[int, ...] | None) -> int:
    if launcher.restarts_itself:
        return run_with_restarts(launcher, job, RestartPolicy(0)).code
    if not args.restarts:
        return launcher.run(job).code
    counted = count_ranks if args.nproc is None and args.elastic is not None else None
    policy = RestartPolicy(args.restarts, args.elastic, counted, sizes)
    return run_with_restarts(launcher, job, policy).code


@contextmanager
def pid_file(suffix: str) -> Iterator[None]:
    """Keep this process's id in a file of the folder for temporary files, named by the id and `suffix`."""
    path = Path(tempfile.gettempdir(), f"{os.getpid()}{suffix}")
    with suppress(FileNotFoundError):
        path.unlink()  # of an earlier process of this number that was killed
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        raise LaunchError(
            f"--save-pid: {path} cannot be written: {error}", hint="see whether there is room", value=str(path)
        ) from error
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    print(f"polyaccel: the launcher's process id is in {path}", file=sys.stderr)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def shown_plan(plan: LaunchPlan, environment: Mapping[str, str], secret: str = "") -> str:
    """Return a plan's processes as shell lines, with changed variables; secrets are hidden."""
    lines = []
    for rank in plan.ranks:
        own = {name: value for name, value in rank.environment.items() if environment.get(name) != value}
        own.pop(SECRET_VARIABLE, None)
        secrets = [*secrets_in(rank.environment), *filter(None, [secret])]
        shown = redact_variables(own, secrets)
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(shown.items())]
        cores = [] if rank.cores is None else ["taskset", "-c", ",".join(map(str, rank.cores))]
        lines.append(" ".join([*variables, *cores, shlex.join(redact_words(rank.command, secrets))]))
    return "\n".join(lines)


def choose_launcher(name: str) -> Launcher:
    """The launcher plugin called `name`. Raises what `load_plugin` does, and LaunchError if it cannot be used here."""
    plugin = load_launcher(name)
    probe = probe_plugin(find_plugin(PluginGroup.LAUNCHERS, name), plugin, limit_s=PATIENCE_S)
    if not probe.usable:
        others = [info.name for info in list_plugins(PluginGroup.LAUNCHERS) if info.name != name]
        hint = f"provide what it lacks, or choose another one: --launcher {' or '.join(others) or 'NAME'}"
        raise LaunchError(f"launcher {name!r} cannot be used here: {probe.reason}", hint=hint, value=name)
    return plugin()


def count_ranks() -> int:
    """Return the ranks of `--ranks auto`: one a device; on CPUs one a NUMA node, whose memory is near."""
    from polyaccel.accelerators.detect import (
        choose_accelerator,
    )  # may import torch, which an explicit --ranks has no use for

    accelerator = choose_accelerator(None)
    if accelerator.name == "cpu":
        return node_count(find_cores(usable_cpus()))
    return accelerator.device_count()
