"""What users wrote into whole parameters by hand, taken over before anything reads master weights or writes parameters.

[Note: User writes to parameters]
A frontend names the parameters that users of this rank may have written to (`ParamListener.changed_params`). That may
be too many, never too few. Whether there are any travels with the agreement of a step, so a step without them exchanges
nothing more. With them, the ranks compare digests of those parameters: where all ranks have the same values, each takes
over its own slice; where they differ, no rank continues. In shared memory users wrote to their own face
(`SharedMemory`), which shows the shared values again when all ranks have taken over their slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.zero.buckets.param_listener import ParamListener
from polyaccel.zero.buckets.params import ParamBuckets


class UserWrites:
    """The values that users of this rank see in whole parameters, and what becomes of those that they wrote there."""

    def __init__(self, params: ParamBuckets, owner: ParamListener, communicator: Communicator) -> None:
        self._params = params
        self._owner = owner
        self._communicator = communicator

    def sync(self, changed: Collection[str]) -> None:
        """Take over users' values of `changed` parameters. Collective; raises ShardingError where ranks differ."""
        gathered = self._communicator.all_gather_object(list(changed))
        names = list(dict.fromkeys(fqn for theirs in gathered for fqn in theirs))
        if not names:
            return
        if self._communicator.world_size > 1:
            digests = self._communicator.all_gather_object([self._digest(fqn) for fqn in names])
            for fqn, values in zip(names, zip(*digests, strict=True), strict=True):
                for ranks in self._holders(fqn):
                    if len({values[rank] for rank in ranks}) > 1:
                        writers = [rank for rank in ranks if fqn in gathered[rank]]
                        raise _difference(fqn, {rank: values[rank] for rank in ranks}, writers, self._owner)
        for fqn in names:
            self.adopt(fqn)
        self._show_adopted(names)
        self._owner.on_adopted(names)

    def writers(self, names: Sequence[str]) -> list[set[str]]:
        """Return each rank's written parameters of `names`, by their values. Collective."""
        written: list[set[str]] = [set() for _ in range(self._communicator.world_size)]
        if not names:
            return written
        gathered = self._communicator.all_gather_object([(self._digest(fqn), self.differs(fqn)) for fqn in names])
        for fqn, found in zip(names, zip(*gathered, strict=True), strict=True):
            for ranks in self._holders(fqn):
                digests = {rank: found[rank][0] for rank in ranks}
                usual = max(digests.values(), key=[*digests.values()].count)
                writers = [rank for rank in ranks if found[rank][1]]
                for rank in writers or [rank for rank, digest in digests.items() if digest != usual]:
                    written[rank].add(fqn)
        return written

    def require_same(self, digests: Mapping[str, int]) -> None:
        """Raise ShardingError on all ranks where ranks hold other values, by digests of what each has. Collective."""
        gathered = self._communicator.all_gather_object(dict(digests))
        for fqn in dict.fromkeys(fqn for theirs in gathered for fqn in theirs):
            for ranks in self._holders(fqn):
                values = {rank: gathered[rank].get(fqn) for rank in ranks}
                if len(set(values.values())) > 1:
                    raise ShardingError(
                        f"parameter {fqn!r} has different values on {_in_groups(values)}",
                        hint=self._owner.divergence_hint(fqn),
                        value=fqn,
                    )

    def modified(self) -> Sequence[str]:
        """The parameters in shared memory that users of this rank have given other values."""
        found: list[str] = []
        for params in self._params.buckets:
            if params.shared is None:
                continue
            ranges = params.shared.written()
            if not ranges:
                continue
            self._params.wait_all_gather(params.bucket.index)
            names = [
                slot.param.fqn
                for slot in params.bucket.slots
                if any(start < slot.end and slot.offset < end for start, end in ranges)
                and self._digest(slot.param.fqn) != _digest_of(params.shared.whole.view(slot.offset, slot.param.numel))
            ]
            if not names:
                params.shared.forget()
            found += names
        return found

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Show users the engine's values in buckets of `names` (None: all); their writes are over."""
        for params in self._params if names is None else {self._params.locate(fqn)[0] for fqn in names}:
            if params.shared is not None:
                params.shared.forget()

    def adopt(self, fqn: str) -> None:
        """Take over the values that were written into the whole parameter, equally on all ranks, into this rank's slice
        and master weights. Raises ShardingError while it is sharded.

        Master weights that round to the very values that stand there keep their precision.
        """
        params, slot = self._params.locate(fqn)
        for start, own, master, part in self._params.parts(params, slot, self._seen(fqn)):
            if own is not None:
                own.copy_from(part)
            if master is not None and not self._params.rounding.leads_to(part, master, slot.param, start):
                master.copy_from(part)
        self._params.bump_version(params)

    def _show_adopted(self, names: Iterable[str]) -> None:
        """All ranks have adopted the values of these parameters: let users see them in shared memory. Collective."""
        for index in sorted({self._params.locate(fqn)[0].bucket.index for fqn in names}):
            self._params.wait_shared_writes(self._params[index])
        self.forget(names)

    def broadcast(self, names: Sequence[str], rank: int) -> None:
        """Let all ranks have the values that users of `rank` see in whole parameters, and of those that are cut, what
        users of the ranks next to it see in the other blocks. Collective."""
        for fqn in names:
            params, slot = self._params.locate(fqn)
            seen, communicator = self._seen(fqn), self._params.exact(params.bucket)
            root = self._params.layout.mesh.place(params.bucket.kind.cut, rank)
            if params.shared is None and communicator.world_size > 1 and seen.numel:
                communicator.broadcast(seen, root, label="changed parameters", bucket=params.bucket.index)
            elif params.shared is not None and communicator.rank == root:
                params.shared.whole.view(slot.offset, slot.param.numel).copy_from(seen)
        self._show_adopted(names)

    def _digest(self, fqn: str) -> str:
        """A digest of the bits of the whole parameter as users of this rank see it."""
        return _digest_of(self._seen(fqn))

    def differs(self, fqn: str) -> bool:
        """Whether the whole parameter has other values than this rank's slice and master weights know."""
        params, slot = self._params.locate(fqn)
        return any(
            not self._params.rounding.leads_to(part, known, slot.param, start)
            for start, own, master, part in self._params.parts(params, slot, self._seen(fqn))
            for known in (own, master)
            if known is not None
        )

    def _seen(self, fqn: str) -> Buffer:
        """The whole parameter as users of this rank see it. Raises ShardingError while it is sharded."""
        params, slot = self._params.locate(fqn)
        whole = self._params.full(params.bucket.index) if params.shared is None else params.shared.private_view
        return whole.view(slot.offset, slot.param.numel)

    def _holders(self, fqn: str) -> Sequence[Sequence[int]]:
        """The ranks of each group that holds the same elements of a parameter; one group where it is not cut."""
        mesh, cut = self._params.layout.mesh, self._params.layout.locate(fqn)[0].kind.cut
        return mesh.groups(mesh.others(cut))


def _digest_of(values: Buffer) -> str:
    return blake2b(values.to_bytes(), digest_size=16).hexdigest()


def _difference(fqn: str, values: Mapping[int, str], writers: list[int], owner: ParamListener) -> ShardingError:
    """The error for a parameter whose digest on ranks is in `values`, and to which `writers` may have written."""
    return ShardingError(
        f"parameter {fqn!r} was changed by hand (on ranks {writers}) and has different values now on "
        f"{_in_groups(values)}",
        hint=owner.divergence_hint(fqn),
        value=fqn,
    )


def _in_groups(values: Mapping[int, object]) -> str:
    """Return the ranks of `values`, those with equal values together."""
    ranks_of: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return " and ".join(f"ranks {ranks}" for ranks in ranks_of.values())
