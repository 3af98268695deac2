"""What becomes of gradients between two updates: legal orders of events, and those that are internal errors."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_training import make_step

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.errors import InvariantError
from polyaccel.zero.buckets.gradients import GradientBucket
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.policy import StepPolicy

NUMPY = CpuAccelerator("numpy")


def make(stage: int) -> ZeroEngine:
    return make_step(SingleCommunicator(NUMPY, timeout_s=60), stage, StepPolicy(), bucket_numel=4096)[0]


def bucket_of(stage: int) -> GradientBucket:
    (bucket,) = make(stage).gradient_buckets()
    return bucket


def fill(bucket: GradientBucket, value: float) -> None:
    bucket.begin_backward()
    for index, slot in enumerate(bucket.bucket.slots):
        bucket.add(index, NUMPY.wrap(np.full(slot.param.numel, value, dtype=np.float32)), reducing=True)


def values(bucket: GradientBucket) -> set[float]:
    slots = bucket.bucket.slots
    return {each for slot in slots for each in bucket.result().view(slot.offset, slot.param.numel).raw.tolist()}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_bucket_is_empty_then_reducing_then_reduced(stage):
    bucket = bucket_of(stage)
    assert (bucket.has_content, bucket.holds_result) == (False, False)
    fill(bucket, 1.0)
    assert (bucket.has_content, bucket.holds_unreduced, bucket.holds_result) == (True, True, False)
    bucket.launch()
    assert (bucket.holds_unreduced, bucket.is_pending, bucket.holds_result) == (False, True, False)
    with pytest.raises(InvariantError):
        bucket.result()
    with pytest.raises(InvariantError) as caught:
        bucket.launch()
    assert caught.value.value == bucket.bucket.index
    bucket.finish()
    assert (bucket.is_pending, bucket.holds_result, values(bucket)) == (False, True, {1.0})
    bucket.discard()
    assert (bucket.has_content, bucket.holds_result, bucket.is_launched) == (False, False, False)


def test_sharded_gradients_accumulate_while_an_earlier_reduction_is_under_way():
    bucket = bucket_of(2)
    fill(bucket, 1.0)
    bucket.launch()
    fill(bucket, 2.0)
    assert (bucket.is_pending, bucket.holds_unreduced, bucket.has_late) == (True, True, False)
    bucket.launch()
    bucket.finish()
    assert values(bucket) == {3.0}


def test_replicated_gradients_are_late_once_they_are_reduced():
    bucket = bucket_of(0)
    fill(bucket, 1.0)
    bucket.launch()
    fill(bucket, 2.0)
    assert (bucket.is_launched, bucket.has_late, bucket.holds_unreduced) == (True, True, False)
    bucket.reduce_late()
    assert (bucket.has_late, values(bucket)) == (False, {3.0})


def test_a_result_is_provided_where_there_is_none():
    bucket = bucket_of(0)
    bucket.provide_result()
    assert (bucket.holds_result, values(bucket)) == (True, {0.0})
    fill(bucket, 2.0)
    assert bucket.has_late
