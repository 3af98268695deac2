"""What becomes of gradients between two updates: legal orders of events, and those that are internal errors."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_training import GROUP, make_step

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.errors import InvariantError, PolyaccelError
from polyaccel.zero.buckets.gradients import GradientBucket
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.policy import StepPolicy

NUMPY = CpuAccelerator("numpy")


def make(stage: int) -> ZeroEngine:
    return make_step(SingleCommunicator(NUMPY, timeout_s=60), stage, StepPolicy(), bucket_numel=4096)[0]


def bucket_of(stage: int) -> GradientBucket:
    (bucket,) = make(stage).reducer.buckets
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


def give(step: ZeroEngine, fqn: str) -> None:
    numel = step.layout.locate(fqn)[1].param.numel
    step.reducer.add_gradient(fqn, NUMPY.wrap(np.ones(numel, dtype=np.float32)))


def test_a_gradient_outside_of_a_pass_is_an_internal_error():
    step = make(2)
    with pytest.raises(InvariantError) as caught:
        give(step, "w1")
    assert caught.value.value == "w1"


@pytest.mark.parametrize("stage", [0, 2])
def test_a_pass_begins_and_ends(stage):
    step = make(stage)
    step.begin_backward(reduce=True)
    give(step, "w1")
    assert step.reducer.in_backward
    with pytest.raises(PolyaccelError) as caught:
        step.reducer.require_complete("w1")
    assert caught.value.value == "w1"
    step.reducer.end_backward()
    assert not step.reducer.in_backward
    step.reducer.require_complete("w1")


def test_an_update_reduces_what_the_last_pass_kept_on_this_rank():
    step = make(0)
    step.begin_backward(reduce=False)
    give(step, "w1")
    step.reducer.end_backward()
    bucket, _ = step.reducer.gradients_of("w1")
    assert bucket.holds_unreduced
    assert step.update([GROUP]).applied
    assert not step.holds_gradients


@pytest.mark.parametrize("second", [False, True])
def test_a_pass_that_did_not_end_leaves_gradients_incomplete_until_they_are_discarded(second):
    step = make(2)
    step.begin_backward(reduce=True)
    give(step, "w1")
    if not second:
        step.reducer.abort_backward()
    step.begin_backward(reduce=True)  # a whole pass does not mend them
    give(step, "w1")
    step.reducer.end_backward()
    with pytest.raises(PolyaccelError):
        step.update([GROUP])
    step.discard_gradients()
    step.begin_backward(reduce=True)
    give(step, "w1")
    step.reducer.end_backward()
    assert step.update([GROUP]).applied
