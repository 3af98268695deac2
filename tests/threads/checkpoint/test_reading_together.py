"""A load reads each byte of a checkpoint once per host and pass, within its bound on memory, and ends on all ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import pytest
from parity_models import make_config, parity_loss, parity_model

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.checkpoint import FileStorage, open_checkpoint
from polyaccel.checkpoint.format import pieces
from polyaccel.checkpoint.load.cooperative import reading, windows
from polyaccel.comm.backends.local.thread_group import WorldState
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.errors import CheckpointError
from polyaccel.job.host_topology import HostTopology
from polyaccel.testkit.ranks.threads import run_threads

State = dict[tuple[str, str], bytes]


def this_host() -> str:
    topology = default_communicator().host_topology
    return topology.id_by_rank()[topology.rank]


class CountingStorage(FileStorage):
    """Counts every byte of a rank's file that is read, by host."""

    is_cached = False

    counts: ClassVar[Counter[tuple[str, str, int]]] = Counter()
    lock: ClassVar[Lock] = Lock()

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        if path.endswith(".safetensors"):
            with self.lock:
                self.counts.update((this_host(), path, at) for at in range(offset, offset + nbytes))
        return super().read(path, offset, nbytes)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of several pieces, rounds of a few, and every read counted."""
    monkeypatch.setattr(pieces, "MAX_PIECE_NBYTES", 128)
    monkeypatch.setattr(reading, "WINDOW_NBYTES", 512)
    monkeypatch.setattr(
        "polyaccel.engine.runtime.open_storage", lambda name, location, options: CountingStorage(location)
    )
    CountingStorage.counts.clear()
    yield
    CountingStorage.counts.clear()


def on_hosts(monkeypatch: pytest.MonkeyPatch, ranks_a_host: int) -> None:
    def topology(self: WorldState, rank: int) -> HostTopology:
        ranks = range(len(self.traces))
        return HostTopology.of_notes(rank, [(f"host{other // ranks_a_host}", other) for other in ranks])

    monkeypatch.setattr(WorldState, "host_topology", topology)


def engine_of(stage: int, most_nbytes: int | None = None) -> Any:
    zero = {"reduce_bucket_size": 150, "stage3_param_persistence_threshold": 0}
    checkpoint: dict[str, Any] = {"async": False, "staging_memory": most_nbytes}
    return polyaccel.initialize(model=parity_model(), config=make_config(stage, zero=zero, checkpoint=checkpoint))[0]


def save(communicator: Communicator, place: str, stage: int) -> None:
    engine = engine_of(stage)
    for number in range(2):
        engine.backward(parity_loss(engine, number, 0, 0))
        engine.step()
    engine.save_checkpoint(place, tag="t")


def contents(place: Path) -> State:
    """Every tensor of a checkpoint, read by one alone."""
    reader, host, found = open_checkpoint(place), CpuAccelerator("numpy"), {}
    for entry in reader.tensors():
        buffer = host.allocate(entry.numel, entry.dtype)
        reader.read_into(entry.fqn, entry.kind, 0, entry.numel, buffer)
        found[entry.fqn, entry.kind] = buffer.to_bytes()
    return found


def load(communicator: Communicator, place: str, stage: int, most_nbytes: int | None, saved: State) -> int:
    """Load, and compare this rank's states with what was saved. Returns how many bytes those are."""
    engine, compared = engine_of(stage, most_nbytes), 0
    engine.load_checkpoint(place, tag="t")
    for slot, kind, start, buffer in engine.zero.shards_to_load():
        first = start * buffer.dtype.itemsize
        assert buffer.to_bytes() == saved[slot.param.fqn, kind][first : first + buffer.nbytes], (slot.param.fqn, kind)
        compared += buffer.nbytes
    return compared


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("stage", "world", "ranks_a_host"),
    [(0, 1, 1), (0, 2, 2), (0, 4, 2), (1, 3, 3), (2, 2, 2), (2, 4, 2), (3, 3, 3)],
)
def test_each_byte_is_read_once_per_host_and_pass(
    stage: int, world: int, ranks_a_host: int, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hosts(monkeypatch, ranks_a_host)
    run_threads(2, save, str(tmp_path), 1)
    saved = contents(tmp_path)
    CountingStorage.counts.clear()
    loaded = run_threads(world, load, str(tmp_path), stage, None if passes == 1 else 1, saved)
    nbytes = sum(len(data) for (_, kind), data in saved.items() if kind != "buffer")
    assert sum(loaded) >= nbytes * (world if stage == 0 else 1)
    counts = CountingStorage.counts
    assert max(counts.values()) == passes
    by_host = Counter(host for host, *_ in counts)
    assert len(by_host) == world // ranks_a_host
    assert sum(by_host.values()) >= nbytes * (len(by_host) if stage == 0 else 1)


def test_ranks_that_cannot_share_memory_read_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_threads(2, save, str(tmp_path), 0)
    saved = contents(tmp_path)
    CountingStorage.counts.clear()
    real = os.open

    def refusing(path: str, *args: Any) -> int:
        if path.startswith("/proc/"):
            raise PermissionError(path)
        return real(path, *args)

    monkeypatch.setattr(windows.os, "open", refusing)
    run_threads(2, load, str(tmp_path), 0, None, saved)
    assert max(CountingStorage.counts.values()) == 2


@pytest.mark.parametrize(("bad_rank", "most_nbytes"), list(product((0, 1), (None, 1))))
def test_a_read_that_fails_while_taking_over_ends_on_all_ranks(
    bad_rank: int, most_nbytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the second pass, or of the copy out of the windows: nobody waits for the one that failed."""
    run_threads(2, save, str(tmp_path), 2)
    real: Callable[..., Any] = reading.CooperativeReader.read

    def failing(self: reading.CooperativeReader, extent: Any) -> Any:
        data = real(self, extent)
        if default_communicator().rank == bad_rank and "exp_avg_sq" in extent.name:
            raise RuntimeError("the device is on fire")
        return data

    def refused(communicator: Communicator) -> str:
        engine = engine_of(2, most_nbytes)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path), tag="t")
        with pytest.raises(polyaccel.errors.PolyaccelError) as refused:
            engine.save_checkpoint(str(tmp_path / "half"))
        assert refused.value.value == "loading 't'"
        return caught.value.message

    monkeypatch.setattr(reading.CooperativeReader, "read", failing)
    told = run_threads(2, refused)
    assert told[0] == told[1]
    assert f"taking over 't' failed on rank {bad_rank}: RuntimeError: the device is on fire" in told[0]


def test_a_file_that_changes_between_the_passes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_threads(2, save, str(tmp_path), 2)
    piece = open_checkpoint(tmp_path).tensors()[-1].pieces[-1]
    (victim,) = tmp_path.rglob(piece.file)
    real = reading.CooperativeReader.load

    def flip_and_take_over(self: reading.CooperativeReader, *args: Any) -> None:
        if default_communicator().rank == 0 and args[0] == "taking over 't'":
            data = bytearray(victim.read_bytes())
            data[piece.offset] ^= 1
            victim.write_bytes(data)
        default_communicator().barrier()
        real(self, *args)

    monkeypatch.setattr(reading.CooperativeReader, "load", flip_and_take_over)
    with pytest.raises(CheckpointError) as caught:
        run_threads(2, load, str(tmp_path), 1, 1, {})
    assert caught.value.value == (1,)
    assert all(part in str(caught.value) for part in ("'t'", piece.file))


def test_what_is_got_out_of_order_or_more_often_is_still_right(tmp_path: Path) -> None:
    """Only the order that a checkpoint is stored in reads nothing twice, and every order gets the right bytes."""
    run_threads(2, save, str(tmp_path), 0)

    def backwards(communicator: Communicator) -> int:
        reader = open_checkpoint(tmp_path, communicator=communicator)
        entries = reader.tensors()
        with reader.together(communicator, "a test", most_nbytes=1) as together:
            for entry in entries:
                reader.verify(entry.fqn, entry.kind, 0, entry.numel, entry.dtype)
            together.verify("a test")
            found: dict[Any, bytes] = {}

            def read() -> None:
                for entry in (*reversed(entries), *entries[:2]):
                    buffer = communicator.accelerator.allocate(entry.numel, entry.dtype)
                    reader.read_into(entry.fqn, entry.kind, 0, entry.numel, buffer)
                    found[entry.fqn, entry.kind] = buffer.to_bytes()

            together.load("a test", read)
        alone = open_checkpoint(tmp_path)
        for entry in entries:
            buffer = communicator.accelerator.allocate(entry.numel, entry.dtype)
            alone.read_into(entry.fqn, entry.kind, 0, entry.numel, buffer)
            assert buffer.to_bytes() == found[entry.fqn, entry.kind]
        return len(found)

    assert all(run_threads(2, backwards))
