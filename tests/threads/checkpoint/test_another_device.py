"""A checkpoint goes on on another accelerator: everything exactly, but for the states of generators that it has not."""

from __future__ import annotations

import io
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from parity_models import assert_bitwise, make_config, parity_loss, parity_model, snapshot
from torch import nn

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.checkpoint.random_states import RandomStates

WORLD, STAGE = 2, 2


class OtherDevice(CpuAccelerator):
    """A device whose generator takes back its own states only."""

    name = "other"

    def __init__(self) -> None:
        super().__init__("torch")
        self.state = b"other 0"

    def rng_state(self) -> bytes:
        return self.state

    def set_rng_state(self, state: bytes) -> None:
        if not state.startswith(b"other "):
            raise ShardingError(f"{len(state)} bytes are no state of {self.name}")
        self.state = state


DEVICES = {"cpu": lambda: CpuAccelerator("torch"), "other": OtherDevice}


def build(communicator: Communicator, step: int) -> tuple[Any, nn.Module]:
    model = parity_model()
    engine, *_ = polyaccel.initialize(model=model, config=make_config(STAGE))
    for at in range(step):
        train(engine, at)
    return engine, model


def train(engine: Any, step: int) -> float:
    loss = parity_loss(engine, step, 0, 0)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def save(communicator: Communicator, folder: str) -> tuple[float, Any]:
    engine, model = build(communicator, 2)
    assert engine.save_checkpoint(folder)
    return train(engine, 5), snapshot(model)


def load(communicator: Communicator, folder: str) -> tuple[float, Any]:
    engine, model = build(communicator, 1)
    engine.load_checkpoint(folder)
    return train(engine, 5), snapshot(model)


@pytest.mark.parametrize("says", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize(("before", "after"), [("cpu", "other"), ("other", "cpu"), ("other", "other")])
def test_it_goes_on_exactly_with_one_warning(
    before: str, after: str, says: bool, tmp_path: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not says:  # as checkpoints were once
        to_blobs = RandomStates.to_blobs
        monkeypatch.setattr(
            RandomStates, "to_blobs", lambda self: {k: v for k, v in to_blobs(self).items() if k != "rng.device"}
        )
    (loss, params), _ = run_threads(WORLD, save, str(tmp_path), accelerator=DEVICES[before]())
    with caplog.at_level(logging.WARNING, logger="polyaccel"):
        (resumed_loss, resumed), _ = run_threads(WORLD, load, str(tmp_path), accelerator=DEVICES[after]())
    assert resumed_loss == loss
    assert_bitwise(resumed, params)
    told = [record.getMessage() for record in caplog.records if "random generators" in record.getMessage()]
    by = before if says else "another one"
    kept = f"random generators of accelerator {after} keep their present states: the checkpoint was saved on {by}"
    assert told == ([] if before == after else [kept])


@pytest.mark.parametrize(("before", "after"), [("cpu", "other"), ("other", "cpu")])
def test_the_hosts_generators_go_on(before: str, after: str) -> None:
    blobs = RandomStates.now(DEVICES[before]()).to_blobs()
    expected = [torch.rand(1).item(), random.random(), float(np.random.random())]
    accelerator = DEVICES[after]()
    present = accelerator.rng_state()
    states = RandomStates.from_blobs(blobs, accelerator)
    assert states.accelerator is None
    assert accelerator.rng_state() == present
    states.restore(accelerator)
    assert [torch.rand(1).item(), random.random(), float(np.random.random())] == expected


def test_a_state_that_its_own_accelerator_refuses_is_damage() -> None:
    blobs = RandomStates.now(OtherDevice()).to_blobs() | {"rng.accelerator": b"?"}
    with pytest.raises(CheckpointError) as caught:
        RandomStates.from_blobs(blobs, OtherDevice())
    assert "load_module_only=True" in str(caught.value)


@pytest.mark.parametrize("where", ["cuda:0", "nowhere:1", "cpu"])
@pytest.mark.parametrize("writer", ["packed", "torch.save"])
def test_an_optimizers_tensors_of_a_device_that_is_not_here_come_to_the_host(
    where: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "cuda:0" and torch.cuda.is_available():
        pytest.skip("the device is here")
    state = {"state": torch.arange(3.0)}
    if writer == "packed":
        data = packed(state, "the state").replace(b'"device":"cpu"', b'"device":"%s"' % where.encode())
        data = data.replace(rb"\"device\":\"cpu\"", rb"\"device\":\"%s\"" % where.encode())
        header = int.from_bytes(data[:8], "little") + len(where) - len("cpu")
        data = header.to_bytes(8, "little") + data[8:]
    else:
        stream = io.BytesIO()
        monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: where)
        torch.save(state, stream)
        monkeypatch.undo()
        data = stream.getvalue()
    assert where.encode() in data
    found = unpacked(data, "the state")["state"]
    assert (found.device.type, found.tolist()) == ("cpu", [0.0, 1.0, 2.0])
