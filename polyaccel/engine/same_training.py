"""All ranks train the same model with the same settings; a rank that does not is named before anything is exchanged.

Parameters have no names on the wire: where one rank has built its modules in another order, has frozen another layer or
clips at another norm, the ranks' collectives may well fit each other, and wrong numbers would be all there is to see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.types import ParamSpec

_NOTHING = "nothing"


def training_facts(
    specs: Iterable[ParamSpec],
    optimizer: str | None,
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[str]:
    """What must be equal on all ranks, a line for each fact: parameters in order, optimizer groups, settings by key."""
    return [*_parameters(specs), f"optimizer {optimizer}", *_groups(groups), *_settings(settings)]


def _parameters(specs: Iterable[ParamSpec]) -> Iterator[str]:
    for spec in specs:
        use = f"trained in optimizer group {spec.group}" if spec.trainable else "frozen"
        yield f"parameter {spec.fqn!r}, {spec.dtype.value} of shape {spec.shape}, {use}"


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
    """Raise ShardingError on all ranks, naming the first difference and the ranks, unless all have equal `facts`.

    Collective. One small message, and the facts themselves only where they differ.
    """
    if communicator.world_size == 1:
        return
    digest = blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
    if len(set(communicator.all_gather_object(digest))) == 1:
        return
    told = communicator.all_gather_object(list(facts))
    for found in zip_longest(*told, fillvalue=_NOTHING):
        if len(set(found)) > 1:
            ranks_of: dict[str, list[int]] = {}
            for rank, fact in enumerate(found):
                ranks_of.setdefault(fact, []).append(communicator.ranks[rank])
            differences = "; ".join(f"ranks {ranks} have {fact}" for fact, ranks in ranks_of.items())
            raise ShardingError(
                f"the ranks do not train the same: {differences}",
                cure="build the model in one order on all ranks (not from sets), freeze the same parameters before "
                "polyaccel.initialize, and give every rank the same config, optimizer and training data",
                value=differences,
            )
