"""The notice board of torch process groups: the key-value store through which they met."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from polyaccel.comm.base import Board

_LIMIT_S = 1.0
_END_S = 5.0
_PREFIX = "polyaccel/board"


class StoreBoard(Board):
    """Notes in a c10d store, on a connection of its own where the store can have one.

    The store may live in a rank that hangs, so every access runs in a thread that is left behind after a second.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(_PREFIX, store)

    @classmethod
    def of_default_group(cls) -> StoreBoard | None:
        """A board in the default group's store; None if there is no such group or its store cannot be reached."""
        if not dist.is_initialized():
            return None
        store = distributed_c10d._get_default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        try:
            store = store.clone()  # type: ignore[attr-defined]  # younger than its stub
            store.set_timeout(timedelta(seconds=_LIMIT_S))
        except (AttributeError, NotImplementedError, RuntimeError):
            return cls(store)  # one connection for everybody is worse than one of its own, but better than none
        return cls(store)

    def post(self, rank: int, text: str) -> None:
        _within_limit(lambda: self._store.set(str(rank), text))

    def read(self, world_size: int) -> Mapping[int, str]:
        notes: dict[int, str] = {}

        def read() -> None:
            for rank in range(world_size):
                if self._store.check([str(rank)]):
                    notes[rank] = self._store.get(str(rank)).decode()

        _within_limit(read)
        return notes.copy()


def _within_limit(access: Callable[[], Any]) -> None:
    def attempt() -> None:
        try:
            access()
        except Exception:
            return  # a board that cannot be reached says nothing; the error being reported matters more

    thread = Thread(target=attempt, daemon=True, name="polyaccel board")
    _attempts.add(thread)
    thread.start()
    thread.join(_LIMIT_S)


_attempts: WeakSet[Thread] = WeakSet()


@atexit.register
def _end_attempts() -> None:
    """Wait for calls that are under way: Python ends a thread that comes back from torch's store when the interpreter
    is gone, and torch aborts the process for it."""
    for thread in list(_attempts):
        thread.join(_END_S)
