"""Weights over groups: two ranks send what they own to receivers in other processes, which die or lag."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from parity_models import assert_bitwise, batch, make_config, parity_model
from weight_receivers import receiving

import polyaccel
from polyaccel.errors import CommError, CommTimeout
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.torch.weight_transfer import WeightReceiver

SMALL = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}
TIED = "head.weight"
SECRET = "a secret of these tests"
ANY_PORT = "tcp://127.0.0.1:0"
LATE_S = 10.0
"""After which a receiver that stopped is given up. On a busy machine one that is well must come within it."""


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


@contextmanager
def listening(out, how="all"):
    """A process that listens at a port of its choice; yields it and its address."""
    with receiving(ANY_PORT, out, how) as process:
        yield process, process.stdout.readline().strip()


def step(engine, number, rank=0):
    loss = engine(*batch(number, 0, rank))
    engine.backward(loss)
    engine.step()
    return loss.item()


def gathers_of(engine):
    """The buckets that are gathered from now on to be read."""
    gathers = []
    before = engine.zero.params.gathered.unsharded_view
    engine.zero.params.gathered.unsharded_view = lambda index: gathers.append(index) or before(index)
    return gathers


def send_here(communicator, addresses, config, named):
    """One rank: a step, a transfer, and a step after it."""
    import os

    os.environ[SECRET_VARIABLE] = SECRET
    engine, *_ = polyaccel.initialize(model=parity_model(), config=config)
    step(engine, 0, communicator.rank)
    gathers = gathers_of(engine)
    report = engine.send_weights(addresses, bucket_nbytes=512, **named)
    sent_without_gathers = not gathers
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    step(engine, 1, communicator.rank)
    engine.destroy()
    return state, (report.version, report.tensors, report.buckets), sent_without_gathers


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_send_to_two_receivers(rank_pool, tmp_path, stage):
    config = make_config(stage, zero=SMALL, bf16={"enabled": True})
    outs = [tmp_path / "first", tmp_path / "second"]
    with listening(outs[0]) as (one, first), listening(outs[1]) as (two, second):
        results = rank_pool(2).run(send_here, [first, second], config, {})
        for process in (one, two):
            assert [process.stdout.readline() for _ in range(2)] == ["first\n", "all\n"]
    (state, report, is_ungathered), other = results
    assert report == other[1]
    assert report[0] == 1
    assert report[2] > 2
    assert is_ungathered
    for out in outs:
        found = torch.load(out)
        assert found["version"] == 1
        assert found["tensors"].keys() == state.keys() - {TIED}
        assert_bitwise(found["tensors"], {name: state[name] for name in found["tensors"]})


def fail_here(communicator, folder, how):
    """One rank, whose receiver ends in the middle; returns the error's kind, and losses after it."""
    import os

    os.environ[SECRET_VARIABLE] = SECRET
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(3, zero=SMALL))
    with listening(Path(folder, f"out{communicator.rank}"), "stopped") as (process, own):
        address = communicator.broadcast_object(own)
        ended = Event()

        def end():
            assert process.stdout.readline() == "first\n"
            process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            ended.set()

        if communicator.rank == 0:
            Thread(target=end, daemon=True).start()
        with pytest.raises(CommError) as error:
            engine.send_weights(address, bucket_nbytes=64, timeout_s=60.0 if how == "killed" else LATE_S)
        assert communicator.rank or ended.wait(60.0)
    losses = [step(engine, number, communicator.rank) for number in range(2)]
    engine.destroy()
    return isinstance(error.value, CommTimeout), f"tcp://{error.value.value}" == address, losses


def train_here(communicator):
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(3, zero=SMALL))
    losses = [step(engine, number, communicator.rank) for number in range(2)]
    engine.destroy()
    return losses


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_training_outlives_a_receiver_of_groups(rank_pool, tmp_path, how):
    pool = rank_pool(2)
    expected = pool.run(train_here)
    for rank, (is_late, is_named, losses) in enumerate(pool.run(fail_here, str(tmp_path), how)):
        assert is_late == (how == "stopped")
        assert is_named
        assert losses == expected[rank]


def received_here(engine, receiver, **named):
    """A model that takes the weights in this process."""
    model = parity_model()
    loading = Thread(target=lambda: receiver.receive(60.0).load_into(model))
    loading.start()
    engine.send_weights(receiver.address, **named)
    loading.join()
    return model


