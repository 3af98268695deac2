"""Weights that reach another process: of two ranks at stage 3, and past receivers that are killed or stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from parity_models import assert_bitwise, batch, make_config, parity_model
from weight_receivers import receiving

import polyaccel
from polyaccel.errors import CommError, CommTimeout
from polyaccel.torch.weight_transfer import WeightReceiver

SMALL = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}
TIED = "head.weight"
LATE_S = 10.0
"""After which a receiver that stopped is given up. On a busy machine one that is well must come within it."""


def step(engine, number, rank=0):
    loss = engine(*batch(number, 0, rank))
    engine.backward(loss)
    engine.step()
    return loss.item()


def received(process, out):
    assert [process.stdout.readline() for _ in range(2)] == ["first\n", "all\n"]
    return torch.load(out)


def sent_once(engine, address):
    """A model that takes the weights in this process."""
    model = parity_model()
    with WeightReceiver(address) as receiver:
        loading = Thread(target=lambda: receiver.receive(60.0).load_into(model))
        loading.start()
        engine.send_weights(address)
        loading.join()
    return model


def send_here(communicator, folder, config, steps):
    """One rank, whose first one starts the receiver; returns its state dict and what the receiver has."""
    engine, *_ = polyaccel.initialize(model=parity_model(), config=config)
    for number in range(steps):
        step(engine, number, communicator.rank)
    address, out = f"unix:{folder}/socket", Path(folder, "received")
    if communicator.rank:
        report = engine.send_weights(address, bucket_nbytes=512)
        found = None
    else:
        with receiving(address, out) as process:
            report = engine.send_weights(address, bucket_nbytes=512)
            found = received(process, out)
    state = engine.module_state_dict()
    engine.destroy()
    return state, found, (report.version, report.tensors, report.buckets)


def test_two_ranks_at_stage_3(rank_pool, tmp_path):
    config = make_config(3, zero=SMALL, bf16={"enabled": True})
    (state, found, report), (_, _, other) = rank_pool(2).run(send_here, str(tmp_path), config, 2)
    assert found["version"] == 2
    assert report == other
    assert report[2] > 1
    assert found["tensors"].keys() == state.keys() - {TIED}
    assert_bitwise(found["tensors"], {name: state[name] for name in found["tensors"]})


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_training_outlives_its_receiver(tmp_path, how):
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(3, zero=SMALL))
    twin, *_ = polyaccel.initialize(model=parity_model(), config=make_config(3, zero=SMALL))
    address, out = f"unix:{tmp_path}/socket", tmp_path / "received"
    with receiving(address, out, "stopped") as process:

        def end():
            assert process.stdout.readline() == "first\n"
            process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        ending = Thread(target=end)
        ending.start()
        with pytest.raises(CommError) as error:
            engine.send_weights(address, bucket_nbytes=64, timeout_s=60.0 if how == "killed" else LATE_S)
        ending.join()
    assert isinstance(error.value, CommTimeout) == (how == "stopped")
    assert error.value.value == f"{tmp_path}/socket"
    assert [step(engine, number) for number in range(2)] == [step(twin, number) for number in range(2)]
    assert_bitwise(sent_once(engine, address).state_dict(), twin.module_state_dict())


def test_no_receiver_is_an_error_on_every_rank(rank_pool, tmp_path):
    assert rank_pool(2).run(miss_here, f"unix:{tmp_path}/socket") == [True, True]


def miss_here(communicator, address):
    """Whether this rank trains on after a transfer without a receiver."""
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(3, zero=SMALL))
    with pytest.raises(CommError):
        engine.send_weights(address)
    step(engine, 0, communicator.rank)
    engine.destroy()
    return True


def test_a_trainer_that_is_killed(tmp_path):
    """The receiver gets the error at once, and takes the next transfer."""
    script = f"""
import polyaccel, os
from parity_models import make_config, parity_model
engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(0))
from polyaccel.torch.weight_transfer.sender import SharedMemorySender
SharedMemorySender.finish = lambda self: os._exit(9)
engine.send_weights("unix:{tmp_path}/socket", bucket_nbytes=64)
"""
    path = ":".join(sys.path)
    command = [sys.executable, "-c", script]
    with (
        WeightReceiver(f"unix:{tmp_path}/socket") as receiver,
        subprocess.Popen(command, env={"PYTHONPATH": path}) as process,
    ):
        with pytest.raises(CommError):
            receiver.receive(120.0).load_into(parity_model())
        assert process.wait() == 9
    engine, *_ = polyaccel.initialize(model=parity_model(), config=make_config(0))
    assert_bitwise(sent_once(engine, f"unix:{tmp_path}/socket").state_dict(), engine.module_state_dict())
