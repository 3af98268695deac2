"""The output of ranks: read from pipes by one thread, and shown with the rank's number before each line.

[Note: Terminal ownership]
A progress bar needs a terminal, and a terminal shows one at a time. So the first rank of this host has the launcher's
standard output (or error) itself when that is a terminal, and its lines have no prefix. With a log directory every
rank is read, so that the files are complete. The bars of read ranks: [Note: Progress bars].

The thread may block for as long as the reader of our output does (`| less`); the main thread never writes while it
runs, and so stays free to notice signals and failing ranks.
"""

from __future__ import annotations

import os
import queue
import selectors
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import IO

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, LaunchPlan, RankSpec
from polyaccel.launch.lines import LineSink, LineWriter
from polyaccel.launch.process import RankProcess
from polyaccel.launch.tracebacks import TracebackFold, exception_lines

_CHUNK_NBYTES = 1 << 16
_UNFINISHED_S = 1.0  # after this much silence, an unfinished line is shown; a busy machine may stop its writer for less
_TAIL_NBYTES = 4096
_TAIL_LINES = 8


@dataclass(eq=False)
class _Stream:
    """One pipe of one rank. `tail` holds the last bytes read, `log` is the file that the rank's two share, `merged`
    writes to the file that all ranks share. `fold` shows tracebacks of standard error; files have them in full."""

    pipe: IO[bytes]
    writer: LineWriter
    merged: LineWriter | None
    filter_output: Callable[[bytes], bytes]
    log: IO[bytes] | None
    fold: TracebackFold | None = None
    tail: bytes = b""
    fed_s: float = field(default_factory=monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    def feed(self, data: bytes) -> None:
        self.fed_s = monotonic()
        data = self.filter_output(data)
        self.tail = (self.tail + data)[-_TAIL_NBYTES:]
        if self.log is not None:
            try:
                self.log.write(data)
            except OSError:  # a full disk must not end the training
                self.log = None
        (self.writer if self.fold is None else self.fold).feed(data)
        if self.merged is not None:
            self.merged.feed(data)

    @property
    def writers(self) -> list[LineWriter]:
        return [self.writer] if self.merged is None else [self.writer, self.merged]

    def flush(self) -> None:
        """Show an unfinished line."""
        for writer in self.writers:
            writer.flush()


class JobOutput:
    """Shows the output of a job's ranks on the descriptors `stdout_fd` and `stderr_fd`.

    `attach` every rank, then `start`, then `close`. `say` adds the launcher's own line, which has `name` before it, to
    standard error. What is shown stands in the file `merged` too, where there is one. Raises LaunchError when the log
    directory cannot be written to.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        name: str = "polyaccel",
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        merged: Path | None = None,
    ) -> None:
        is_terminal = os.isatty(stdout_fd), os.isatty(stderr_fd)
        self._is_given = is_terminal if plan.log_dir is None and merged is None else (False, False)
        self._sinks = (
            LineSink(stdout_fd, redraws=is_terminal[0] and not self._is_given[0]),
            LineSink(stderr_fd, redraws=is_terminal[1] and not self._is_given[1]),
        )
        self._streams: dict[int, list[_Stream]] = {}
        self._own = [LineWriter(self._sinks[1], f"{name}: ".encode())]
        self._sentences: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._merged: LineSink | None = None
        with ExitStack() as files:
            logs = {spec.rank: plan.log_dir / f"rank_{spec.rank}.log" for spec in plan.ranks} if plan.log_dir else {}
            self._logs = {rank: _opened(path, files) for rank, path in logs.items()}
            if merged is not None:
                self._merged = LineSink(_opened(merged, files).fileno())
                self._own.append(LineWriter(self._merged, f"{name}: ".encode()))
            self._files = files.pop_all()
        self._selector = self._files.enter_context(selectors.DefaultSelector())
        self._wake_read, self._wake_write = os.pipe()
        self._files.callback(os.close, self._wake_read)
        self._files.callback(os.close, self._wake_write)
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._is_closing = False
        self._is_verbose = os.environ.get("POLYACCEL_DEBUG", "0") not in ("", "0")
        self._first_failed: int | None = None
        self._is_settled = False
        self._thread = threading.Thread(target=self._show, name="polyaccel-output", daemon=True)

    def owns(self, spec: RankSpec) -> tuple[bool, bool]:
        """Whether the rank has our standard output, and error, itself. See [Note: Terminal ownership]."""
        return self._is_given if spec.local_rank == 0 else (False, False)

    def attach(self, rank: RankProcess) -> None:
        """Show the output of `rank`, except for the descriptors that it owns."""
        streams = self._streams.setdefault(rank.spec.rank, [])
        for pipe, sink in zip((rank.stdout, rank.stderr), self._sinks, strict=True):
            if pipe is not None:
                self._files.enter_context(pipe)
                os.set_blocking(pipe.fileno(), False)
                filter_output = partial(rank.filter_output, is_error=pipe is rank.stderr)
                merged = None if self._merged is None else LineWriter(self._merged, rank.prefix)
                log = self._logs.get(rank.spec.rank)
                writer = LineWriter(sink, rank.prefix)
                is_folded = pipe is rank.stderr and not self._is_verbose
                fold = TracebackFold(writer.feed) if is_folded else None
                stream = _Stream(pipe, writer, merged, filter_output, log, fold)
                self._selector.register(pipe, selectors.EVENT_READ, stream)
                streams.append(stream)

    def start(self) -> None:
        self._thread.start()

    def say(self, sentence: str) -> None:
        """Show a sentence of the launcher on standard error, between the ranks' lines."""
        self._sentences.put(sentence.encode(errors="backslashreplace") + b"\n")
        if self._thread.is_alive():
            self._wake()
        else:
            self._show_sentences()

    def last_lines(self, rank: int) -> list[str]:
        """Return a rank's last lines of standard error, else of standard output. Call `drain` first."""
        tails = [stream.tail.decode(errors="backslashreplace").strip() for stream in reversed(self._streams[rank])]
        return next((exception_lines(tail)[-_TAIL_LINES:] for tail in tails if tail), [])

    def settle(self, first_failed: int) -> None:
        """Show tracebacks of this rank in full, and one line for each of another rank. The first call decides."""
        if self._first_failed is None:
            self._first_failed = first_failed
            self._wake()

    @property
    def folded(self) -> int:
        """Tracebacks that were not shown in full. Call `drain` first."""
        return sum(stream.fold.folded for streams in self._streams.values() for stream in streams if stream.fold)

    @property
    def waited_s(self) -> float:
        """When what ranks print last had to wait, because the reader of our output took nothing; now, while it does."""
        return max(sink.waited_s for sink in self._sinks)

    def has_read(self, rank: int) -> bool:
        """Whether all that a rank, which has ended, wrote is read."""
        return all(stream.ended.is_set() for stream in self._streams[rank])

    def await_end(self, rank: int, timeout_s: float) -> None:
        """Wait until all that a rank, which has ended, wrote is read; not for others that have its pipes open."""
        for stream in self._streams[rank]:
            stream.ended.wait(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Show what is in the pipes now; False if our reader did not take all within `timeout_s`."""
        if self._thread.is_alive():
            self._is_closing = True
            self._wake()
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Give the descriptors back, unless the thread is stuck with them."""
        if not self._thread.is_alive():
            self._files.close()

    def _show(self) -> None:
        while len(self._selector.get_map()) > 1 or not self._is_closing:
            streams = [key.data for key in self._selector.get_map().values() if key.data is not None]
            unfinished = [stream for stream in streams if any(writer.has_unfinished for writer in stream.writers)]
            folds = self._folds()
            is_holding = any(fold.is_holding for fold in folds.values())
            for key, _ in self._selector.select(_UNFINISHED_S if unfinished or is_holding else None):
                if key.data is not None:
                    self._read(key.data)
                else:
                    os.read(self._wake_read, _CHUNK_NBYTES)
            waiting = [key.data for key, _ in self._selector.select(0)] if unfinished else []
            for stream in unfinished:
                # Where the rest waits in the pipe already, it is this thread that was late.
                if stream not in waiting and monotonic() - stream.fed_s >= _UNFINISHED_S:
                    for writer in stream.writers:
                        writer.look()
            self._settle_folds()
            for fold in folds.values():
                fold.look()
            self._show_sentences()
            if self._is_closing:
                for stream in streams:
                    self._read_rest(stream)
        self._settle_folds()
        for stream in chain.from_iterable(self._streams.values()):
            if stream.fold is not None:
                stream.fold.flush()
                stream.flush()
        self._show_sentences()

    def _folds(self) -> dict[int, TracebackFold]:
        return {
            rank: stream.fold
            for rank, streams in self._streams.items()
            for stream in streams
            if stream.fold is not None
        }

    def _settle_folds(self) -> None:
        if self._first_failed is not None and not self._is_settled:
            self._is_settled = True
            folds = self._folds()
            for rank, fold in folds.items():
                fold.settle(is_in_full=rank == self._first_failed or len(folds) == 1)

    def _read(self, stream: _Stream) -> bool:
        """Whether there was something to read; a stream at its end is dropped."""
        try:
            data = os.read(stream.pipe.fileno(), _CHUNK_NBYTES)
        except BlockingIOError:
            return False
        if data:
            stream.feed(data)
        else:
            self._drop(stream)
        return bool(data)

    def _read_rest(self, stream: _Stream) -> None:
        """Read all that is in the pipe now. Its other end may still be open, in a process that escaped the launcher."""
        while self._read(stream):
            pass
        self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        stream.flush()
        stream.ended.set()
        with suppress(KeyError):  # dropped before
            self._selector.unregister(stream.pipe)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full of reasons to wake up
            os.write(self._wake_write, b"!")

    def _show_sentences(self) -> None:
        while not self._sentences.empty():
            sentence = self._sentences.get()
            for writer in self._own:
                writer.feed(sentence)


def merged_log(job: Job) -> Path | None:
    """Return the file of all ranks' lines: DIR/all.log, or DIR/host_N.log; None without files."""
    if job.log_dir is None:
        return None
    is_one_of_many = job.node is not None and len(job.hosts) > 1
    return Path(job.log_dir, f"host_{job.node}.log" if is_one_of_many else "all.log")


def _opened(path: Path, files: ExitStack) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return files.enter_context(path.open("ab", buffering=0))  # a restarted job keeps why it was restarted
    except OSError as error:
        hint = "name a directory that can be written to: --log-dir DIR"
        raise LaunchError(f"no log file {path}: {error}", hint=hint, value=path) from error
