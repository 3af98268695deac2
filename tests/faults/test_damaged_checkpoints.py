"""A checkpoint that is damaged anywhere is refused on every rank in the same call, and the engines are as they were."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread

import pytest
import torch
from fault_table import TABLE, Ends, sample
from parity_models import SMALL_BUCKET, grouped_engine, make_config, on_threads, parity_loss, parity_model

from polyaccel.checkpoint import FileStorage
from polyaccel.checkpoint.format.commit import read_commit
from polyaccel.errors import CheckpointError, PolyaccelError
from polyaccel.torch.checkpoint.random_states import RandomStates

REFUSED = Ends("names the file, on all ranks, and a tag that is whole", "as before the call; another tag loads")


@dataclass(frozen=True)
class Damage:
    """A fault, what it does to the folder, and a pattern that the refusal has."""

    fault: str
    do: Callable[[], None]
    named: tuple[str, ...]


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Afterwards the file is what it was."""
    data = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(data)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def damages(folder: Path) -> dict[Path, list[Damage]]:
    """Every damage to the save in `folder`, by the file that it is done to."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found: dict[Path, list[Damage]] = {}
    for tensor in manifest["tensors"]:
        for start, length, file, offset, _ in tensor["pieces"]:
            path = folder / file
            what = (file, f"[{start}, {start + length})", f"'{tensor['fqn']}'", f"({tensor['kind']})")
            nbytes = length * torch.empty(0, dtype=getattr(torch, tensor["dtype"])).element_size()
            found.setdefault(path, []).extend(
                Damage("a flipped byte of a tensor", lambda path=path, at=at: flip(path, at), what)
                for at in (offset, offset + nbytes - 1)
            )
    for rank, blobs in enumerate(manifest["blobs"]):
        for name, (file, offset, _, _) in blobs.items():
            path = folder / file
            what = (file, f"'{name}'", f"rank {rank}")
            found[path].append(
                Damage("a flipped byte of a rank's own state", lambda p=path, at=offset: flip(p, at), what)
            )
    for path in [*found, folder / "manifest.json"]:
        damaged = (path.name,)
        found.setdefault(path, []).extend(
            [
                Damage("a truncated file", lambda p=path: p.write_bytes(p.read_bytes()[:-1]), damaged),
                Damage("an emptied file", lambda p=path: p.write_bytes(b""), damaged),
                Damage("a missing file", path.unlink, damaged),
            ]
        )
    marker = folder.parent / "commit.json"
    found[marker] = [
        Damage("a truncated file", lambda: marker.write_bytes(marker.read_bytes()[:-1]), ("commit.json",)),
        Damage("an emptied file", lambda: marker.write_bytes(b""), ("commit.json",)),
        Damage("a missing file", marker.unlink, ("second", "commit")),
        *(
            Damage("a flipped byte of a marker", lambda at=at: flip(marker, at), ("commit.json",))
            for at in range(0, marker.stat().st_size, 16)
        ),
    ]
    told = folder / "manifest.json"
    found[told] += [
        Damage("a flipped byte of a manifest", lambda at=at: flip(told, at), ("manifest.json",))
        for at in range(0, told.stat().st_size, 1024)
    ]
    first, second = sorted(path for path in found if path.suffix == ".safetensors")
    swapped = Damage("two files swapped", lambda: first.write_bytes(second.read_bytes()), (first.name,))
    found[first].append(swapped)
    return found


def digest(engine) -> str:
    """Of everything that an engine would train on with: states, parameters, counts, groups, schedule, generators."""
    found = hashlib.sha256()
    for slot, kind, start, buffer in engine.zero.local_shards():
        found.update(f"{slot.param.fqn} {kind} {start}".encode() + buffer.to_bytes())
    for name, value in engine.module_state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    parts = (engine.counters, engine.loss_scaler, engine.lr_scheduler)
    plain = [*(part.state_dict() for part in parts), engine.zero.steps]
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    found.update(repr([plain, groups, RandomStates.now(engine.accelerator).to_blobs()]).encode())
    return found.hexdigest()


def engine_of(model, stage, **changes):
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.05}}
    config = make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET}, scheduler=schedule, **changes)
    return grouped_engine(model, config)


def go(engine, communicator, steps):
    for step in steps:
        engine.backward(parity_loss(engine, step, 0, communicator.rank))
        engine.step()


def save_two(communicator, model, place, stage, **changes):
    """An engine that has saved `first` and `second`, and trained on since."""
    engine = engine_of(model, stage, **changes)
    go(engine, communicator, range(1))
    engine.save_checkpoint(place, tag="first")
    saved = digest(engine)
    go(engine, communicator, range(1, 2))
    engine.save_checkpoint(place, tag="second")
    engine.wait_for_checkpoint()
    go(engine, communicator, range(2, 3))
    return engine, saved


def folder_of(place: Path, tag: str) -> Path:
    commit = read_commit(FileStorage(place), tag)
    assert commit is not None
    return place / commit.folder


def refused(engine, place: Path, named: tuple[str, ...]) -> None:
    """The load of `second` is refused, and the engine is as it was."""
    before = digest(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(place), tag="second")
    assert all(part in str(caught.value) for part in named)
    assert "first" in str(caught.value)
    assert digest(engine) == before


@pytest.mark.parametrize(("stage", "background"), [(0, True), (1, False), (2, True), (3, False)])
def test_a_damaged_file_changes_nothing_on_any_rank(tmp_path: Path, stage: int, background: bool) -> None:
    """Every file in turn, whether training waited for the save or not."""

    def work(communicator, model):
        saving = {"async": background}
        engine, first = save_two(communicator, model, str(tmp_path), stage, checkpoint=saving)
        cases = [(path, each) for path, of_file in damages(folder_of(tmp_path, "second")).items() for each in of_file]
        for path, damage in sample(cases, 12):
            if communicator.rank == 0:
                with TABLE.case(damage.fault, REFUSED), kept(path):
                    damage.do()
                    communicator.barrier()
                    refused(engine, tmp_path, damage.named)
                    communicator.barrier()
            else:
                communicator.barrier()
                refused(engine, tmp_path, damage.named)
                communicator.barrier()
        engine.load_checkpoint(str(tmp_path), tag="first")
        assert digest(engine) == first
        go(engine, communicator, range(1, 2))

    on_threads(2, work, parity_model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_damage_that_one_rank_alone_sees_is_an_error_on_all(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one host's cache or connection is bad."""
    real, real_into = FileStorage.read, FileStorage.read_into
    bad: list[str] = []

    def read(storage: FileStorage, path: str, offset: int, nbytes: int) -> bytes:
        data = real(storage, path, offset, nbytes)
        return bytes([data[0] ^ 1]) + data[1:] if sees_damage(path) else data

    def read_into(storage: FileStorage, path: str, offset: int, target: memoryview) -> None:
        real_into(storage, path, offset, target)
        if sees_damage(path):
            target[0] ^= 1

    def sees_damage(path: str) -> bool:
        return bool(bad) and path.endswith(".safetensors") and current_thread().name == bad[0]

    monkeypatch.setattr(FileStorage, "read", read)
    monkeypatch.setattr(FileStorage, "read_into", read_into)

    def work(communicator, model):
        engine, first = save_two(communicator, model, str(tmp_path), stage)
        for rank in range(communicator.world_size):
            communicator.barrier()
            bad[:] = [f"rank {rank}"]
            communicator.barrier()
            refused(engine, tmp_path, (f"rank {rank}", "second/", ".safetensors"))
            communicator.barrier()
            bad.clear()
            communicator.barrier()
        engine.load_checkpoint(str(tmp_path), tag="first")
        assert digest(engine) == first

    with TABLE.case("damage that only one rank reads", REFUSED):
        on_threads(3, work, parity_model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_that_changes_during_a_load_leaves_an_engine_that_refuses_to_train(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything was verified, and then the second reading finds other bytes: what was read already is there."""

    def work(communicator, model):
        engine, first = save_two(communicator, model, str(tmp_path), stage)
        communicator.barrier()
        if communicator.rank == 0:
            monkeypatch.setattr("polyaccel.engine.resume.WantedState.read", failing)
        communicator.barrier()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path), tag="second")
        assert caught.value.value == (0, 1)
        assert all(part in str(caught.value) for part in ("'second'", "rank 0"))
        with pytest.raises(PolyaccelError) as caught:
            go(engine, communicator, range(1))
        assert caught.value.value == "loading 'second'"
        with pytest.raises(PolyaccelError) as caught:
            engine.save_checkpoint(str(tmp_path), tag="third")
        assert caught.value.value == "loading 'second'"
        communicator.barrier()
        monkeypatch.undo()
        engine.load_checkpoint(str(tmp_path), tag="first")
        assert digest(engine) == first
        go(engine, communicator, range(1, 2))

    def failing(*_: object) -> None:
        raise CheckpointError("the disk went away")

    with TABLE.case(
        "a file that changes during a load",
        Ends("names the rank and the tag, on all ranks", "refuses to train and to save until a load"),
    ):
        on_threads(2, work, parity_model)
