"""Shared memory of one process: where addresses belong, what is given back when, and what a board shows."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
from backend_marks import needs
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.shm.backend import ShmBackend, _check_one_host
from polyaccel.comm.backends.shm.communicator import NOTE_NBYTES, ShmBoard
from polyaccel.comm.backends.shm.memory import AddressBook, Heap, HeapRange, Member, map_file, new_file
from polyaccel.comm.backends.torch.backend import GlooBackend
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.host_address import start_of
from polyaccel.comm.init import setup
from polyaccel.comm.init.backends import default_backend
from polyaccel.core.types import DType, Probe
from polyaccel.errors import CommError, HostsDifferError
from polyaccel.ops.native import native

pytestmark = needs("shm")


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=30), st.integers(0, 2_000), st.integers(1, 60))
def test_an_address_belongs_to_the_piece_that_holds_all_of_it(pieces, address, nbytes):
    """Against a list that is searched one by one; pieces that are gone belong to nobody."""
    book, start, known = AddressBook(), 100, []
    for index, (length, goes) in enumerate(pieces):
        place = HeapRange(index + 1, length, 7)
        book.add(start, length, place)
        if goes:
            book.remove(start)
        else:
            known.append((start, length, place))
        start += length + index % 3
    expected = [
        (place, address - begin + 7)
        for begin, length, place in known
        if begin <= address and address + nbytes <= begin + length
    ]
    assert book.find(address, nbytes) == (expected[0] if expected else None)


def blocks(heap: Heap) -> int:
    return os.fstat(heap.file).st_blocks * 512


def test_memory_is_zeroed_aligned_known_and_given_back() -> None:
    heap = Heap()
    before = blocks(heap)
    memory = heap.allocate(3 << 20)
    address = memory.ctypes.data
    assert address % 64 == 0
    assert not memory.any()
    memory[:] = 1
    assert blocks(heap) >= before + (3 << 20)
    found = heap.book.find(address + 10, 5)
    assert found is not None
    assert os.pread(heap.file, 5, found[0].base + found[1]) == b"\1" * 5
    view = memory[5:9]
    del memory, found
    gc.collect()
    assert view.sum() == 4  # a view holds the memory
    del view
    gc.collect()
    assert blocks(heap) == before
    assert heap.book.find(address + 10, 5) is None
    assert not heap.allocate(3 << 20).any()


def test_a_forked_child_gives_back_nothing() -> None:
    heap = Heap()
    memory = heap.allocate(1 << 20)
    memory[:] = 7
    read, write = os.pipe()
    gc.collect()  # the child shall not clear away after other tests, whose threads it has not
    child = os.fork()
    if child == 0:
        del memory
        gc.collect()
        os.write(write, b"x")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)
    assert memory.min() == 7


def test_a_mapped_file_outlives_its_descriptor() -> None:
    file = new_file("test", 100)
    assert os.fstat(file).st_mode & 0o777 == 0o600
    one, other = map_file(file, 100), map_file(file, 100)
    os.close(file)
    one[:] = np.arange(100, dtype=np.uint8)
    assert np.array_equal(one, other)


def test_this_process_is_alive_and_a_later_one_of_its_id_would_not_be() -> None:
    library = native().library
    assert library is not None
    start = start_of("self")
    from ctypes import c_uint64

    assert library.pa_shm_is_alive(os.getpid(), c_uint64(start)) == 1
    assert library.pa_shm_is_alive(os.getpid(), c_uint64(start + 1)) == 0
    child = os.fork()
    if child == 0:
        os._exit(0)
    started = start_of(child)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, but a zombie still
    assert library.pa_shm_is_alive(child, c_uint64(started)) == 0
    os.waitpid(child, 0)
    assert library.pa_shm_is_alive(child, c_uint64(started)) == 0


def test_a_board_shows_whole_notes_only() -> None:
    notes = np.zeros(3 * NOTE_NBYTES, np.uint8)
    board = ShmBoard(notes)
    assert board.read(3) == {}
    board.set(0, "first")
    board.set(2, "ö" * NOTE_NBYTES)
    assert board.read(3)[0] == "first"
    assert board.read(3)[2].startswith("ööö")
    board.set(0, "2")
    assert board.read(3)[0] == "2"
    notes[8] ^= 1  # a text in the middle of being written
    assert 0 not in board.read(3)


def meeting(world_size: int, local_world_size: int) -> Rendezvous:
    return Rendezvous(0, world_size, 0, local_world_size, "127.0.0.1", 1, "a test")


def test_shm_is_chosen_on_one_host_and_gloo_where_it_cannot_be(monkeypatch, caplog) -> None:
    cpu = CpuAccelerator("torch")
    assert default_backend(meeting(1, 1), cpu) == "local"
    assert default_backend(meeting(2, 2), cpu) == "shm"
    assert default_backend(meeting(2, 2), CpuAccelerator("numpy")) == "shm"
    assert default_backend(meeting(4, 2), cpu) == "gloo"
    assert default_backend(meeting(257, 257), cpu) == "gloo"
    monkeypatch.setattr(ShmBackend, "probe", classmethod(lambda cls: Probe(False, "csrc/ was not compiled")))
    with caplog.at_level(logging.INFO, "polyaccel"):
        assert default_backend(meeting(2, 2), cpu) == "gloo"
    assert [record.getMessage() for record in caplog.records] == [
        "ranks talk by gloo, several times slower than by shared memory: csrc/ was not compiled"
    ]
    with pytest.raises(CommError) as caught:
        ShmBackend().connect(meeting(2, 2), cpu, timeout_s=1.0)
    assert caught.value.value == "shm"
    assert "csrc/" in str(caught.value)


@pytest.mark.parametrize(
    ("rendezvous", "named"),
    [(meeting(4, 2), "shm"), (meeting(257, 257), "257")],
)
def test_what_shm_cannot_join_is_said_before_anybody_is_waited_for(rendezvous: Rendezvous, named: str) -> None:
    with pytest.raises(CommError) as caught:
        ShmBackend().connect(rendezvous, CpuAccelerator("torch"), timeout_s=1.0)
    assert named in str(caught.value)
    assert caught.value.value == "shm"


@pytest.mark.parametrize("memory", ["torch", "numpy"])
def test_buffers_lie_over_the_memory_given(memory) -> None:
    cpu = CpuAccelerator(memory)
    heap = Heap()
    bytes_ = heap.allocate(400)
    buffer = cpu.from_host_memory(bytes_, DType.FLOAT32)
    buffer.fill(1.0)
    assert buffer.numel == 100
    assert buffer.data_ptr() == bytes_.ctypes.data
    assert np.array_equal(bytes_.view(np.float32), np.ones(100, np.float32))


def test_ranks_that_turn_out_to_be_apart_talk_by_gloo_unless_shm_was_asked_for(monkeypatch, caplog) -> None:
    def apart(self, rendezvous, accelerator, *, timeout_s):
        raise HostsDifferError("ranks [1] are not on the host of rank 0")

    joined = SingleCommunicator(CpuAccelerator("torch"), timeout_s=1.0, backend="gloo")
    monkeypatch.setattr(ShmBackend, "connect", apart)
    monkeypatch.setattr(GlooBackend, "connect", lambda self, *args, **kwargs: joined)
    with caplog.at_level(logging.INFO, "polyaccel"):
        assert setup.connect(meeting(2, 2), CpuAccelerator("torch")).inner is joined
    assert "ranks [1] are not on the host of rank 0; using gloo" in caplog.messages
    with pytest.raises(HostsDifferError):
        setup.connect(meeting(2, 2), CpuAccelerator("torch"), backend="shm")


def test_ranks_on_two_hosts_are_told_apart() -> None:
    here = Member(1, 2, 3, "token", "host a")
    with pytest.raises(HostsDifferError) as caught:
        _check_one_host({0: here, 1: replace(here, host="host b"), 2: here})
    assert caught.value.value == (1,)
    assert "ranks [1]" in str(caught.value)
