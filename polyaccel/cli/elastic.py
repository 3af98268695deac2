"""The numbers of ranks that a training's config allows, for the options that start it with fewer or more of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyaccel.errors import ConfigError, LaunchError
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.launch.base import ElasticHosts, Job

_RESTARTS = 3
"""How often torch's elastic agents start failed ranks again by default."""
_OF_THE_SCRIPT = "--deepspeed_config"
"""The argument of scripts that `add_config_arguments` defines."""


def elastic_sizes(args: argparse.Namespace) -> tuple[int, ...] | None:
    """Return the world sizes of the config's `elasticity`; None without a named config or if it is off."""
    named = args.elastic_config
    source = named or _named_by(args.arguments)
    if source is None:
        return None
    from polyaccel.config import load_config
    from polyaccel.config.elastic import compute_elastic_config

    section = load_config(source if named else _elasticity_of(source)).elasticity
    if not section.enabled and not named:
        return None
    return compute_elastic_config(section).world_sizes


def _elasticity_of(source: str) -> dict[str, Any]:
    """Return the one section asked for here; other problems are left to the reader of the whole config."""
    from polyaccel.config.load import read_tree

    try:
        tree, _, _ = read_tree(source, None)
    except ConfigError:
        return {}
    return {"elasticity": tree["elasticity"]} if isinstance(tree, dict) and tree.get("elasticity") else {}


def check_size(world_size: int, sizes: tuple[int, ...] | None) -> None:
    """Raise LaunchError for a number of ranks that the config refuses."""
    if sizes is not None and world_size not in sizes:
        shown = ", ".join(map(str, sizes))
        raise LaunchError(
            f"{world_size} ranks cannot train with the config's section elasticity",
            hint=f"start one of {shown}",
            value=world_size,
        )


def elastic_job(
    job: Job, args: argparse.Namespace, sizes: tuple[int, ...] | None, environment: Mapping[str, str]
) -> Job:
    """Return the job with as many hosts as allowed; each host gets the command, so the secret must be given."""
    least = args.min_elastic_nodes or 1
    most = args.max_elastic_nodes or least
    if most < least:
        hint = "give a larger --max-elastic-nodes, or a smaller --min-elastic-nodes"
        raise LaunchError(f"at least {least} hosts, and at most {most}", hint=hint, value=(least, most))
    restarts = _RESTARTS if args.restarts is None else args.restarts
    hosts = ElasticHosts(least=least, most=most, restarts=restarts, sizes=sizes)
    return replace(job, elastic=hosts, secret=job.secret if most == 1 else environment.get(SECRET_VARIABLE, ""))


def refuse_elastic(args: argparse.Namespace, launcher: str) -> None:
    """Raise LaunchError for options that a launcher has no use for."""
    for name in ("elastic_training", "min_elastic_nodes", "max_elastic_nodes"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            hint = "leave it out, or choose --launcher torchelastic"
            raise LaunchError(f"{option} is not for the launcher {launcher!r}", hint=hint, value=launcher)


def _named_by(arguments: Sequence[str]) -> str | None:
    for place, word in enumerate(arguments):
        name, mark, value = word.partition("=")
        if name == _OF_THE_SCRIPT:
            return value if mark else next(iter(arguments[place + 1 :]), None)
    return None
