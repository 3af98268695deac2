"""Ranks that are processes read a checkpoint together, from one folder and from disks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity_models import make_config, parity_loss, parity_model

import polyaccel
from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.checkpoint.storage.node_local import NodeLocalStorage
from polyaccel.comm.base import Communicator

read_nbytes = [0]


class Counting(FileStorage):
    """Counts what is read of ranks' files, in this process."""

    is_cached = False

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        read_nbytes[0] += nbytes if path.endswith(".safetensors") else 0
        return super().read(path, offset, nbytes)


def trained(communicator: Communicator, stage: int, storage: str) -> Any:
    config = make_config(stage, checkpoint={"storage": storage, "async": False})
    engine = polyaccel.initialize(model=parity_model(), config=config)[0]
    engine.backward(parity_loss(engine, 1, communicator.rank, 0))
    engine.step()
    return engine


def state(engine: Any) -> list[bytes]:
    return [buffer.to_bytes() for *_, buffer in engine.zero.shards_to_load()]


def save_and_load(communicator: Communicator, place: str) -> tuple[int, int, bool]:
    """How much this rank read, how much there is, and whether it has what it saved."""
    engine = trained(communicator, 0, "file")
    engine.save_checkpoint(place, tag="t")
    before = state(engine)
    engine.backward(parity_loss(engine, 2, communicator.rank, 0))
    engine.step()
    real, polyaccel.engine.runtime.open_storage = (
        polyaccel.engine.runtime.open_storage,
        lambda name, location, _: Counting(location),
    )
    read_nbytes[0] = 0
    try:
        engine.load_checkpoint(place, tag="t")
    finally:
        polyaccel.engine.runtime.open_storage = real
    return (
        read_nbytes[0],
        sum(path.stat().st_size for path in Path(place).rglob("*.safetensors")),
        (state(engine) == before),
    )


def test_two_processes_read_half_each_and_share_it(rank_pool: Any, tmp_path: Path) -> None:
    (first, whole, is_same), (second, _, is_same_too) = rank_pool(2).run(save_and_load, str(tmp_path))
    assert is_same
    assert is_same_too
    assert first + second <= whole
    assert min(first, second) > 0.2 * whole


def save_apart(communicator: Communicator, place: str) -> None:
    trained(communicator, 2, "node_local").save_checkpoint(f"{place}/host{communicator.rank}", tag="t")


def load_apart(communicator: Communicator, place: str, hosts: tuple[int, ...]) -> list[bytes]:
    engine = trained(communicator, 0, "node_local")
    engine.load_checkpoint(f"{place}/host{hosts[communicator.rank]}")
    return state(engine)


@pytest.mark.parametrize("hosts", [(0, 1), (1, 0), (1, 2)])
def test_two_processes_on_disks_of_their_own(hosts: tuple[int, int], rank_pool: Any, tmp_path: Path) -> None:
    """With copies and messages by gloo; host 2 is new."""
    pool = rank_pool(2)
    pool.run(save_apart, str(tmp_path))
    for host in (0, 1):
        assert NodeLocalStorage(tmp_path / f"host{host}").names() == ("latest", "place.json", "t")
        assert len(list(tmp_path.glob(f"host{host}/t/*/*.safetensors"))) == 2
    first, second = pool.run(load_apart, str(tmp_path), hosts)
    assert first == second
