"""The specification of a training step: runs a schedule in numpy, over all ranks in lockstep, and checks every move.

A rank holds exactly what the policy says. What a correct step never does raises InvariantError: use parameters that are
not unsharded or not published, reduce gradients that are not complete, update without some micro-batch or without the
optimizer's states, leave anything behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from polyaccel.errors import InvariantError
from polyaccel.testkit.chain import Batch, Chain, FloatArray
from polyaccel.testkit.rank_state import Pass, RankState
from polyaccel.zero.layout import Bucket, ShardLayout
from polyaccel.zero.memory import Purpose
from polyaccel.zero.policy import Placement, ZeroPolicy
from polyaccel.zero.schedule import Operation, OpKind


class Interpreter:
    """All ranks of `layout`, training `chain` from `weights`.

    `peak_numel` has the most elements that one rank held at once, by purpose; `sent_numel` what each rank has sent.
    """

    def __init__(self, chain: Chain, weights: dict[str, FloatArray], policy: ZeroPolicy, layout: ShardLayout) -> None:
        self._chain = chain
        self._policy = policy
        self._layout = layout
        self._ranks = [RankState(rank, policy, layout, weights) for rank in range(layout.world_size)]
        self._passes: list[Pass] = []
        self._step = 0
        self._micro_batches = 0
        self._accumulated: Counter[int] = Counter()
        """By bucket: micro-batches in gradients that were not reduced yet."""
        self._reduced: Counter[int] = Counter()
        """By bucket: micro-batches in gradients that were reduced but not used yet."""
        self._updated: set[int] = set()
        self._unpublished: set[int] = set()
        self._meaning: dict[OpKind, Callable[[Bucket], None]] = {
            OpKind.UNSHARD: self._unshard,
            OpKind.RESHARD: self._reshard,
            OpKind.FORWARD: self._forward,
            OpKind.BACKWARD: self._backward,
            OpKind.REDUCE_SCATTER: self._reduce_scatter,
            OpKind.ALL_REDUCE: self._all_reduce,
            OpKind.FETCH: self._fetch,
            OpKind.UPDATE: self._update,
            OpKind.PUBLISH: self._publish,
            OpKind.EVICT: self._evict,
        }
        self.peak_numel: Counter[Purpose] = Counter()
        self.sent_numel = 0

    def step(self, operations: Sequence[Operation], batch: Batch) -> float:
        """Run one optimizer step on `batch` and return the loss over all of it. Raises InvariantError."""
        inputs, targets = batch
        self._step += 1
        self._micro_batches = len(inputs)
        self._updated.clear()
        losses: list[float] = []
        current = -1
        for operation in operations:
            if operation.kind is OpKind.FORWARD and operation.micro_batch == current + 1:
                losses += [one.loss for one in self._passes]
                current += 1
                self._passes = [
                    Pass(self._chain, rank, self._layout, data, target, 1 / len(inputs))
                    for rank, data, target in zip(self._ranks, inputs[current], targets[current], strict=True)
                ]
            self._require(operation.micro_batch == max(0, current), f"{operation} comes in micro-batch {current}")
            self._meaning[operation.kind](self._layout.buckets[operation.bucket])
            for rank in self._ranks:
                self.peak_numel |= rank.held_numel()
        losses += [one.loss for one in self._passes]
        self._passes = []
        self._check_finished()
        return float(np.mean(losses))

    def weights(self) -> dict[str, FloatArray]:
        """Every parameter, from the slices that their owners hold.

        Raises InvariantError when padding is not zero or replicas differ.
        """
        for index, whole in self._ranks[0].params.items():
            same = all(np.array_equal(whole, rank.params[index]) for rank in self._ranks)
            self._require(same, f"ranks hold different parameters in bucket {index}")
        weights = {param.fqn: np.full(param.shape, np.nan) for param in self._layout.params}
        for rank in self._ranks:
            for bucket in self._layout.buckets:
                rest = rank.own_shard(bucket).copy()
                for piece in bucket.slices(rank.rank):
                    values = rest[piece.shard_offset : piece.shard_offset + piece.length]
                    weights[piece.fqn].reshape(-1)[piece.start : piece.start + piece.length] = values
                    values[:] = 0.0
                self._require(not rest.any(), f"padding of bucket {bucket.index} on rank {rank.rank} is not zero")
        return weights

    def _unshard(self, bucket: Bucket) -> None:
        whole = self._gather(bucket)
        for rank in self._ranks:
            self._require(bucket.index not in rank.params, f"bucket {bucket.index} is unsharded already")
            alone = self._layout.world_size == 1  # then the shard is the bucket, and nothing is copied
            rank.params[bucket.index] = rank.own_shard(bucket) if alone else whole.copy()

    def _reshard(self, bucket: Bucket) -> None:
        for rank in self._ranks:
            self._require(bucket.index in rank.params, f"bucket {bucket.index} is not unsharded")
            del rank.params[bucket.index]

    def _forward(self, bucket: Bucket) -> None:
        for one in self._passes:
            one.forward(bucket)

    def _backward(self, bucket: Bucket) -> None:
        for one in self._passes:
            one.backward(bucket)
        if bucket.kind.trainable:
            self._accumulated[bucket.index] += 1

    def _reduce_scatter(self, bucket: Bucket) -> None:
        self._reduce(bucket, scatters=True)

    def _all_reduce(self, bucket: Bucket) -> None:
        self._reduce(bucket, scatters=False)

    def _reduce(self, bucket: Bucket, *, scatters: bool) -> None:
        complete = all(one.is_complete(bucket) for one in self._passes)
        self._require(complete and bucket.index in self._accumulated, f"gradients of {bucket.index} are not complete")
        average = self._ranks[0].stage_gradient(bucket).copy()
        for rank in self._ranks[1:]:
            average += rank.stage_gradient(bucket)
        average /= self._layout.world_size
        for rank in self._ranks:
            rank.take_reduced(bucket, average, scatters=scatters)
        self._reduced[bucket.index] += self._accumulated.pop(bucket.index)
        self.sent_numel += (1 if scatters else 2) * (bucket.numel - bucket.shard_numel)

    def _fetch(self, bucket: Bucket) -> None:
        for rank in self._ranks:
            self._require(bucket.index in rank.resting, f"states of bucket {bucket.index} are not at rest")
            rank.fetched[bucket.index] = rank.resting.pop(bucket.index)

    def _update(self, bucket: Bucket) -> None:
        seen = self._reduced.pop(bucket.index, 0)
        self._require(
            seen == self._micro_batches, f"bucket {bucket.index} updates with {seen} of {self._micro_batches} gradients"
        )
        for rank in self._ranks:
            self._require(bucket.index in rank.fetched, f"states of bucket {bucket.index} are not fetched")
            rank.update(bucket, self._step)
        self._updated.add(bucket.index)
        if self._policy.optim is Placement.SHARDED and self._policy.params is Placement.REPLICATED:
            self._unpublished.add(bucket.index)

    def _publish(self, bucket: Bucket) -> None:
        self._require(bucket.index in self._unpublished, f"bucket {bucket.index} has nothing to publish")
        whole = self._gather(bucket)
        for rank in self._ranks:
            rank.params[bucket.index][:] = whole
        self._unpublished.remove(bucket.index)

    def _evict(self, bucket: Bucket) -> None:
        for rank in self._ranks:
            self._require(bucket.index in rank.fetched, f"states of bucket {bucket.index} are not fetched")
            rank.resting[bucket.index] = rank.fetched.pop(bucket.index)

    def _gather(self, bucket: Bucket) -> FloatArray:
        self.sent_numel += bucket.numel - bucket.shard_numel
        return np.concatenate([rank.own_shard(bucket) for rank in self._ranks])

    def _check_finished(self) -> None:
        trainable = {bucket.index for bucket in self._layout.buckets if bucket.kind.trainable}
        for rank in self._ranks:
            self._require(set(rank.resting) == trainable, f"states are not at rest: {set(rank.fetched)}")
            sharded = self._policy.params is Placement.SHARDED
            self._require(not (sharded and rank.params), f"buckets are still unsharded: {set(rank.params)}")
        self._require(self._updated == trainable, f"only buckets {self._updated} of {trainable} were updated")
        self._require(not self._accumulated, f"gradients were not reduced: {dict(self._accumulated)}")
        self._require(not self._unpublished, f"updates were not published: {self._unpublished}")

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise InvariantError(f"step {self._step}: {message}")
