"""What users wrote into whole parameters by hand, taken over before anything reads master weights or writes parameters.

[Note: User writes to parameters]
A frontend names the parameters that users of this rank may have written to (`ParamListener.changed_params`). That may
be too many, never too few. Whether there are any travels with the agreement of a step, so a step without them exchanges
nothing more. With them, the ranks compare digests of those parameters: where all ranks have the same values, each takes
over its own slice; where they differ, no rank continues. In shared memory users wrote to their own face
(`SharedMemory`), which shows the shared values again when all ranks have taken over their slices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.zero.buckets.param_listener import ParamListener
from polyaccel.zero.buckets.params import ParamBuckets


def sync_user_writes(
    params: ParamBuckets, owner: ParamListener, communicator: Communicator, changed: Collection[str]
) -> None:
    """Let the values that stand in whole parameters count, where users of this rank may have written to `changed`.

    Collective. Raises ShardingError on all ranks, naming parameter and ranks, where the values differ between ranks;
    then nothing is taken over.
    """
    told = communicator.all_gather_object(list(changed))
    names = list(dict.fromkeys(fqn for theirs in told for fqn in theirs))
    if not names:
        return
    if communicator.world_size > 1:
        digests = communicator.all_gather_object([params.digest(fqn) for fqn in names])
        for fqn, values in zip(names, zip(*digests, strict=True), strict=True):
            for ranks in params.holders(fqn):
                if len({values[rank] for rank in ranks}) > 1:
                    writers = [rank for rank in ranks if fqn in told[rank]]
                    raise _difference(fqn, {rank: values[rank] for rank in ranks}, writers, owner)
    for fqn in names:
        params.adopt(fqn)
    params.show_adopted(names)
    owner.on_adopted(names)


def writers_of(params: ParamBuckets, communicator: Communicator, names: Sequence[str]) -> list[set[str]]:
    """For each rank the parameters of `names` that it wrote to, by their values. Collective.

    A rank wrote to a parameter whose values are not those of its own slice and master weights, and, where no rank sees
    that, to one that has other values than most ranks have.
    """
    written: list[set[str]] = [set() for _ in range(communicator.world_size)]
    if not names:
        return written
    told = communicator.all_gather_object([(params.digest(fqn), params.differs(fqn)) for fqn in names])
    for fqn, found in zip(names, zip(*told, strict=True), strict=True):
        for ranks in params.holders(fqn):
            digests = {rank: found[rank][0] for rank in ranks}
            usual = max(digests.values(), key=[*digests.values()].count)
            writers = [rank for rank in ranks if found[rank][1]]
            for rank in writers or [rank for rank, digest in digests.items() if digest != usual]:
                written[rank].add(fqn)
    return written


def _difference(fqn: str, values: Mapping[int, str], writers: list[int], owner: ParamListener) -> ShardingError:
    """The error for a parameter whose digest on ranks is in `values`, and to which `writers` may have written."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    groups = " and ".join(f"ranks {ranks}" for ranks in ranks_of.values())
    return ShardingError(
        f"parameter {fqn!r} was changed by hand (on ranks {writers}) and has different values now on {groups}",
        hint=owner.divergence_hint(fqn),
        value=fqn,
    )
