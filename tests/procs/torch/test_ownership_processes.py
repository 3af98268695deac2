"""What users write into parameters that the ranks of a host share: each rank's own, as if it had them to itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import combinations
from parameter_statements import HONOURED, assert_honoured, config_for, in_turn, train_with
from parity_models import Params, grouped_engine, parity_loss, parity_model

import polyaccel
from polyaccel.comm.backends.shm import cow_mapping, page_map
from polyaccel.comm.backends.shm.backend import SYMMETRIC_VARIABLE, ShmBackend
from polyaccel.comm.backends.shm.cow_mapping import PrivateMapping
from polyaccel.comm.backends.shm.memory import new_file, rounded_up
from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.procs import RankPool

pytestmark = pytest.mark.skipif(not ShmBackend.probe().usable, reason="needs Linux and the compiled library")
IN_TURN = [pytest.param(script, id=name) for name, script in in_turn(HONOURED, 6)]
Pools = Callable[..., RankPool]


def train_here(communicator: Communicator, config: dict[str, Any], script: Any) -> Params:
    return train_with(communicator, parity_model(), config, script)


@pytest.fixture(scope="module")
def unshared_pool() -> Iterator[RankPool]:
    """Two ranks joined by shared memory, each with parameters of its own."""
    pool = RankPool(2, comm_timeout_s=120.0, environ={SYMMETRIC_VARIABLE: "0"}, backend="shm")
    yield pool
    pool.close()


@combinations(
    script=IN_TURN,
    stage=[1, 2, 3],
    kind=["fp32", "bf16", "offload", "nvme"],
    accumulation=[1, 2],
    transport=["shm", "shm, unshared", "gloo"],
)
def test_what_a_script_writes_counts_once(
    rank_pool: Pools,
    unshared_pool: RankPool,
    script: Any,
    stage: int,
    kind: str,
    accumulation: int,
    transport: str,
    tmp_path: Path,
) -> None:
    pool = unshared_pool if transport == "shm, unshared" else rank_pool(2, transport)
    runs = pool.run(train_here, config_for(stage, kind, accumulation, tmp_path), script)
    assert_honoured(runs, kind, accumulation, script)


def look(communicator: Communicator, config: dict[str, Any]) -> dict[str, Any]:
    """What this rank sees of writes by rank 1, before and after each thing that takes over or drops them."""
    model = parity_model()
    engine = grouped_engine(model, config)
    shared = [place.shared is not None for place in engine.zero.params]
    before = model.wide.weight.detach().clone()
    communicator.barrier()
    if communicator.rank == 1:
        model.wide.weight.data.fill_(3.0)
    communicator.barrier()
    found: dict[str, Any] = {"shared": set(shared), "seen": model.wide.weight.data[0, 0].item()}
    communicator.barrier()
    engine.backward(parity_loss(engine, 0, 0, communicator.rank))
    for attempt in ("error", "again"):
        try:
            engine.step()
        except ShardingError as error:
            found[attempt] = str(error)
    model.wide.weight.data.copy_(before)  # a hint: what stood there stands there again
    engine.step()
    found["steps"] = engine.global_steps
    found["own pages"] = [len(place.shared.written()) for place in engine.zero.params if place.shared is not None]
    with polyaccel.zero.GatheredParameters([model.wide.weight], modifier_rank=1):
        model.wide.weight.data.fill_(5.0 + communicator.rank)
    found["modified"] = {float(value) for value in model.wide.weight.detach().unique()}
    model.narrow.weight.data.fill_(7.0)
    found["master"] = polyaccel.utils.safe_get_full_fp32_param(model.narrow.weight).unique().tolist()
    polyaccel.utils.safe_set_full_fp32_param(model.wide.bias, torch.full((33,), 9.0))
    found["set"] = {*model.wide.bias.detach().unique().tolist(), *model.narrow.weight.detach().unique().tolist()}
    engine.destroy()
    found["kept"] = model.narrow.weight.detach().unique().tolist()
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_is_of_one_rank_until_all_have_made_it(rank_pool: Pools, stage: int, bf16: bool) -> None:
    first, second = rank_pool(2, "shm").run(look, config_for(stage, "bf16" if bf16 else "fp32"))
    assert first["shared"] == second["shared"] == {True}
    assert first["seen"] != 3.0
    assert second["seen"] == 3.0
    for found in (first, second):
        expected = (
            "parameter 'wide.weight' was changed by hand (on ranks [1]) and has different values now on ranks [0]"
        )
        assert expected in found["error"]
        assert expected in found["again"]
        assert "modifier_rank=0" in found["error"]
        assert found["steps"] == 1
        assert set(found["own pages"]) == {0}
        assert found["modified"] == {6.0}
        assert found["set"] == {7.0, 9.0}
        assert found["master"] == found["kept"] == [7.0]


def bounded_embedding(communicator: Communicator, config: dict[str, Any]) -> str:
    model = parity_model()
    model.embed.max_norm = 0.5
    engine = grouped_engine(model, config)
    engine.backward(parity_loss(engine, 0, 0, communicator.rank))
    with pytest.raises(ShardingError) as caught:
        engine.step()
    engine.destroy()
    return str(caught.value)


def test_max_norm_renormalises_other_rows_on_each_rank_and_says_so(rank_pool: Pools) -> None:
    for error in rank_pool(2, "shm").run(bounded_embedding, config_for(2, "fp32")):
        assert "'embed.weight' was changed by hand" in error
        assert "max_norm=None" in error


@pytest.fixture(params=["protected", "searched", "read"])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The system's answers: pages that are no longer protected, its page map searched by itself, or read."""
    if request.param != "protected":
        monkeypatch.setattr(page_map, "protect", lambda address, nbytes: False)
    if request.param == "read":
        monkeypatch.setattr(cow_mapping, "_are_searched", lambda: False)
    if request.param == "searched" and not cow_mapping._are_searched():
        pytest.skip("this system does not search its page map")
    return request.param


