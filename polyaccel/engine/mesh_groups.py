"""`MeshGroups`: the communicators along the axes of a mesh, made when asked for and left at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from polyaccel.comm.base import Communicator
from polyaccel.comm.groups import forget_mesh, set_mesh
from polyaccel.comm.wrappers.error_feedback import ErrorFeedback
from polyaccel.comm.wrappers.quantized import QuantizedCommunicator
from polyaccel.core.mesh import Mesh
from polyaccel.zero.plan.layout import ShardLayout
from polyaccel.zero.plan.policy import BLOCK_NUMEL, Bits, TrafficPolicy
from polyaccel.zero.resources import Communicators, ShardGroups


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """The ranks of `communicator` along the axes of `mesh`."""

    communicator: Communicator
    mesh: Mesh
    """The axes along which the ranks stand."""
    cleanup_callbacks: list[Callable[[], object]] = field(default_factory=list)
    """Called before the groups along axes of the mesh are left, for what works over them."""
    model_parallel_group: Communicator | None = None
    """Process group of the other pipeline stages, or None without pipeline parallelism."""
    borrows_groups: bool = False
    """Whether the groups along axes of the mesh belong to another runtime, which leaves them."""
    _groups: dict[tuple[str, ...], Communicator] = field(default_factory=dict)

    def process_group_for(self, axes: Collection[str]) -> Communicator:
        """Return the group with equal coordinates except along `axes`. Collective; `leave_groups` closes it."""
        inside = self.mesh.within(axes)
        names = tuple(axis.name for axis in self.mesh.axes if axis.name in inside and axis.size > 1)
        if self.mesh.size_of(names) == self.communicator.world_size:
            return self.communicator
        if names not in self._groups:
            for ranks in self.mesh.groups(names):
                group = self.communicator.split(ranks)
                if group is not None:
                    self._groups[names] = group
            self._groups[names].barrier()  # every rank has joined before any may leave
        return self._groups[names]

    def enter_groups(self) -> None:
        """Make the groups along the axes of a mesh that has several, and register them in `comm.groups`. Collective."""
        others = [axis.name for axis in self.mesh.axes if axis.name != "data"]
        if others:
            for axes in (("data",), *((name,) for name in others), ("data", "sequence")):
                self.process_group_for(axes)
            set_mesh(self.communicator, self.mesh, self.process_group_for)

    def leave_groups(self) -> None:
        """Leave the groups along axes of the mesh."""
        while self.cleanup_callbacks:
            self.cleanup_callbacks.pop()()
        if self.borrows_groups:
            return
        forget_mesh(self.communicator, self.process_group_for)
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def communicators(self, layout: ShardLayout, traffic: TrafficPolicy, *, has_streams: bool) -> Communicators:
        """Return the communicators of `layout`'s parameters and gradients by `traffic`. Collective.

        `has_streams`: what ranks agree on over the device would wait for the work in its streams.
        """
        cuts = dict.fromkeys(((), *sorted({bucket.kind.cut for bucket in layout.buckets})))
        groups = {cut: _make_shard_groups(self.process_group_for(self.mesh.others(cut)), traffic) for cut in cuts}
        host = self.communicator.new_host_group() if has_streams and self.communicator.world_size > 1 else None
        return Communicators(self.communicator, groups, self.model_parallel_group, host)


def _make_shard_groups(communicator: Communicator, traffic: TrafficPolicy) -> ShardGroups:
    """Make one group's communicators for parameters and gradients. Collective where second shards exist."""
    near = None
    if traffic.near_ranks > 1:
        for first in range(0, communicator.world_size, traffic.near_ranks):
            near = communicator.split(range(first, first + traffic.near_ranks)) or near
        if near is not None:
            near.barrier()  # every rank has joined before any may leave

    feedback = None
    if (errors := traffic.feedback) is not None:
        feedback = ErrorFeedback(
            communicator.accelerator, beta=errors.beta, reset_every=errors.reset_every, block_numel=BLOCK_NUMEL
        )

    def quantised(gather_bits: Bits | None, reduce_bits: Bits | None) -> Communicator:
        if gather_bits is None and reduce_bits is None:
            return communicator
        return QuantizedCommunicator(
            communicator,
            gather_bits=gather_bits,
            reduce_bits=reduce_bits,
            block_numel=BLOCK_NUMEL,
            feedback=None if reduce_bits is None else feedback,
        )

    return ShardGroups(
        exact=communicator,
        trained=quantised(traffic.trained_bits, None),
        frozen=quantised(traffic.frozen_bits, None),
        gradients=quantised(None, traffic.gradient_bits),
        forget_errors=None if feedback is None else feedback.forget,
        hpz_group=near,
    )
