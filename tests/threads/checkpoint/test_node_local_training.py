"""Engines on hosts with disks of their own: what any hosts saved, any others load, bit by bit."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from parity_models import make_config, parity_loss, parity_model

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.save import ranks
from polyaccel.comm.base import Communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import CheckpointError

State = dict[tuple[str, str], bytes]


def engine_of(stage: int) -> Any:
    zero = {"reduce_bucket_size": 150, "stage3_param_persistence_threshold": 0}
    return polyaccel.initialize(
        model=parity_model(), config=make_config(stage, zero=zero, checkpoint={"storage": "node_local"})
    )[0]


def save(communicator: Communicator, place: Path, hosts: tuple[int, ...], stage: int) -> None:
    engine = engine_of(stage)
    for number in range(2):
        engine.backward(parity_loss(engine, number, communicator.rank, 0))
        engine.step()
    engine.save_checkpoint(str(place / f"host{hosts[communicator.rank]}"), client_state={"epoch": 7})
    engine.wait_for_checkpoint()
    engine.destroy()


def load(communicator: Communicator, place: Path, hosts: tuple[int, ...], stage: int, saved: State) -> int:
    """Load, and compare this rank's states with what was saved. Returns how many bytes those are."""
    engine, compared = engine_of(stage), 0
    _, client_state = engine.load_checkpoint(str(place / f"host{hosts[communicator.rank]}"))
    assert client_state == {"epoch": 7}
    for slot, kind, start, buffer in engine.zero.shards_to_load():
        first = start * buffer.dtype.itemsize
        assert buffer.to_bytes() == saved[slot.param.fqn, kind][first : first + buffer.nbytes], (slot.param.fqn, kind)
        compared += buffer.nbytes
    engine.destroy()
    return compared


def contents(place: Path) -> State:
    reader, host, found = open_checkpoint(place), CpuAccelerator("numpy"), {}
    for entry in reader.tensors():
        buffer = host.allocate(entry.numel, entry.dtype)
        reader.read_into(entry.fqn, entry.kind, 0, entry.numel, buffer)
        found[entry.fqn, entry.kind] = buffer.to_bytes()
    return found


@pytest.mark.parametrize(
    ("stage", "other", "readers"),
    [(1, 0, [(0,), (1, 0), (0, 0, 0)]), (3, 2, [(1,), (0, 1, 2), (2, 1, 1)])],
    ids=["1 to 0", "3 to 2"],
)
def test_two_hosts_of_two_ranks_are_loaded_by_others(
    stage: int, other: int, readers: list[tuple[int, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run_threads(4, save, tmp_path, (0, 0, 1, 1), stage)
    assert "training waits" not in caplog.text
    saved = contents(tmp_path / "host1")  # of two hosts each has all: its own and the other's copies
    nbytes = sum(len(data) for (_, kind), data in saved.items() if kind != "buffer")
    for hosts in readers:
        loaded = run_threads(len(hosts), load, tmp_path, hosts, other, saved)
        assert sum(loaded) >= nbytes * (len(hosts) if other == 0 else 1)


class Held:
    """Copies that are not made before they may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go, self.fails = Event(), False
        write_copies = ranks.write_copies

        def held(*args: Any) -> None:
            assert self.may_go.wait(100)
            if self.fails:  # on every rank, as `write_copies` says
                raise CheckpointError("the network is on fire", hint="pour water on it")
            write_copies(*args)

        monkeypatch.setattr(ranks, "write_copies", held)


def train_on(engine: Any, steps: int) -> None:
    for number in range(steps):
        engine.backward(parity_loss(engine, number, engine.communicator.rank, 0))
        engine.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_hosts_save_beside_training(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on any disk before training goes on, and what is there at the end is the state when it was saved."""
    held = Held(monkeypatch)

    def saves(communicator: Communicator) -> State:
        engine = engine_of(stage)
        train_on(engine, 2)
        engine.save_checkpoint(str(tmp_path / f"host{communicator.rank}"), client_state={"epoch": 7})
        then = {(slot.param.fqn, kind): buffer.to_bytes() for slot, kind, _, buffer in engine.zero.shards_to_load()}
        train_on(engine, 2)
        assert not list(tmp_path.glob("host*/*/commit.json"))
        assert any(
            buffer.to_bytes() != then[slot.param.fqn, kind] for slot, kind, _, buffer in engine.zero.shards_to_load()
        )
        communicator.barrier()
        held.may_go.set()
        engine.wait_for_checkpoint()
        assert len(list(tmp_path.glob("host*/*/commit.json"))) == 3
        engine.load_checkpoint(str(tmp_path / f"host{communicator.rank}"))
        assert engine.global_steps == 2
        found = {(slot.param.fqn, kind): buffer.to_bytes() for slot, kind, _, buffer in engine.zero.shards_to_load()}
        engine.destroy()
        assert found == then
        return {}

    run_threads(3, saves)


def test_a_copy_that_fails_is_told_to_all_ranks_by_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)

    def saves(communicator: Communicator) -> None:
        engine, place = engine_of(1), str(tmp_path / f"host{communicator.rank}")
        train_on(engine, 1)
        held.may_go.set()
        engine.save_checkpoint(place)
        engine.wait_for_checkpoint()
        communicator.barrier()
        held.fails = True
        engine.save_checkpoint(place, tag="lost")
        with pytest.raises(CheckpointError) as caught:
            engine.wait_for_checkpoint()
        assert caught.value.value == (0, 1)
        assert all(part in str(caught.value) for part in ("'lost'", "rank 0"))
        communicator.barrier()
        held.fails = False
        train_on(engine, 1)
        engine.load_checkpoint(place)
        assert engine.global_steps == 1
        engine.save_checkpoint(place, tag="again")
        engine.destroy()  # waits for it

    run_threads(2, saves)
    assert not list(tmp_path.glob("host*/lost/save-*"))
    assert len(list(tmp_path.glob("host*/again/commit.json"))) == 2


def test_one_host_saves_beside_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_threads(2, save, tmp_path, (0, 0), 2)
    assert "training waits" not in caplog.text
    assert f"all ranks see one storage, {tmp_path}/host0" in caplog.text
    run_threads(3, load, tmp_path, (0, 0, 5), 2, contents(tmp_path / "host0"))