def test_a_stranger_ends_nothing_and_a_transfer_can_follow(monkeypatch):
    import socket

    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(0))
    with WeightReceiver(ANY_PORT) as receiver:
        host, port = receiver.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes(1000))
            model = received_here(engine, receiver)
        assert_bitwise(model.state_dict(), engine.module_state_dict())
        step(engine, 0)
        assert_bitwise(received_here(engine, receiver, bucket_nbytes=64).state_dict(), engine.module_state_dict())


def test_another_model_is_refused_by_name():
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(0))
    failures = []
    with WeightReceiver(ANY_PORT) as receiver:

        def load():
            with pytest.raises(polyaccel.PolyaccelError) as error:
                receiver.receive(60.0).load_into(torch.nn.Linear(2, 2))
            failures.append(type(error.value).__name__)

        loading = Thread(target=load)
        loading.start()
        with pytest.raises(polyaccel.PolyaccelError) as error:
            engine.send_weights(receiver.address)
        loading.join()
    assert failures == ["ShardingError"]
    assert f"tcp://{error.value.value}" == receiver.address


def test_a_secret_is_needed(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE)
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(0))
    with pytest.raises(CommError):
        WeightReceiver(ANY_PORT)
    with pytest.raises(CommError) as error:
        engine.send_weights("tcp://127.0.0.1:1")
    assert error.value.value == "127.0.0.1:1"


def test_a_group_serves_many_transfers():
    """Neither threads nor open files grow; one that a receiver left in the middle, or that has another limit, is not
    used again."""
    import gc
    import os
    import threading

    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(0))

    def identity(receiver, timeout_s=60.0):
        return engine._weight_groups.identity([receiver.address.removeprefix("tcp://")], timeout_s)

    def held():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    gc.collect()  # or what other tests left might go while this one counts

    with WeightReceiver(ANY_PORT) as receiver:
        received_here(engine, receiver)
        first, before = identity(receiver), held()
        for number in range(10):
            step(engine, number)
            model = received_here(engine, receiver, bucket_nbytes=256)
            assert_bitwise(model.state_dict(), engine.module_state_dict())
        assert identity(receiver) == first
        assert all(now <= then for now, then in zip(held(), before, strict=True))
        leaving = Thread(target=lambda: next(iter(receiver.receive(60.0))))
        leaving.start()
        with pytest.raises(CommError):
            engine.send_weights(receiver.address, bucket_nbytes=64)
        leaving.join()
        assert identity(receiver) == ""
        received_here(engine, receiver)
        second = identity(receiver)
        assert second not in ("", first)
        received_here(engine, receiver, timeout_s=30.0)
        assert identity(receiver) == ""
        assert identity(receiver, 30.0) not in ("", first, second)
    with WeightReceiver(receiver.address) as again:  # a server that was started again at its address
        third = identity(again, 30.0)
        received_here(engine, again, timeout_s=30.0)
        assert identity(again, 30.0) not in ("", third)
    engine.destroy()
    assert engine._weight_groups.identity([receiver.address.removeprefix("tcp://")], 30.0) == ""


def test_a_group_is_made_anew_when_one_of_two_receivers_was_started_again():
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(0))

    def send(*receivers):
        models = [parity_model() for _ in receivers]
        threads = [
            Thread(target=lambda one=one, model=model: one.receive(60.0).load_into(model))
            for one, model in zip(receivers, models, strict=True)
        ]
        for thread in threads:
            thread.start()
        addresses = [one.address for one in receivers]
        engine.send_weights(addresses)
        for thread in threads:
            thread.join()
        for model in models:
            assert_bitwise(model.state_dict(), engine.module_state_dict())
        return engine._weight_groups.identity([one.removeprefix("tcp://") for one in addresses], 60.0)

    with WeightReceiver(ANY_PORT) as stays:
        with WeightReceiver(ANY_PORT) as other:
            first = send(stays, other)
            assert send(stays, other) == first
        with WeightReceiver(other.address) as again:
            step(engine, 0)
            assert send(stays, again) not in ("", first)
            assert send(again) != ""  # which leaves the group of both
            assert send(stays, again) != ""
    engine.destroy()
