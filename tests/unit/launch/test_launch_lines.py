"""However the bytes of several writers arrive, no line is lost, and none mixes two writers or states of a bar."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.launch.lines import REDRAW_S, LineSink, LineWriter

FLUSH = object()


def show(events: Sequence[tuple[int, object]], *, redraws: bool = False) -> bytes:
    """What a descriptor receives when writer i is fed, or flushed, in the order of `events`; all are flushed last."""
    read_fd, write_fd = os.pipe()
    sink = LineSink(write_fd, redraws=redraws)
    writers = [LineWriter(sink, prefix) for prefix in (b"[0] ", b"[1] ")]
    for index, event in events:
        if isinstance(event, bytes):
            writers[index].feed(event)
        else:
            writers[index].flush()
    for writer in writers:
        writer.flush()
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as reader:
        return reader.read()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([(0, b"one\ntwo\n")], b"[0] one\n[0] two\n"),
        ([(0, b"\n\n")], b"[0] \n[0] \n"),
        ([(0, b"on"), (1, b"x\n"), (0, b"e\n")], b"[1] x\n[0] one\n"),
        ([(0, b"on"), (0, FLUSH), (0, b"e\n")], b"[0] one\n"),
        ([(0, b"on"), (0, FLUSH), (1, b"x\n"), (0, b"e\n")], b"[0] on\n[1] x\n[0] e\n"),
        ([(0, b"dos\r"), (0, b"\nline\r\n")], b"[0] dos\r\n[0] line\r\n"),
        ([(0, b"caf\xc3"), (0, b"\xa9\xff\n")], b"[0] caf\xc3\xa9\xff\n"),
    ],
)
def test_lines_get_their_prefix(events: list[tuple[int, object]], expected: bytes) -> None:
    assert show(events) == expected


@pytest.mark.parametrize(
    ("events", "on_terminal", "in_file"),
    [
        ([(0, b"\r10%"), (0, b"\r20%"), (0, b"\n")], b"\r[0] 10%\r[0] 20%\n", b"[0] 20%\n"),
        ([(0, b"10%\r"), (0, FLUSH), (0, b"\n"), (0, b"done")], b"[0] 10%\r\n[0] done", b"[0] 10%\r\n[0] done"),
        ([(0, b"\r10%"), (0, FLUSH), (1, b"x\n")], b"\r[0] 10%\n[1] x\n", b"[0] 10%\n[1] x\n"),
        ([(0, b"a\r\r10%"), (0, FLUSH), (0, b"\nb")], b"[0] a\r\r[0] 10%\n[0] b", b"[0] 10%\n[0] b"),
        ([(0, b"load"), (0, FLUSH), (0, b"\r10%\r  ")], b"[0] load\r[0] 10%\r[0]   ", b"[0] load\n[0] 10%\n"),
        # Nested bars of tqdm: the newline after an escape that goes up ends no line.
        (
            [(0, b"\r1/2\n\r50%\x1b[A"), (0, b"\n\r    \x1b[A\r\r2/2"), (0, b"\n")],
            b"\r[0] 1/2\n\r[0] 50%\x1b[A\n\r[0]     \x1b[A\r\r[0] 2/2\n",
            b"[0] 1/2\n[0] 2/2\n",
        ),
        # Two bars on a terminal: the one whose line is open redraws, and the other one waits for its own end.
        (
            [(0, b"\r10%"), (0, FLUSH), (1, b"\r1%\r2%"), (0, b"\r20%\n"), (1, b"\r3%\n")],
            b"\r[0] 10%\r[0] 20%\n\r[1] 2%\r[1] 3%\n",
            b"[0] 10%\n[0] 20%\n[1] 3%\n",
        ),
    ],
)
def test_a_bar_redraws_one_line_on_a_terminal_and_leaves_its_last_state_in_a_file(
    events: list[tuple[int, object]], on_terminal: bytes, in_file: bytes
) -> None:
    assert show(events, redraws=True) == on_terminal
    assert show(events) == in_file


def test_a_bar_that_goes_on_shows_a_state_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("polyaccel.launch.lines.monotonic", lambda: now_s)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    writer = LineWriter(LineSink(write_fd), b"> ")
    for percent in range(0, 101, 10):
        writer.feed(b"\r%d%%" % percent)
        now_s += REDRAW_S / 5
        writer.look()  # as after each second of silence
    writer.feed(b"\nend\n")
    shown = os.read(read_fd, 1000).splitlines()
    assert shown == [b"> 40%", b"> 90%", b"> 100%", b"> end"]
    assert not writer.has_unfinished
    os.close(read_fd)
    os.close(write_fd)


texts = st.text(alphabet="ab\r\n", max_size=12).map(str.encode)


@given(st.lists(texts, max_size=8), st.booleans())
def test_the_cuts_between_reads_do_not_show(chunks: list[bytes], redraws: bool) -> None:
    assert show([(0, chunk) for chunk in chunks], redraws=redraws) == show([(0, b"".join(chunks))], redraws=redraws)


@given(texts)
def test_a_file_has_the_last_state_of_each_line(text: bytes) -> None:
    shown = [line.removeprefix(b"[0] ").rstrip(b"\r") for line in show([(0, text)]).split(b"\n")]
    states = [next(filter(None, reversed(line.split(b"\r"))), b"") for line in text.split(b"\n")]
    assert [line for line in shown if line] == [state for state in states if state]
    if b"\r" not in text:
        assert shown == states


@st.composite
def conversations(draw: st.DrawFn, extra: str) -> list[tuple[int, object]]:
    alphabets = ("ab\n" + extra, "xy\n" + extra)  # whose byte it is shows in the byte
    turns = draw(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=12))
    return [
        (index, FLUSH if flush else draw(st.text(alphabet=alphabets[index], max_size=6)).encode())
        for index, flush in turns
    ]


@given(conversations(""), st.booleans())
def test_nothing_is_lost(events: list[tuple[int, object]], redraws: bool) -> None:
    shown = show(events, redraws=redraws)
    for index, letters in enumerate((b"ab", b"xy")):
        fed = b"".join(event for turn, event in events if turn == index and isinstance(event, bytes))
        assert bytes(byte for byte in shown if byte in letters) == bytes(byte for byte in fed if byte in letters)


@given(conversations("\r"), st.booleans())
def test_no_line_mixes_writers(events: list[tuple[int, object]], redraws: bool) -> None:
    for line in show(events, redraws=redraws).split(b"\n"):
        assert not (set(line) & set(b"ab") and set(line) & set(b"xy"))
        assert not (b"[0]" in line and b"[1]" in line)


def test_an_endless_line_is_shown_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyaccel.launch.lines.MAX_LINE_NBYTES", 10)
    read_fd, write_fd = os.pipe()
    writer = LineWriter(LineSink(write_fd), b"> ")
    writer.feed(b"x" * 8)
    writer.feed(b"x" * 8)
    assert os.read(read_fd, 100) == b"> " + b"x" * 16
    os.close(read_fd)
    os.close(write_fd)


def test_a_sink_without_a_reader_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    sink = LineSink(write_fd)
    sink.write(sink, b"into the void\n")
    os.close(write_fd)
    tried: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda fd, data: tried.append(data))
    sink.write(sink, b"again\n")
    assert tried == []


def test_a_non_blocking_sink_waits_for_its_reader() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    pid = os.posix_spawn(
        "/bin/cat",
        ["cat"],
        os.environ,
        file_actions=[  # reads while we write
            (os.POSIX_SPAWN_DUP2, read_fd, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_CLOSE, write_fd),
        ],
    )
    os.close(read_fd)
    sink = LineSink(write_fd)
    sink.write(sink, b"x" * 5_000_000)
    assert sink.column(sink) == b"x"
    assert not sink._is_gone
    os.close(write_fd)
    assert os.waitpid(pid, 0)[1] == 0
