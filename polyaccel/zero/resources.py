"""The live parts that a step works with: an accelerator, communicators by who has them and by what they carry, tiers by
place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import getLogger

from polyaccel.accelerators.base import Accelerator, Event
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.offload.tier import Tier
from polyaccel.zero.plan.bucket_plan import BucketPlan, PlannedBuffer, TrainedBucketPlan
from polyaccel.zero.plan.layout import Bucket
from polyaccel.zero.plan.placement import Place

log = getLogger(__name__)
_NOWHERE_ELSE: Mapping[Place, Tier] = {}


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The communicators of the ranks that hold the same parameters, all over these ranks except for `hpz_group`.

    `trained` and `frozen` gather parameters of that kind for passes, `gradients` reduces, `exact` does all else.
    `hpz_group` joins the neighbours of this rank that keep second copies with it, None where none are kept.
    """

    exact: Communicator
    trained: Communicator
    frozen: Communicator
    gradients: Communicator
    hpz_group: Communicator | None = None
    forget_errors: Callable[[], None] | None = None
    """Lets errors of quantised gradients begin at zero; None where none are kept."""

    @classmethod
    def plain(cls, communicator: Communicator) -> ShardGroups:
        """One communicator for everything."""
        return cls(communicator, communicator, communicator, communicator)

    @property
    def are_altered(self) -> bool:
        """Whether parameters of some kind are gathered in another way than all else travels."""
        return self.hpz_group is not None or self.trained is not self.exact or self.frozen is not self.exact

    def of_passes(self, bucket: Bucket) -> Communicator:
        """The communicator that gathers `bucket` for forward and backward passes."""
        return self.trained if bucket.kind.trainable else self.frozen

    def are_exact(self, bucket: Bucket) -> bool:
        """Whether passes compute with the values of the slices."""
        return self.of_passes(bucket) is self.exact


@dataclass(frozen=True, slots=True)
class Communicators:
    """The communicators of a step: that of all ranks, and those of the ranks that hold the same parameters, by the axes
    along which these are cut (`BucketKind.cut`)."""

    world: Communicator
    groups: Mapping[tuple[str, ...], ShardGroups]
    model_parallel_group: Communicator | None = None
    """Process group of the other pipeline stages, or None without pipeline parallelism."""
    host: Communicator | None = None
    """All ranks once more, for what they agree on without the device; None: `world` is as good."""

    @classmethod
    def plain(cls, communicator: Communicator) -> Communicators:
        """One communicator for everything, where nothing is cut."""
        return cls(communicator, {(): ShardGroups.plain(communicator)})

    def get_groups(self, bucket: Bucket) -> ShardGroups:
        """Return the groups of ranks that hold the parameters of `bucket`."""
        return self.groups[bucket.kind.cut]

    def log_ignored_gather_options(self) -> None:
        """Log once that a config asks for another way of gathering where there is nothing to gather."""
        if any(group.are_altered for group in self.groups.values()) and self.world.rank == 0:
            log.info(
                "no parameters are gathered, for they are persistent or in memory that the ranks share: "
                "zero_quantized_weights, zero_quantized_nontrainable_weights and zero_hpz_partition_size change nothing"
            )

    def forget_errors(self) -> None:
        """Let errors of quantised gradients begin at zero."""
        for group in self.groups.values():
            if group.forget_errors is not None:
                group.forget_errors()

    def close(self) -> None:
        """Leave the groups of near ranks and of hosts, which belong to this step alone."""
        if self.host is not None:
            self.host.close()
        for group in self.groups.values():
            if group.hpz_group is not None:
                group.hpz_group.close()


@dataclass(frozen=True, slots=True)
class Tiers:
    """The open tiers of a step by place: those of master weights and states, and those of sharded parameters."""

    states: Mapping[Place, Tier]
    params: Mapping[Place, Tier]

    @classmethod
    def around(
        cls, device: Tier, states: Mapping[Place, Tier] = _NOWHERE_ELSE, params: Mapping[Place, Tier] = _NOWHERE_ELSE
    ) -> Tiers:
        """`device` for what stays on the device, `states` and `params` for the other places of a plan."""
        return cls({Place.DEVICE: device, **states}, {Place.DEVICE: device, **params})

    def of_update(self, plan: TrainedBucketPlan) -> Tier:
        """The tier of a bucket's master weights and states."""
        return self.states[plan.place]

    def of_params(self, plan: BucketPlan) -> Tier:
        """The tier in which a bucket's parameters rest while they are sharded."""
        if isinstance(plan, TrainedBucketPlan) and plan.master is None:
            return self.of_update(plan)
        return self.params[plan.params.place]

    def close(self) -> None:
        """Close all tiers; every buffer in them is lost."""
        for tier in dict.fromkeys((*self.params.values(), *self.states.values())):
            tier.close()


