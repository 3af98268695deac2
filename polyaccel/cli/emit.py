"""`polyaccel run --emit KIND`: the job that the other options describe, as a manifest for a cluster's scheduler.

The job is made as for a start on the first of its hosts, and its pods give this command again, with `words` as its
arguments, which describe the same job. Nothing of this shell's environment goes into a manifest but what --export
names, and secrets among that are taken from a Secret of the cluster.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyaccel.cli.job import job_of
from polyaccel.errors import LaunchError
from polyaccel.launch.base import DEFAULT_GRACE_S, DEFAULT_STOP_TIMEOUT_S, Job
from polyaccel.launch.manifests import KINDS, PodSettings, as_yaml
from polyaccel.redaction import is_secret

_ALIASES = {"k8s": "k8s-jobset"}
_NO_NAME = re.compile(r"[^a-z0-9]+")


def add_emit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of manifests."""
    group = parser.add_argument_group("manifests for a cluster")
    kinds = (*_ALIASES, *KINDS)
    shown = f"start nothing, and print a manifest: {', '.join(kinds)}; with --num-nodes and --ranks"
    group.add_argument("--emit", choices=kinds, metavar="KIND", help=shown)
    group.add_argument("--image", metavar="IMAGE", help="the container image, which has polyaccel")
    group.add_argument("--name", metavar="NAME", help="of the job (default: the script's)")
    group.add_argument("--workdir", metavar="DIR", help="where the container works (default: its own)")
    group.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME[=N]",
        help="a resource of each pod, for example memory=64Gi; without a number as many as --ranks",
    )


def manifest(args: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The manifest that the options ask for. Raises LaunchError."""
    kind = KINDS[_ALIASES.get(args.emit, args.emit)]
    _check(args)
    pods = PodSettings(
        name=args.name or _NO_NAME.sub("-", Path(args.script).stem.lower()).strip("-"),
        image=args.image,
        resources=dict(_resources(args)),
        workdir=args.workdir,
        restarts=args.restarts or 0,
    )
    count = args.num_nodes or 1
    args.hosts = ",".join(f"{kind.host(pods.name, number)}:{args.nproc}" for number in range(count))
    first = kind.host(pods.name, 0)
    changed = {"num_nodes": None, "nproc": None, "node_rank": 0, "master_addr": args.master_addr or first}
    job = job_of(argparse.Namespace(**{**vars(args), **changed}), environment, lambda: 1)
    if secrets := [name for name in job.exports if is_secret(name)]:
        literals = " ".join(f'--from-literal={name}="${name}"' for name in secrets)
        print(f"polyaccel: create first: kubectl create secret generic {pods.name} {literals}", file=sys.stderr)
    return as_yaml(kind.make(job, ["polyaccel", "run", *kind.hosts_option(job), *words(job)], pods))


def words(job: Job) -> Iterator[str]:
    """Return the options of `polyaccel run` for this job, without hosts and exported variables."""
    if job.bind_cores:
        yield "--bind-cores"
    if job.cores is not None:
        yield from ("--bind-core-list", ",".join(map(str, job.cores)))
    numbers = {
        "--grace-period": (job.grace_s, DEFAULT_GRACE_S),
        "--stop-timeout": (job.stop_timeout_s, DEFAULT_STOP_TIMEOUT_S),
        "--hang-timeout": (job.hang_timeout_s, 0.0),
    }
    for option, (value, default) in numbers.items():
        if value != default:
            yield from (option, f"{value:g}")
    for option, text in (("--log-dir", job.log_dir), ("--venv-script", job.venv_script)):
        if text is not None:
            yield from (option, text)
    first, *rest = job.command
    if first != sys.executable:
        yield "--no-python"
        yield first
    elif rest[:1] == ["-m"]:
        yield "--module"
        yield rest[1]
    else:
        yield from rest
    yield from job.arguments


def _check(args: argparse.Namespace) -> None:
    """Raise LaunchError for options that a manifest needs, or that mean nothing in one."""
    for option, value in (("--image", args.image), ("--ranks", args.nproc)):
        if value is None:
            hint = f"give {option}: this machine is not the cluster's"
            raise LaunchError(f"--emit {args.emit}, and no {option}", hint=hint, value=args.emit)
    meaningless = {
        "--hostfile": args.hostfile,
        "--hosts": args.hosts,
        "--include": args.include,
        "--exclude": args.exclude,
        "--node-rank": args.node_rank,
        "--launcher": args.launcher,
        "--elastic": args.elastic,
    }
    for option, value in meaningless.items():
        if value is not None:
            hint = f"leave {option} out: the cluster chooses hosts, --num-nodes and --ranks set how many"
            raise LaunchError(f"--emit {args.emit} and {option} cannot be given together", hint=hint, value=value)


def _resources(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for text in args.resource:
        name, mark, value = text.partition("=")
        if not name or (mark and not value):
            raise LaunchError(f"--resource {text!r} names none", hint="write NAME or NAME=AMOUNT", value=text)
        yield name, value or str(args.nproc)
