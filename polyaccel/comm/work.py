"""Works: collectives under way, ended, combined or deferred, and a thread that waits for works."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread


class Work(ABC):
    """A collective under way. Owns the buffers that it reads and writes until waited for."""

    @abstractmethod
    def wait(self) -> None:
        """Make the result visible: to the host on synchronous devices, to the current stream on others.

        Waiting twice is allowed. Buffers of the call may be used again afterwards.

        Raises:
            CommTimeout: Ranks did not come in time.
            CommError: The collective failed otherwise.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether `wait` would not block. Does not block."""


class DoneWork(Work):
    """A collective that finished inside its call."""

    def wait(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


DONE = DoneWork()


class CombinedWork(Work):
    """Several works as one.

    Args:
        works: Waited for in order.
        finish: Called once, in the first `wait`, when all works have ended; None for nothing.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_done(self) -> bool:
        return all(work.is_done() for work in self._works)


class DeferredWork(Work):
    """A call that runs in `wait`. Owns its buffers until then.

    Args:
        run: The call; it runs once.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    def is_done(self) -> bool:
        return self._run is None


class BackgroundWork(Work):
    """A work for which a `Background` thread waits. `wait` blocks until then and raises the work's error.

    Args:
        work: Work that the thread waits for.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._ended = Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Wait for the work and keep its error. Called by the thread."""
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        return self._ended.is_set()


class Background:
    """One daemon thread that waits for works in the order in which they were started.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[BackgroundWork | None] = SimpleQueue()
        self._last: BackgroundWork | None = None
        Thread(target=self._run, daemon=True, name=name).start()

    @property
    def is_idle(self) -> bool:
        """Whether every carried work has ended. For the thread that calls `carry`."""
        return self._last is None or self._last.is_done()

    def carry(self, work: Work) -> BackgroundWork:
        """Let the thread wait for a work. Returns at once.

        Args:
            work: Work that nothing else waits for.

        Returns:
            The work to wait for instead.
        """
        carried = self._last = BackgroundWork(work)
        self._queue.put(carried)
        return carried

    def close(self) -> None:
        """End the thread after the works that it carries. Does not wait for it."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            del work  # its buffers are not ours to keep until the next one comes
