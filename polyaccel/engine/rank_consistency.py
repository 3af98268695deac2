"""All ranks train the same model with the same settings; a rank that does not is named before anything is exchanged.

Parameters have no names on the wire: where one rank has built its modules in another order, has frozen another layer or
clips at another norm, the ranks' collectives may well fit each other, and wrong numbers would be all there is to see.
`run_metadata` is what a checkpoint records of the run.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib import metadata
from itertools import zip_longest
from logging import getLogger
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import ParamSpec
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.registry import PluginGroup, find_plugin

log = getLogger(__name__)

_NOTHING = "nothing"
_PACKAGES = ("polyaccel", "torch", "jax", "numpy", "safetensors", "transformers")


def training_facts(
    specs: Iterable[ParamSpec],
    optimizer: str | None,
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    about: Mapping[str, Any],
) -> list[str]:
    """Return a line for each fact that must be equal on all ranks: versions, parameters, groups, settings."""
    return [*_versions(about), *_parameters(specs), f"optimizer {optimizer}", *_groups(groups), *_settings(settings)]


def _versions(about: Mapping[str, Any]) -> Iterator[str]:
    for package, version in about["packages"].items():
        yield f"{package} {version} installed"
    for kind, plugin in about["plugins"].items():
        yield f"the {kind} {plugin}"


def _parameters(specs: Iterable[ParamSpec]) -> Iterator[str]:
    for spec in specs:
        use = f"trained in optimizer group {spec.group}" if spec.trainable else "frozen"
        cut = f", cut along {' and '.join(spec.cut)}" if spec.cut else ""
        yield f"parameter {spec.fqn!r}, {spec.dtype.value} of shape {spec.global_shape}{cut}, {use}"


def _groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key != "params":
                yield f"{key!r} of optimizer group {index}: {value}"


def _settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f'"{prefix}{key}": {value} in the config'


def require_same_training(communicator: Communicator, facts: Sequence[str]) -> None:
    """Raise ShardingError on all ranks with the first difference in `facts`. Collective, one small message."""
    if communicator.world_size == 1:
        return
    digest = blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
    if len(set(communicator.all_gather_object(digest))) == 1:
        return
    gathered = communicator.all_gather_object((socket.gethostname(), list(facts)))
    hosts = [host for host, _ in gathered]
    for found in zip_longest(*(facts for _, facts in gathered), fillvalue=_NOTHING):
        if len(set(found)) > 1:
            ranks_of: dict[str, list[int]] = {}
            for rank, fact in enumerate(found):
                ranks_of.setdefault(fact, []).append(rank)
            differences = "; ".join(
                f"ranks {[communicator.ranks[rank] for rank in ranks]}{_named(hosts, ranks)} have {fact}"
                for fact, ranks in ranks_of.items()
            )
            raise ShardingError(
                f"the ranks do not train the same: {differences}",
                hint="build the model in one order on all ranks (not from sets), freeze the same parameters before "
                "polyaccel.initialize, and give every rank the same packages, config, optimizer and training data",
                value=differences,
            )


def warn_of_uneven_batches(communicator: Communicator, micro_batch_size: int) -> None:
    """Warn on rank 0 of micro-batches of different sizes, which weigh the same in the mean. Collective."""
    if communicator.world_size == 1:
        return
    ranks_of: dict[int, list[int]] = {}
    for rank, size in enumerate(communicator.all_gather_object(micro_batch_size)):
        ranks_of.setdefault(size, []).append(communicator.ranks[rank])
    if len(ranks_of) > 1 and communicator.rank == 0:
        sizes = "; ".join(f"{size} on ranks {ranks}" for size, ranks in ranks_of.items())
        log.warning(
            "train_micro_batch_size_per_gpu is %s: the mean over ranks weights a sample of a small micro-batch more; "
            "give every rank the same",
            sizes,
        )


def _named(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """The hosts of these ranks, where there are several in all."""
    return f" on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks))}" if len(set(hosts)) > 1 else ""


def run_metadata(config: Mapping[str, Any], storage: str, accelerator: Accelerator, mesh: Mesh) -> dict[str, Any]:
    """Return versions, plugins, mesh and `config` as plain values; `storage` is the plugin's name."""
    return {
        "packages": {name: version for name in _PACKAGES if (version := _version(name))} | {"python": _python()},
        "plugins": {
            "accelerator": _source(PluginGroup.ACCELERATORS, accelerator.name),
            "storage": _source(PluginGroup.STORAGE, storage),
        },
        "mesh": {axis.name: axis.size for axis in mesh.axes},
        "config": dict(config),
    }


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


@cache
def _source(group: PluginGroup, name: str) -> str:
    """A plugin's name, package and version; its name alone where it is not an installed one."""
    try:
        return f"{name} ({find_plugin(group, name).source})"
    except PolyaccelError:
        return name
