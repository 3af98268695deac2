"""A job that is started again goes on from the last step that all ranks had finished, out of the keeper's memory."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import assert_bitwise, assert_close, make_config, on_threads, parity_model
from replica_starts import engine_of, losses_of, start
from served_keeper import SECRET, Served
from torch import nn

import polyaccel
from polyaccel.checkpoint.in_memory import replicas, writer
from polyaccel.checkpoint.in_memory.parts import PartKey
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
from polyaccel.job.memory_server.start import KeeperProcess, can_keep

pytestmark = pytest.mark.skipif(not can_keep(), reason="sockets and memory without names are Linux's")
BF16 = {"bf16": {"enabled": True}}


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A keeper, and ranks of a job that find it."""
    served = Served(f"replicas-{tmp_path}")
    monkeypatch.setenv(KEEPER_VARIABLE, served.name)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    monkeypatch.setattr(replicas, "_engines", count())
    yield served
    served.close()


CASES = [(1, 0, {}), (2, 1, {}), (2, 2, BF16), (3, 3, {}), (2, 0, BF16)]


@pytest.mark.parametrize(("world", "stage", "changes"), CASES, ids=[f"{w} ranks, stage {s}" for w, s, _ in CASES])
@pytest.mark.usefixtures("keeper")
def test_a_start_goes_on_from_the_last_step_of_the_one_before(
    world: int, stage: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing was ever written to a disk; losses and parameters are those of the run without an interruption."""
    _, whole, parameters = start(world, stage, tmp_path, 7, is_restart=False, checkpoint={}, **changes)
    start(world, stage, tmp_path, 3, is_restart=False, **changes)
    began, _, _ = start(world, stage, tmp_path, 1, **changes)
    assert began == 3
    began, losses, found = start(world, stage, tmp_path, 3, **changes)
    assert began == 4
    assert losses == whole[4:]
    assert_bitwise(found, parameters)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("before", "after"), [((3, 3), (2, 1)), ((1, 0), (3, 3)), ((2, 2), (1, 1))])
@pytest.mark.usefixtures("keeper")
def test_another_world_size_and_stage_goes_on_too(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    _, whole, parameters = start(*before, tmp_path, 6, is_restart=False, checkpoint={})
    start(*before, tmp_path, 3, is_restart=False)
    began, losses, found = start(*after, tmp_path, 3)
    assert began == 3
    assert losses == pytest.approx(whole[3:], rel=1e-4)
    assert_close(found, parameters, 1e-4)


def test_a_rank_that_dies_in_the_middle_leaves_the_step_before(
    tmp_path: Path, keeper: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 never finishes its part of step 4: that step is lost, and the log says so."""
    finish = writer.ReplicaWriter._finish

    def dies(self: writer.ReplicaWriter, copy: Any) -> PartKey | None:
        if copy.key.step == 4 and copy.key.rank == 1:
            raise CheckpointError("killed")
        return finish(self, copy)

    monkeypatch.setattr(writer.ReplicaWriter, "_finish", dies)
    start(2, 2, tmp_path, 4, is_restart=False)
    monkeypatch.undo()
    monkeypatch.setenv(KEEPER_VARIABLE, keeper.name)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    caplog.set_level(logging.INFO)
    began, _, _ = start(2, 2, tmp_path, 1)
    assert began == 3
    assert "continuing from the replica of step 3 in memory: 1 step is lost" in caplog.text


@pytest.mark.usefixtures("keeper")
def test_a_part_that_fails_costs_no_step_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever ranks fail to make which parts: what all ranks have made last is there, and is whole."""
    finish, failing = writer.ReplicaWriter._finish, {(2, 0), (4, 1), (5, 1), (6, 0), (8, 0), (8, 1)}

    def fails(self: writer.ReplicaWriter, copy: Any) -> PartKey | None:
        if (copy.key.step, copy.key.rank) in failing:
            raise CheckpointError("no part of this step")
        return finish(self, copy)

    monkeypatch.setattr(writer.ReplicaWriter, "_finish", fails)
    _, whole, _ = start(2, 1, tmp_path, 10, is_restart=False, checkpoint={})
    for steps in range(1, 10):
        client_names(drop=True)
        start(2, 1, tmp_path, steps, is_restart=False)
        last = max(step for step in range(1, steps + 1) if not {(step, 0), (step, 1)} & failing)
        began, losses, _ = start(2, 1, tmp_path, 1)
        assert began == last
        assert losses == whole[last : last + 1]


def client_names(*, drop: bool = False) -> dict[str, int]:
    """What the keeper has, which it then forgets if asked to."""
    client = replicas.KeeperClient.from_environment(os.environ)
    assert client is not None
    found = client.names("")
    if drop:
        client.drop("")
    client.close()
    return found


def test_a_disk_that_is_newer_goes_first(keeper: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of the last step loses nothing either, and is on a disk."""
    start(2, 1, tmp_path, 2, is_restart=False)
    start(2, 1, tmp_path, 2, act=lambda engine: engine.save_checkpoint(str(tmp_path), tag="early"))
    caplog.set_level(logging.INFO)
    began, _, _ = start(2, 1, tmp_path, 0)
    assert began == 4
    assert "continuing from the replica of step 4 in memory: no step is lost; on disk there is step 2" in caplog.text
    start(2, 1, tmp_path, 0, act=lambda engine: engine.save_checkpoint(str(tmp_path), tag="late"))
    caplog.clear()
    began, _, _ = start(2, 1, tmp_path, 0)
    assert began == 4
    assert "the replica in memory is of step 4: continuing from 'late' on disk: no step is lost" in caplog.text


def test_a_damaged_replica_is_named_and_the_disk_serves(
    keeper: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(2, 1, tmp_path, 2, is_restart=False, act=lambda engine: engine.save_checkpoint(str(tmp_path), tag="first"))
    for key in [key for key in client_names() if key.startswith("parts/") and key.endswith("/000001")]:
        entry = keeper.shelf.get(key)
        assert entry is not None
        assert entry.memory is not None
        (byte,) = os.pread(entry.memory, 1, entry.nbytes - 100)
        os.pwrite(entry.memory, bytes([byte ^ 1]), entry.nbytes - 100)
        os.close(entry.memory)
    began, _, _ = start(2, 1, tmp_path, 1)
    assert began == 0
    assert "the replica of step 2 in memory cannot be used: loading 'global_step2'" in caplog.text
    assert "rank00001.safetensors" in caplog.text


def test_a_damaged_note_is_named_and_the_disk_serves(
    keeper: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(1, 1, tmp_path, 2, is_restart=False, act=lambda engine: engine.save_checkpoint(str(tmp_path), tag="first"))
    for key in [key for key in client_names() if key.startswith("parts/")]:
        entry = keeper.shelf.get(key)
        assert entry is not None
        keeper.shelf.put(key, entry.note.replace(b"AdamW", b"Adamw"), entry.memory)
    began, _, _ = start(1, 1, tmp_path, 0)
    assert began == 0
    assert "the note of rank 0's part of the replica of step 2 is damaged" in caplog.text


@pytest.mark.usefixtures("keeper")
def test_an_engine_says_whether_there_is_a_replica(tmp_path: Path) -> None:
    """For scripts that ask before they load."""

    def ask(communicator: Communicator, model: nn.Module) -> bool:
        engine = engine_of(model, 1, 2)
        has_replica = bool(engine.has_replica())
        engine.destroy()
        return has_replica

    assert on_threads(2, ask, parity_model) == [False, False]
    start(2, 1, tmp_path, 1, is_restart=False)
    replicas._engines = count()
    assert on_threads(2, ask, parity_model) == [True, True]


@pytest.mark.usefixtures("keeper")
def test_a_replica_of_another_model_is_refused_with_nothing_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(communicator: Communicator, model: nn.Module) -> int:
        engine, *_ = polyaccel.initialize(model=model, config=make_config(1, checkpoint={"in_memory": True}))
        try:
            engine.load_checkpoint(str(tmp_path))
        finally:
            engine.destroy()
        return int(engine.global_steps)

    start(1, 1, tmp_path, 2, is_restart=False)
    replicas._engines = count()
    with pytest.raises(CheckpointError) as caught:
        on_threads(1, train, lambda: nn.Linear(3, 2))
    assert caught.value.value == (0,)
    assert "'latest'" in str(caught.value)
    assert "the replica of step 2 in memory cannot be used" in caplog.text
    assert "is of another model" in caplog.text


@pytest.mark.usefixtures("keeper")
def test_a_load_in_the_same_process_is_that_of_the_disk(tmp_path: Path) -> None:
    """Whoever goes back to a checkpoint wants that one; and what was replicated before it counts no more."""

    def back(engine: Any) -> None:
        losses_of(engine, 2)
        engine.save_checkpoint(str(tmp_path), tag="two")
        losses_of(engine, 3)
        engine.load_checkpoint(str(tmp_path))
        assert engine.global_steps == 2

    start(2, 1, tmp_path, 0, act=back, is_restart=False)
    assert not [key for key in client_names() if key.startswith("parts/")]
    assert start(2, 1, tmp_path, 0)[0] == 2
    start(2, 1, tmp_path, 1)
    assert start(2, 1, tmp_path, 0)[0] == 3


@pytest.mark.usefixtures("keeper")
def test_the_client_state_is_that_of_the_last_save_or_what_the_script_sets(tmp_path: Path) -> None:
    states: list[Any] = []

    def look(engine: Any) -> None:
        states.append(dict(engine.client_state))

    def set_it(engine: Any) -> None:
        look(engine)
        engine.client_state["seen"] = torch.arange(3)

    def save(engine: Any) -> None:
        engine.save_checkpoint(str(tmp_path), client_state={"epoch": 4})

    start(1, 1, tmp_path, 1, is_restart=False, act=save)
    start(1, 1, tmp_path, 1, act=set_it)
    start(1, 1, tmp_path, 0, act=look)
    assert states[0] == {"epoch": 4}
    assert states[1]["epoch"] == 4
    assert states[1]["seen"].tolist() == [0, 1, 2]


@pytest.mark.usefixtures("keeper")
def test_what_no_update_writes_is_copied_once_and_again_when_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    finish = writer.ReplicaWriter._finish

    def look(self: writer.ReplicaWriter, copy: Any) -> PartKey | None:
        kept.append(len(copy.kept))
        return finish(self, copy)

    def change(engine: Any) -> None:
        losses_of(engine, 4)
        with torch.no_grad():
            engine.module.frozen.fill_(3.0)

    monkeypatch.setattr(writer.ReplicaWriter, "_finish", look)
    start(1, 1, tmp_path, 3, is_restart=False, act=change)
    assert kept == [0, 0, 1, 1, 0, 0, 1]  # each of the two images has it once
    _, _, found = start(1, 1, tmp_path, 0)
    assert found["frozen"].tolist() == [3.0] * 6


@pytest.mark.usefixtures("keeper")
def test_states_that_are_written_by_hand_meanwhile_make_no_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = writer.ReplicaWriter._finish

    def written(self: writer.ReplicaWriter, copy: Any) -> PartKey | None:
        summed = writer._summed

        def write(image: Any, offset: int, nbytes: int, spec: Any, piece: Any) -> tuple[int, ...]:
            if copy.key.step == 3 and piece is not None:
                piece.buffer.bump_version()
            return summed(image, offset, nbytes, spec, piece)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "_summed", write)
            return finish(self, copy)

    monkeypatch.setattr(writer.ReplicaWriter, "_finish", written)
    start(1, 1, tmp_path, 3, is_restart=False)
    assert start(1, 1, tmp_path, 0)[0] == 2


@pytest.mark.usefixtures("keeper")
def test_the_keeper_has_two_generations_at_most(tmp_path: Path) -> None:
    def count_parts(engine: Any) -> None:
        for _ in range(5):
            losses_of(engine, 1)
            engine._settle_replica()
            engine.communicator.barrier()
            steps = {PartKey.parse(key) for key in client_names() if key.startswith("parts/")}
            assert len({key.step for key in steps if key}) <= 2
            engine.communicator.barrier()

    start(2, 2, tmp_path, 0, is_restart=False, act=count_parts)
    start(2, 2, tmp_path, 3)
    attempts = {key.attempt for key in map(PartKey.parse, client_names()) if key}
    assert len(attempts) == 1  # those of the start before are gone


def test_a_keeper_that_is_lost_is_said_once_and_found_again(
    keeper: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = KeeperProcess(SECRET)
    monkeypatch.setenv(KEEPER_VARIABLE, process.name)

    def lose(engine: Any) -> None:
        losses_of(engine, 2)
        engine._settle_replica()
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        losses_of(engine, 2)
        assert process.ensure()

    start(1, 1, tmp_path, 2, is_restart=False, act=lose)
    assert caplog.text.count("rank 0 makes no replicas for now: the keeper of this host") == 1
    assert start(1, 1, tmp_path, 0)[0] == 6
    process.close()


def test_without_a_keeper_there_are_none_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(2, 1, tmp_path, 1, is_restart=False)
    assert (
        caplog.text.count('"checkpoint.in_memory" has no effect: ranks [0, 1] have no keeper: start the job with') == 1
    )


@pytest.mark.usefixtures("keeper")
def test_a_rank_takes_no_more_memory_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, whole, _ = start(2, 1, tmp_path, 3, is_restart=False, checkpoint={})
    _, losses, _ = start(2, 1, tmp_path, 3, is_restart=False, checkpoint={"in_memory": {"memory": 1000}})
    assert losses == whole
    assert caplog.text.count("rank 0 makes no replicas for now: replicas of rank 0 would take") == 1
    assert not [key for key in client_names() if key.startswith("parts/")]


@pytest.mark.usefixtures("keeper")
def test_a_step_whose_gradients_are_not_finite_and_were_applied_is_not_gone_on_from(tmp_path: Path) -> None:
    """As on a disk: nothing resumes from weights that are NaN unless they are named."""

    def spoil(engine: Any) -> None:
        losses_of(engine, 2)
        engine.save_checkpoint(str(tmp_path), tag="good")
        engine.backward(engine(*(torch.zeros(4, dtype=torch.long),) * 2) * float("nan"))
        engine.step()

    start(1, 1, tmp_path, 1, is_restart=False, act=spoil)
    assert start(1, 1, tmp_path, 0)[0] == 2