@dataclass(frozen=True, slots=True)
class StepResources:
    """The accelerator, communicators and tiers of a step. Tiers and near ranks are closed with the step."""

    accelerator: Accelerator
    communicators: Communicators
    tiers: Tiers


def sum_dtype(accelerator: Accelerator) -> DType:
    """The type in which sums over many elements are kept: float64 where the device has it."""
    return DType.FLOAT64 if DType.FLOAT64 in accelerator.capabilities().dtypes else DType.FLOAT32


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies between the device and the host up to a point.

    Attributes:
        event: The point, in the stream of the last of them.
        arrivals: How many times copies to the host had been marked by then.
        departures: The same of copies to the device.
    """

    event: Event
    arrivals: int
    departures: int


_Key = tuple[Tier, str, DType, int | None]


class Staging:
    """Memory through which gradients and parameters pass between the device and the kernels of a tier, and what is
    known of copies under way.

    One buffer for each tier, use and type, or for a bucket alone (`PlannedBuffer.bucket`), made when it is first asked
    for.

    [Note: Copies under way]
    Copies to the host run on `stream`, behind the work that they depend on and nothing else; copies to the device on
    the current one. The host waits for a copy before it reads or overwrites its memory, but not where it knows already
    that the copy is over. A copy to the host begins after the copies to the device that were queued before its
    reduction was launched. A value that the host has read came after all that the current stream had waited for
    (`join`).
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.stream = accelerator.new_stream()
        self._buffers: dict[_Key, Buffer] = {}
        self._places: dict[_Key, Place] = {}
        self._last: dict[bool, Copies] = {}
        """The last copies to the host (True) and to the device (False)."""
        self._arrivals = self._departures = 0
        self._known_arrivals = self._known_departures = 0
        """Of which the host knows that they are over."""

    def borrow(self, tier: Tier, use: str, planned: PlannedBuffer, numel: int) -> Buffer:
        """`numel` elements where the kernels of `tier` reach them, undefined, until the next call for the same tier,
        use, type and bucket."""
        key = (tier, use, planned.dtype, planned.bucket)
        buffer = self._buffers.get(key)
        if buffer is None:
            is_apart = planned.place is Place.DEVICE and tier.compute is not self._accelerator
            allocate = self._accelerator.allocate if is_apart else tier.stage
            buffer = self._buffers[key] = allocate(planned.numel, planned.dtype)
            self._places[key] = planned.place
        return buffer.view(0, numel)

    @property
    def departures(self) -> int:
        """How many times copies to the device have been marked."""
        return self._departures

    def mark_arrivals(self, departures: int = 0) -> Copies:
        """Mark the copies to the host that are queued on `stream` now, where it has waited for `departures`."""
        self._arrivals += 1
        self._last[True] = Copies(self.stream.record(), self._arrivals, departures)
        return self._last[True]

    def mark_departures(self) -> Copies:
        """Mark the copies to the device that are queued on the current stream now."""
        self._departures += 1
        event = self._accelerator.current_stream().record()
        self._last[False] = Copies(event, 0, self._departures)
        return self._last[False]

    def wait_for(self, copies: Copies) -> None:
        """Let the host wait until `copies` are over, unless it knows that they are."""
        is_known = copies.arrivals <= self._known_arrivals and copies.departures <= self._known_departures
        if not is_known:
            copies.event.synchronize()
            self.know(copies)

    def join(self) -> Copies | None:
        """Let the current stream wait for all copies. Return them: the host knows that they are over (`know`) when it
        has read a value that the current stream computes afterwards. None where there are none."""
        if not self._last:
            return None
        stream = self._accelerator.current_stream()
        for copies in self._last.values():
            stream.wait(copies.event)
        last = next(iter(self._last.values()))
        return Copies(last.event, self._arrivals, self._departures)

    def know(self, copies: Copies | None) -> None:
        """The host has seen that `copies` are over."""
        if copies is not None:
            self._known_arrivals = max(self._known_arrivals, copies.arrivals)
            self._known_departures = max(self._known_departures, copies.departures)

    def held(self) -> Mapping[Place, int]:
        """The bytes of its buffers, by place."""
        found: Counter[Place] = Counter()
        for key, buffer in self._buffers.items():
            found[self._places[key]] += buffer.nbytes
        return found

    def clear(self) -> None:
        """Release everything."""
        self._buffers.clear()
