"""What one rank of the interpreter holds, and its way through the model in one micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from polyaccel.errors import InvariantError
from polyaccel.testkit.chain import Chain, FloatArray, adam, link_gradients, loss_and_gradient, run_link
from polyaccel.zero.layout import Bucket, ShardLayout
from polyaccel.zero.memory import Purpose
from polyaccel.zero.policy import Placement, ZeroPolicy


class RankState:
    """Parameters, gradients and optimizer states of one rank, by bucket index, each as the policy places it."""

    def __init__(self, rank: int, policy: ZeroPolicy, layout: ShardLayout, weights: dict[str, FloatArray]) -> None:
        self.rank = rank
        self._policy = policy
        self._layout = layout
        self.params: dict[int, FloatArray] = {}
        """Whole buckets: all of them, or those unsharded now."""
        self.shards: dict[int, FloatArray] = {}
        """Own shards, where parameters are sharded."""
        self.resting: dict[int, list[FloatArray]] = {}
        self.fetched: dict[int, list[FloatArray]] = {}
        self._grads: dict[int, FloatArray] = {}
        """Where gradients accumulate and wait for the update: whole buckets or own shards."""
        self._staged: dict[int, FloatArray] = {}
        """Whole buckets of gradients on their way into a shard."""
        for bucket in layout.buckets:
            whole = np.zeros(bucket.numel)
            for slot in bucket.slots:
                whole[slot.offset : slot.end] = weights[slot.param.fqn].ravel()
            if policy.params is Placement.SHARDED:
                self.shards[bucket.index] = whole[slice(*bucket.shard_bounds(rank))].copy()
            else:
                self.params[bucket.index] = whole
            if bucket.kind.trainable:
                self._grads[bucket.index] = np.zeros(_held_numel(policy.grads, bucket))
                self.resting[bucket.index] = [np.zeros(_held_numel(policy.optim, bucket)) for _ in range(2)]

    def own_shard(self, bucket: Bucket) -> FloatArray:
        """This rank's shard of a bucket's parameters, as a view."""
        if self._policy.params is Placement.SHARDED:
            return self.shards[bucket.index]
        return self.params[bucket.index][slice(*bucket.shard_bounds(self.rank))]

    def read(self, fqn: str) -> FloatArray:
        """A parameter in its shape. Raises InvariantError when its bucket is not unsharded."""
        bucket, slot = self._layout.locate(fqn)
        if bucket.index not in self.params:
            raise InvariantError(f"rank {self.rank} uses {fqn!r} while bucket {bucket.index} is not unsharded")
        return self.params[bucket.index][slot.offset : slot.end].reshape(slot.param.shape)

    def stage_gradient(self, bucket: Bucket) -> FloatArray:
        """The whole bucket into which this micro-batch's gradients are added."""
        if self._policy.grads is Placement.REPLICATED:
            return self._grads[bucket.index]
        return self._staged.setdefault(bucket.index, np.zeros(bucket.numel))

    def take_reduced(self, bucket: Bucket, average: FloatArray, *, scatters: bool) -> None:
        """Keep this rank's part of `average` (whole bucket), or all of it, where the update reads."""
        own = slice(*bucket.shard_bounds(self.rank))
        if self._policy.grads is Placement.SHARDED:
            self._grads[bucket.index] += average[own]
            del self._staged[bucket.index]
        elif scatters:
            self._grads[bucket.index][:] = np.nan  # undefined from here on
            self._grads[bucket.index][own] = average[own]
        else:
            self._grads[bucket.index][:] = average

    def update(self, bucket: Bucket, step: int) -> None:
        """One Adam step on what this rank updates of the bucket; its gradients are zero afterwards."""
        grad = self._grads[bucket.index]
        sharded = self._policy.optim is Placement.SHARDED
        if sharded and self._policy.grads is Placement.REPLICATED:
            grad = grad[slice(*bucket.shard_bounds(self.rank))]
        target = self.own_shard(bucket) if sharded else self.params[bucket.index]
        adam(target, grad, self.fetched[bucket.index], step)
        self._grads[bucket.index][:] = 0.0

    def held_numel(self) -> Counter[Purpose]:
        """Elements held now, by purpose. A bucket that is its own only shard does not count twice."""
        gathered = [whole for index, whole in self.params.items() if whole is not self.shards.get(index)]
        states = [array for arrays in (*self.resting.values(), *self.fetched.values()) for array in arrays]
        sharded = self._policy.params is Placement.SHARDED
        return Counter(
            {
                Purpose.PARAMS: _numel(self.shards.values() if sharded else self.params.values()),
                Purpose.GATHERED: _numel(gathered) if sharded else 0,
                Purpose.OPTIM: _numel(states),
                Purpose.GRADS: _numel(self._grads.values()),
                Purpose.GRADS_IN_FLIGHT: _numel(self._staged.values()),
            }
        )


