"""`deepspeed.launcher.runner` and `deepspeed.utils.numa`: hosts, slots and cores by DeepSpeed's functions."""

from __future__ import annotations

import argparse
import json
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyaccel.errors import LaunchError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


class BadResources(LaunchError, ValueError):
    """Text that names no hosts, slots or cores, or others than there are."""


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> dict[str, int] | None:
    """The slots of each host of a file; None where there is no file. Raises BadResources."""
    file = Path(hostfile_path)
    if not file.is_file():
        return None
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    found: dict[str, int] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None or match[1] in found:
            raise BadResources(f"{file}: {line!r}", hint="give each host one line `host slots=N`", value=line)
        found[match[1]] = int(match[2])
    if not found:
        raise BadResources(f"{file} names no host", hint="give each host one line `host slots=N`", value=str(file))
    return found


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """The host and the slots of `host:0,1`; no slots where only the host is named."""
    host, mark, slots = node_config.partition(":")
    try:
        return host, [int(slot) for slot in slots.split(",")] if mark else []
    except ValueError:
        hint = "write host@host:0,1"
        raise BadResources(f"slots {slots!r} of {host}", hint=hint, value=node_config) from None


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """The slots of each host of `host@host:0,1`, each once and in order."""
    found: dict[str, set[int]] = {}
    for host, slots in map(parse_node_config, node_config_list.split("@")):
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The hosts and slots that are left: those of `include_str`, or all but those of `exclude_str`.

    Raises BadResources where both are given, or name what there is not.
    """
    if include_str and exclude_str:
        raise BadResources(
            f"include {include_str!r} and exclude {exclude_str!r}", hint="give one of them", value=exclude_str
        )
    known = {host: list(slots) for host, slots in host_info.items()}
    if not (include_str or exclude_str):
        return known
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in known or not set(slots) <= set(known[host]):
            hint = f"the hosts are {', '.join(known)}"
            raise BadResources(f"slots {slots} of host {host!r} do not exist", hint=hint, value=host)
    chosen = {host: slots or known[host] for host, slots in named.items()}
    if exclude_str:
        chosen = {host: [slot for slot in slots if slot not in chosen.get(host, [])] for host, slots in known.items()}
    return {host: chosen[host] for host in known if chosen.get(host)}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """`parse_resource_filter` for numbers of slots."""
    hosts = {host: list(range(count)) for host, count in resource_pool.items()}
    return parse_resource_filter(hosts, inclusion, exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> dict[str, list[int]]:
    """The first `num_nodes` hosts, each with `num_gpus` slots; numbers below 1 leave all."""
    hosts = list(active_resources)[: num_nodes if num_nodes > 0 else None]
    return {host: list(range(num_gpus)) if num_gpus > 0 else list(active_resources[host]) for host in hosts}


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Hosts and slots as the text of `--world_info`."""
    return urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def parse_range(rng: str) -> range:
    """The cores of `3` or `2-4`. Raises BadResources."""
    first, mark, last = rng.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not mark)) or int(last or first) < int(first):
        raise BadResources(
            f"cores {rng!r}", hint="write a number, or two with a dash, the smaller one first", value=rng
        )
    return range(int(first), int(last or first) + 1)


def parse_range_list(range_str: str) -> list[int]:
    """The cores of `0,2-4`. Raises BadResources where they do not go up."""
    cores = [core for part in range_str.split(",") for core in parse_range(part)]
    if cores != sorted(set(cores)):
        raise BadResources(f"cores {range_str!r}", hint="let the ranges go up, and not overlap", value=range_str)
    return cores


def require_hosts(given: argparse.Namespace) -> None:
    """Raise BadResources where the launcher's options exclude each other, or name hosts or slots that do not exist."""
    chosen, left_out = given.include or "", given.exclude or ""
    counts = {"num_nodes": given.num_nodes, "num_gpus": given.nproc}
    counted = [f"{name} {count}" for name, count in counts.items() if count is not None]
    if counted and (chosen or left_out):
        raise BadResources(
            f"{', '.join(counted)} with include {chosen!r} and exclude {left_out!r}",
            hint="count hosts and slots, or name them",
            value=chosen or left_out,
        )
    pool = fetch_hostfile(given.hostfile) if given.hostfile is not None else None
    if pool is not None:
        parse_inclusion_exclusion(pool, chosen, left_out)
    elif given.num_nodes is not None and given.num_nodes > 1 and given.hosts is None:
        hint = "pass --hostfile"
        raise BadResources(f"{given.num_nodes} hosts, and no file names them", hint=hint, value=given.num_nodes)
