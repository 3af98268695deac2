"""Which buckets' states leave the device: the last ones, and as large a share as was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError
from polyaccel.zero.plan.layout import ShardLayout, plan_layout
from polyaccel.zero.plan.placement import first_shards, offloaded_buckets


@st.composite
def layouts(draw: st.DrawFn) -> ShardLayout:
    params = [
        ParamSpec(f"p{index}", (draw(st.integers(1, 500)),), DType.FLOAT32, trainable=draw(st.booleans()))
        for index in range(draw(st.integers(1, 12)))
    ]
    persistent = {param.fqn for param in params if draw(st.booleans())}
    return plan_layout(
        params,
        mesh=Mesh.flat(draw(st.integers(1, 3))),
        max_bucket_numel=draw(st.integers(1, 800)),
        persistent=persistent,
    )


@given(layouts(), st.floats(0.0, 1.0))
def test_at_least_the_share_leaves_and_the_first_buckets_stay(layout: ShardLayout, ratio: float) -> None:
    trainable = [bucket for bucket in layout.buckets if bucket.kind.trainable]
    offloaded = offloaded_buckets(layout, ratio)
    stays = [bucket for bucket in trainable if bucket.index not in offloaded]
    assert offloaded <= {bucket.index for bucket in trainable}
    assert stays == trainable[: len(stays)]
    total, gone = (sum(bucket.numel for bucket in group) for group in (trainable, trainable[len(stays) :]))
    rounding = 1e-9 * total
    assert gone >= ratio * total - rounding
    if offloaded:  # and not a bucket more than needed
        assert gone - trainable[len(stays)].numel < ratio * total + rounding


@given(layouts())
def test_all_or_nothing(layout: ShardLayout) -> None:
    trainable = {bucket.index for bucket in layout.buckets if bucket.kind.trainable}
    assert offloaded_buckets(layout, 0.0) == frozenset()
    assert offloaded_buckets(layout, 1.0) == trainable


@given(layouts(), st.integers(0, 3000))
def test_the_first_shards_that_fit_are_kept(layout: ShardLayout, room: int) -> None:
    sharded = [bucket for bucket in layout.buckets if not bucket.kind.persistent]
    kept = first_shards(layout, room)
    first, rest = sharded[: len(kept)], sharded[len(kept) :]
    assert kept == {bucket.index for bucket in first}
    used = sum(bucket.shard_numel for bucket in first)
    assert used <= room
    if rest:
        assert used + rest[0].shard_numel > room


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_impossible_shares_are_refused(ratio: float) -> None:
    layout = plan_layout([ParamSpec("p", (4,), DType.FLOAT32)], mesh=Mesh.flat(1), max_bucket_numel=8)
    with pytest.raises(ShardingError) as caught:
        offloaded_buckets(layout, ratio)
    assert caught.value.value is ratio