class Pass:
    """One micro-batch on one rank: forward as parameters are announced, backward as gradients are asked for.

    `share` is this micro-batch's weight in the step's gradient; `loss` is known once forward is complete.
    """

    def __init__(
        self, chain: Chain, rank: RankState, layout: ShardLayout, inputs: FloatArray, targets: FloatArray, share: float
    ) -> None:
        self._links = chain.links
        self._bucket_of = [layout.locate(fqn)[0] for fqn in chain.links]
        self._rank = rank
        self._announced: set[int] = set()
        self._done: set[int] = set()
        self._activations = [inputs]
        self._targets = targets
        self._share = share
        self._upstream = np.zeros(0)
        self._remaining = len(chain.links)
        """Links whose backward has not run."""
        self.loss = float("nan")

    def forward(self, bucket: Bucket) -> None:
        """Announce a bucket's parameters and run every link that is possible now."""
        if bucket.index in self._announced:
            raise InvariantError(f"bucket {bucket.index} runs forward twice in a micro-batch")
        self._announced.add(bucket.index)
        while not self._is_forward_complete and self._bucket_of[self._position].index in self._announced:
            param = self._rank.read(self._links[self._position])
            self._activations.append(run_link(param, self._activations[-1]))
        if self._is_forward_complete and self._upstream.size == 0:
            self.loss, gradient = loss_and_gradient(self._activations[-1], self._targets)
            self._upstream = gradient * self._share

    def backward(self, bucket: Bucket) -> None:
        """Run back until all gradients of a bucket are complete. A bucket that no link uses gets zeros."""
        if bucket.index in self._done or not self._is_forward_complete:
            raise InvariantError(f"bucket {bucket.index} runs backward twice, or before forward is complete")
        self._done.add(bucket.index)
        if bucket.kind.trainable:
            self._rank.stage_gradient(bucket)
        while self._remaining > self._first_use(bucket):
            self._remaining -= 1
            self._run_back(self._remaining)

    def is_complete(self, bucket: Bucket) -> bool:
        """Whether no link that is still to run back adds to the bucket's gradients."""
        return bucket.index in self._done and self._remaining <= self._first_use(bucket)

    @property
    def _position(self) -> int:
        return len(self._activations) - 1

    @property
    def _is_forward_complete(self) -> bool:
        return self._position == len(self._links)

    def _first_use(self, bucket: Bucket) -> int:
        uses = [index for index, user in enumerate(self._bucket_of) if user is bucket]
        return min(uses, default=len(self._links))

    def _run_back(self, index: int) -> None:
        fqn, bucket = self._links[index], self._bucket_of[index]
        hidden, output = self._activations[index : index + 2]
        self._upstream, grad = link_gradients(self._rank.read(fqn), hidden, output, self._upstream)
        if bucket.kind.trainable:
            slot = next(slot for slot in bucket.slots if slot.param.fqn == fqn)
            self._rank.stage_gradient(bucket)[slot.offset : slot.end] += grad.ravel()


def _held_numel(placement: Placement, bucket: Bucket) -> int:
    return bucket.shard_numel if placement is Placement.SHARDED else bucket.numel


def _numel(arrays: Iterable[FloatArray]) -> int:
    return sum(array.size for array in arrays)
