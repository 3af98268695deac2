"""Parameters sharded inside hosts (hpZ, MiCS): each crosses hosts once a step, and no bit differs from other stages."""

from __future__ import annotations

from collections import Counter

import pytest
from parity_models import SMALL_BUCKET, Run, assert_bitwise, make_config, on_threads, train
from pretended_hosts import Hosts
from stage3_models import CASES

from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import FlightRecorder, RecordingCommunicator
from polyaccel.comm.wrappers.hierarchical import HierarchicalCommunicator

SHARDED = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": SMALL_BUCKET}
HOSTS: dict[int, Hosts] = {4: ((0, 1), (2, 3)), 6: ((0, 1, 2), (3, 4, 5))}


def train_across(communicator, model, hosts, zero, accumulation):
    """Train on `hosts`; returns the run, and the last step's calls to other hosts that are about a bucket."""
    across = FlightRecorder()
    intra = inter = None
    for members in hosts:
        intra = communicator.split(members) or intra
    for place in zip(*hosts, strict=True):
        inter = communicator.split(place) or inter
    both = HierarchicalCommunicator(communicator, intra, RecordingCommunicator(inter, across, watch_s=None), hosts)
    set_thread_communicator(both)
    config = make_config(3, accumulation=accumulation, gradient_clipping=0.5, zero={**SHARDED, **zero})
    steps: list[list] = []

    def end_step(_):
        steps.append([entry.collective for entry in across.entries if entry.collective.bucket is not None])
        across.entries.clear()

    run: Run = train(both, model, config, 2, CASES["gpt"].loss, before_update=end_step)
    return run, steps[-1]


def on_hosts(world, accumulation=1, **zero):
    return on_threads(world, train_across, CASES["gpt"].build, HOSTS[world], zero, accumulation)


@pytest.mark.parametrize(("world", "stages"), [(4, (0, 1, 2, 3)), (6, (3,))])
def test_near_shards_have_the_bits_of_every_stage(world, stages):
    near = on_hosts(world, stage=3, zero_hpz_partition_size=world // 2)
    for stage in stages:
        for (found, _), (wanted, _) in zip(near, on_hosts(world, stage=stage), strict=True):
            assert_bitwise(found.params, wanted.params)
            assert (found.losses, found.norms) == (wanted.losses, wanted.norms)


def test_parameters_cross_hosts_once_a_step():
    """Of a bucket of M elements, a rank of a host with L exchanges M/L with other hosts, however often it is used."""
    near, plain = (on_hosts(4, 2, stage=3, zero_hpz_partition_size=size)[0][1] for size in (2, 1))
    sizes = {call.bucket: call.numel for call in near if call.operation == "reduce_scatter"}
    assert {call.bucket: call.numel for call in near if call.operation == "all_gather"}.items() >= sizes.items()
    once, often = (Counter(call.bucket for call in calls if call.operation == "all_gather") for calls in (near, plain))
    assert set(once.values()) == {1}
    assert sum(often.values()) > 2 * sum(once.values())
