"""All-to-alls of two levels: short parts are passed on, long ones go directly, and nobody can tell by what arrives."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from pretended_hosts import Hosts, on_hosts, pass_on_up_to

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import FlightRecorder, RecordingCommunicator
from polyaccel.comm.wrappers.hierarchical import _SHORT_NBYTES, HierarchicalCommunicator, _short_nbytes
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CommError
from polyaccel.testkit.comm.values import put
from polyaccel.testkit.ranks.threads import run_threads

LAYOUTS: dict[str, Hosts] = {
    "2 x 2": ((0, 1), (2, 3)),
    "2 x 2, round robin": ((0, 2), (1, 3)),
    "2 x 2, anyhow": ((0, 3), (2, 1)),
    "2 x 3": ((0, 1, 2), (3, 4, 5)),
    "2 x 3, anyhow": ((0, 5, 2), (1, 3, 4)),
    "3 x 2": ((0, 1), (2, 3), (4, 5)),
    "3 x 2, round robin": ((0, 3), (1, 4), (2, 5)),
}
SHORT = _SHORT_NBYTES // 4
"""Float32 elements of the longest part that is passed on."""
LENGTHS: dict[str, tuple[int, ...]] = {
    "nothing": (0,),
    "short": (0, 1, 5, 300),
    "at the limit": (SHORT, SHORT + 1),
    "long": (SHORT + 1, SHORT + 100),
    "of all kinds": (0, 1, 300, SHORT, SHORT + 1, 3 * SHORT),
}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_on_up_to(_SHORT_NBYTES, monkeypatch)


def lengths_of(kind: str, world_size: int) -> list[list[int]]:
    """How many elements each rank sends each other one."""
    drawn = np.random.default_rng(len(kind)).choice(LENGTHS[kind], (world_size, world_size))
    return [[int(one) for one in row] for row in drawn]


def noise(comm: Communicator, numel: int) -> Buffer:
    return put(comm, np.random.default_rng(comm.rank).standard_normal(numel), DType.FLOAT32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uneven_parts_arrive_bit_for_bit_as_they_do_directly(layout: str) -> None:
    hosts = LAYOUTS[layout]

    def body(comm: Communicator) -> int:
        both, checks = on_hosts(comm, hosts), 0
        for kind in LENGTHS:
            table = lengths_of(kind, comm.world_size)
            sent, received = table[comm.rank], [row[comm.rank] for row in table]
            source = noise(comm, sum(sent))
            wanted = comm.allocate(sum(received), DType.FLOAT32)
            comm.all_to_all(wanted, source, counts=received, source_counts=sent)
            for longest, async_op in product((max(map(max, table)), SHORT, None), (False, True)):
                out = comm.allocate(sum(received), DType.FLOAT32)
                work = both.all_to_all(
                    out, source, counts=received, source_counts=sent, max_send_numel=longest, async_op=async_op
                )
                work.wait()
                assert out.to_bytes() == wanted.to_bytes(), (kind, longest, async_op)
                checks += 1
        return checks

    assert all(run_threads(sum(map(len, hosts)), body))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numel", [0, 1, 300, SHORT, SHORT + 1])
def test_equal_parts_arrive_bit_for_bit_as_they_do_directly(layout: str, numel: int) -> None:
    hosts = LAYOUTS[layout]

    def body(comm: Communicator) -> tuple[bytes, bytes, bytes]:
        both, whole = on_hosts(comm, hosts), numel * comm.world_size
        source = noise(comm, whole)
        outs = [comm.allocate(whole, DType.FLOAT32) for _ in range(3)]
        comm.all_to_all(outs[0], source)
        both.all_to_all(outs[1], source)
        both.all_to_all(outs[2], source, async_op=True).wait()
        return outs[0].to_bytes(), outs[1].to_bytes(), outs[2].to_bytes()

    for wanted, at_once, later in run_threads(sum(map(len, hosts)), body):
        assert at_once == wanted
        assert later == wanted


@pytest.mark.parametrize("dtype", [DType.BOOL, DType.BFLOAT16, DType.INT64])
def test_parts_of_any_type(dtype: DType) -> None:
    def body(comm: Communicator) -> tuple[bytes, bytes]:
        both = on_hosts(comm, LAYOUTS["2 x 2, anyhow"])
        source, wanted, out = (comm.allocate(4 * 9, dtype) for _ in range(3))
        source.from_bytes(bytes((comm.rank + place) % 2 for place in range(source.nbytes)))
        comm.all_to_all(wanted, source)
        both.all_to_all(out, source)
        return wanted.to_bytes(), out.to_bytes()

    assert all(wanted == out for wanted, out in run_threads(4, body))


@pytest.mark.parametrize(
    ("numel", "is_uneven", "longest", "is_passed_on"),
    [
        (SHORT, False, None, True),
        (SHORT + 1, False, None, False),
        (10, True, 10, True),
        (10, True, SHORT, True),
        (10, True, SHORT + 1, False),
        (10, True, None, False),
    ],
)
def test_one_message_to_each_other_host_has_all_short_parts_for_it(
    numel: int, is_uneven: bool, longest: int | None, is_passed_on: bool
) -> None:
    """They are passed on where all ranks know that they are short; else everything goes directly."""
    hosts, counts = LAYOUTS["3 x 2"], [numel] * 6 if is_uneven else None

    def body(comm: Communicator) -> tuple[int, float]:
        plain = on_hosts(comm, hosts)
        directly, across = FlightRecorder(), FlightRecorder()
        both = HierarchicalCommunicator(
            RecordingCommunicator(comm, directly, watch_s=None),
            plain.intra,
            RecordingCommunicator(plain.inter, across, watch_s=None),
            hosts,
        )
        source, out = comm.allocate(6 * numel, DType.FLOAT32), comm.allocate(6 * numel, DType.FLOAT32)
        both.all_to_all(out, source, counts=counts, source_counts=counts, max_send_numel=longest)
        return directly.calls["all_to_all"], across.sent_numel["all_to_all"]

    ranks_of_other_hosts = 4
    assert run_threads(6, body) == [(0, ranks_of_other_hosts * numel) if is_passed_on else (1, 0)] * 6


def test_how_long_short_parts_are_depends_on_the_messages_saved() -> None:
    """One fewer than a host has ranks; telling the lengths of uneven parts takes as long as one."""
    kib = 1 << 10
    assert [_short_nbytes(ranks, is_uneven=False) for ranks in (2, 3, 8)] == [16 * kib, 32 * kib, 112 * kib]
    assert [_short_nbytes(ranks, is_uneven=True) for ranks in (2, 3, 8)] == [0, 16 * kib, 96 * kib]


def test_calls_under_way_at_once_and_messages_between_them() -> None:
    hosts = LAYOUTS["2 x 2"]

    def body(comm: Communicator) -> bool:
        both = on_hosts(comm, hosts)
        table = lengths_of("short", 4)
        sent, received = table[comm.rank], [row[comm.rank] for row in table]
        sources = [noise(comm, sum(sent)) for _ in range(3)]
        outs = [comm.allocate(sum(received), DType.FLOAT32) for _ in sources]
        works = [
            both.all_to_all(out, source, counts=received, source_counts=sent, max_send_numel=longest, async_op=True)
            for longest, out, source in zip((300, None, SHORT), outs, sources, strict=True)
        ]
        there, here = put(comm, [comm.rank], DType.FLOAT32), put(comm, [-1], DType.FLOAT32)
        message = both.send(there, (comm.rank + 1) % 4, async_op=True)
        both.recv(here, (comm.rank - 1) % 4)
        message.wait()
        both.all_reduce(here)
        for work in reversed(works):
            work.wait()
        assert here.to_bytes() == put(comm, [6], DType.FLOAT32).to_bytes()
        return len({out.to_bytes() for out in outs}) == 1

    assert run_threads(4, body) == [True] * 4


@pytest.mark.parametrize("longest", [None, 5])
def test_ranks_that_disagree_about_a_part_are_told(longest: int | None) -> None:
    """Whichever way the part goes, the error says who sent how much; when it is passed on, for the whole host."""

    def body(comm: Communicator) -> None:
        both = on_hosts(comm, LAYOUTS["2 x 2"])
        sent = [4, 4, 4, 5] if comm.rank == 0 else [4] * 4
        source, out = comm.allocate(sum(sent), DType.FLOAT32), comm.allocate(16, DType.FLOAT32)
        both.all_to_all(out, source, counts=[4] * 4, source_counts=sent, max_send_numel=longest)

    numbers = (5, 4) if longest is None else (9, 8)
    with pytest.raises(CommError) as caught:
        run_threads(4, body)
    assert caught.value.value == (0,)
    assert all(str(number) in str(caught.value) for number in numbers)


def test_ranks_that_know_different_bounds_are_told_in_debug_mode() -> None:
    """They would not meet: some pass on, and others send directly."""

    def body(comm: Communicator) -> None:
        both = RecordingCommunicator(on_hosts(comm, LAYOUTS["2 x 2"]), debug=True, watch_s=None)
        source, out = comm.allocate(16, DType.FLOAT32), comm.allocate(16, DType.FLOAT32)
        longest = SHORT + 1 if comm.rank == 3 else SHORT
        both.all_to_all(out, source, counts=[4] * 4, source_counts=[4] * 4, max_send_numel=longest)

    with pytest.raises(CommError) as caught:
        run_threads(4, body)
    assert caught.value.value == (3,)
    assert all(part in str(caught.value) for part in ("all_to_all", "rank 3", str(SHORT + 1)))