def mapped(file: int, nbytes: int, pages: str) -> PrivateMapping:
    mapping = PrivateMapping(file, nbytes)
    if pages == "protected" and not mapping.is_protected:
        pytest.skip("this system does not let processes protect their pages")
    return mapping


def test_every_way_of_writing_makes_pages_private(pages: str) -> None:
    """Of a mapping of many pages those that were written to are known, and no others."""
    page, nbytes = os.sysconf("SC_PAGE_SIZE"), 3 * rounded_up(1)
    file = new_file("test", nbytes)
    os.pwrite(file, b"\1" * nbytes, 0)
    mapping = mapped(file, nbytes, pages)
    memory = torch.from_numpy(mapping.bytes())
    assert int(memory.sum()) == nbytes
    assert not mapping.written()
    memory[page + 5] = 2
    memory[2 * page : 2 * page + 1].numpy()[0] = 2
    memory[nbytes - 1] = 2
    assert mapping.written() == [(page, 3 * page), (nbytes - page, nbytes)]
    os.pwrite(file, b"\3" * nbytes, 0)
    assert memory[[0, page, page + 5, nbytes - 1]].tolist() == [3, 1, 2, 2]
    for _ in range(2):
        mapping.forget()
        assert not mapping.written()
        assert memory.unique().tolist() == [3]
        memory[page] = 4
        assert mapping.written() == [(page, 2 * page)]
    os.close(file)


def test_the_system_writes_for_a_process_too(pages: str) -> None:
    """What a read from a file puts into memory is seen like a write of the process itself."""
    page, nbytes = os.sysconf("SC_PAGE_SIZE"), rounded_up(1)
    file = new_file("test", nbytes)
    os.posix_fallocate(file, 0, nbytes)
    mapping = mapped(file, nbytes, pages)
    view = memoryview(mapping.bytes())
    assert os.preadv(file, [view[page : page + 3]], 0) == 3
    assert mapping.written() == [(page, 2 * page)]
    os.close(file)


def test_as_many_stretches_as_pages_are_found(pages: str) -> None:
    """Every second page is written to, then those between some of them."""
    page, count = os.sysconf("SC_PAGE_SIZE"), 300
    nbytes = rounded_up(count * page)
    file = new_file("test", nbytes)
    os.posix_fallocate(file, 0, nbytes)
    mapping = mapped(file, nbytes, pages)
    memory = torch.from_numpy(mapping.bytes())
    memory[: count * page : 2 * page] = 1
    assert mapping.written() == [(at * page, (at + 1) * page) for at in range(0, count, 2)]
    memory[page : 201 * page : 2 * page] = 1
    assert mapping.written() == [
        (0, 201 * page), *((at * page, (at + 1) * page) for at in range(202, count, 2))
    ]  # fmt: skip
    os.close(file)
