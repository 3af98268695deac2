"""Ranks that call different collectives, and starts at which something else answers: each has its sentence."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
from fault_table import TABLE, Ends, sample

from polyaccel.comm.base import Communicator, Rendezvous
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.torch_group import join_default_group
from polyaccel.core.deadline import Deadline
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, CommTimeout
from polyaccel.testkit.ranks.threads import run_threads

F32, I32 = DType.FLOAT32, DType.INT32
CALLS: dict[str, Callable[[Communicator], object]] = {
    "all_reduce sum 4 x float32": lambda comm: comm.all_reduce(comm.allocate(4, F32)),
    "all_reduce sum 5 x float32": lambda comm: comm.all_reduce(comm.allocate(5, F32)),
    "all_reduce sum 4 x int32": lambda comm: comm.all_reduce(comm.allocate(4, I32)),
    "all_reduce max 4 x float32": lambda comm: comm.all_reduce(comm.allocate(4, F32), ReduceOp.MAX),
    "broadcast from 0 4 x float32": lambda comm: comm.broadcast(comm.allocate(4, F32), 0),
    "broadcast from 1 4 x float32": lambda comm: comm.broadcast(comm.allocate(4, F32), 1),
    "all_gather 4 x float32": lambda comm: comm.all_gather(comm.allocate(4, F32), comm.allocate(2, F32)),
    "reduce_scatter sum 4 x float32": lambda comm: comm.reduce_scatter(comm.allocate(2, F32), comm.allocate(4, F32)),
    "all_to_all 4 x float32": lambda comm: comm.all_to_all(comm.allocate(4, F32), comm.allocate(4, F32)),
    "barrier": lambda comm: comm.barrier(),
}
PAIRS = [(ours, theirs) for ours in CALLS for theirs in CALLS if ours != theirs]
SHORT_S = 0.3
UNMET = Ends("names the place and this rank", "no group", "at the limit")


@pytest.mark.parametrize(("ours", "theirs"), sample(PAIRS, 10))
def test_different_calls_are_both_named_on_every_rank(ours: str, theirs: str) -> None:
    said: list[str] = []

    def body(inner: Communicator) -> None:
        comm = RecordingCommunicator(inner, debug=True, watch_s=None)
        comm.barrier()
        with pytest.raises(CommError) as caught:
            CALLS[ours if comm.rank == 0 else theirs](comm)
        said.append(caught.value.message)

    expected = f"ranks disagree about a collective: rank 0 called #1 {ours}, rank 1 called #1 {theirs}"
    with TABLE.case(
        "ranks that call different collectives", Ends("names both calls, on both ranks", "nothing was sent")
    ):
        run_threads(2, body)
        assert said == [expected, expected]


ANSWERS: dict[str, bytes | None] = {
    "nothing": None,
    "an end": b"",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "a long text": b"x" * 100_000,
    "an enormous length": b"\xff\xff\xff\xff\xff\xff\xff\x7f" * 4,
}


@contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """A port where every caller gets `answer` and an end; None: nothing, and no end."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def serve() -> None:
            callers = []
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    break
                callers.append(caller)
                if answer is not None:
                    caller.sendall(answer)
                    caller.close()
            for caller in callers:
                caller.close()

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("answer", sample(list(ANSWERS), 3))
def test_a_start_where_something_else_answers_ends_at_its_limit(answer: str) -> None:
    with (
        TABLE.case(
            "something else at rank 0's port", Ends("names the place and this rank", "no group", "at the limit")
        ),
        server(ANSWERS[answer]) as port,
    ):
        here = Rendezvous(1, 2, 1, 2, "127.0.0.1", port, "this test")
        with pytest.raises(CommTimeout) as caught:
            join_default_group("gloo", here, Deadline(SHORT_S), lambda: None)
        assert all(part in str(caught.value) for part in ("tcp://127.0.0.1", "rank 1", str(port)))
