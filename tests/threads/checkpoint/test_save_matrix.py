"""Every stage and number of ranks loads, bit by bit, what every other saved.

`make test` has the loads in which every two of (stage and ranks that save, stage and ranks that load) meet once,
`make test-parity` all 256.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairwise import chosen
from parity_models import make_config, parity_loss, parity_model

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.checkpoint import open_checkpoint
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

WAYS = list(product(range(4), range(1, 5)))
"""(stage, number of ranks)."""
Make = Callable[[int, Communicator], Any]
State = dict[tuple[str, str], bytes]


def torch_engine(stage: int, communicator: Communicator) -> Any:
    return polyaccel.initialize(model=parity_model(), config=config_of(stage))[0]


def jax_engine(stage: int, communicator: Communicator) -> Any:
    jax = pytest.importorskip("jax")
    params = {"wide": np.ones((33, 6), np.float32), "odd": np.full(7, 0.5, np.float32), "one": np.float32(2.0)}

    def loss(values: Any, batch: Any, rng: Any) -> Any:
        return sum((leaf.sum() * batch.sum()) for leaf in jax.tree.leaves(values))

    return polyaccel.initialize(model=loss, params=params, config=config_of(stage))


def config_of(stage: int) -> dict[str, Any]:
    zero = {"reduce_bucket_size": 150, "stage3_param_persistence_threshold": 0}
    return make_config(stage, zero=zero, checkpoint={"async": False})


def step(engine: Any, number: int) -> None:
    if hasattr(engine, "module"):
        engine.backward(parity_loss(engine, number, 0, 0))
        engine.step()
    else:
        engine.train_batch(np.full(4, 0.1 * (number + 1), np.float32))


def contents(place: Path, tag: str) -> State:
    """Every tensor of a checkpoint, whole."""
    reader, host, found = open_checkpoint(place, tag), CpuAccelerator("numpy"), {}
    for entry in reader.tensors():
        buffer = host.allocate(entry.numel, entry.dtype)
        reader.read_into(entry.fqn, entry.kind, 0, entry.numel, buffer)
        found[entry.fqn, entry.kind] = buffer.to_bytes()
    return found


def holds(engine: Any, wanted: State) -> int:
    """How many bytes of this rank's own part of the state are checked: each is what it has to be."""
    checked = 0
    for slot, kind, start, buffer in engine.zero.local_shards():
        itemsize = buffer.dtype.itemsize
        expected = wanted[slot.param.fqn, kind][start * itemsize : (start + buffer.numel) * itemsize]
        assert buffer.to_bytes() == expected, (slot.param.fqn, kind)
        checked += len(expected)
    return checked


@pytest.mark.parametrize(
    ("make", "ways"),
    [
        pytest.param(torch_engine, WAYS, id="torch"),
        pytest.param(jax_engine, [way for way in WAYS if way[0] < 3 or way[1] == 1], id="jax"),  # stage 3: in processes
    ],
)
def test_everybody_loads_what_everybody_saved(make: Make, ways: list[tuple[int, int]], tmp_path: Path) -> None:
    place = str(tmp_path)

    def first(communicator: Communicator) -> None:
        engine = make(1, communicator)
        for number in range(2):
            step(engine, number)
        engine.save_checkpoint(place, tag="first")
        engine.destroy()

    def again(communicator: Communicator, stage: int, tag: str) -> None:
        engine = make(stage, communicator)
        engine.load_checkpoint(place, tag="first")
        engine.save_checkpoint(place, tag=tag)
        engine.destroy()

    def check(communicator: Communicator, stage: int, mine: list[str]) -> int:
        engine = make(stage, communicator)
        checked = 0
        for tag in mine:
            engine.load_checkpoint(place, tag=tag)
            checked += holds(engine, wanted)
        engine.destroy()
        return checked

    run_threads(1, first)
    wanted = contents(tmp_path, "first")
    assert {kind for _, kind in wanted} >= {"param", "exp_avg", "exp_avg_sq"}
    rows = [(row[:2], row[2:]) for row in chosen(range(4), range(1, 5), range(4), range(1, 5))]
    loads = {way: [saver for saver, loader in rows if loader == way and saver in ways] for way in ways}
    tags = {(stage, world): f"stage{stage}world{world}" for stage, world in ways}
    for (stage, world), tag in tags.items():
        run_threads(world, again, stage, tag)
        assert contents(tmp_path, tag) == wanted
    for (stage, world), savers in loads.items():
        checked = run_threads(world, check, stage, [tags[way] for way in savers])
        assert sum(checked) == len(savers) * sum(map(len, wanted.values()))
