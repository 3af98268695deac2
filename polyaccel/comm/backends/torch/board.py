"""The notice board of torch process groups: the key-value store of their rendezvous."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from threading import Event, Thread
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from polyaccel.comm.base import StatusStore

_LIMIT_S = 1.0
_END_S = 5.0
_PREFIX = "polyaccel/board"
_KEEPER = 0


class StoreBoard(StatusStore):
    """Notes in a c10d store, on its own connection where the store can have one.

    The store may live in a rank that hangs, so every access runs in a thread that is left behind after a second. It
    ends with the rank in which it lives, which without a launcher is rank 0: the last note of rank 0 is remembered, for
    one more report then.
    """

    def __init__(self, store: Store, *, may_wait: bool) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._may_wait = may_wait  # for a note, on a connection that nothing else uses
        self._remembered: dict[int, str] = {}

    @classmethod
    def of_default_group(cls) -> StoreBoard | None:
        """A board in the default group's store; None if there is no group or its store cannot be reached."""
        if not dist.is_initialized():
            return None
        store = distributed_c10d._get_default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        try:
            store = store.clone()  # type: ignore[attr-defined]  # younger than its stub
            store.set_timeout(timedelta(seconds=_LIMIT_S))
        except (AttributeError, NotImplementedError, RuntimeError):
            # A shared connection is worse than a separate one, but better than none.
            return cls(store, may_wait=False)
        return cls(store, may_wait=True)

    def set(self, rank: int, text: str) -> None:
        def post() -> None:
            self._store.set(str(rank), text)
            if rank != _KEEPER:
                if not self._remembered and self._may_wait:
                    self._store.get(str(_KEEPER))
                self._remembered.update(self._read([_KEEPER]))

        _within_limit(post)

    def read(self, world_size: int) -> Mapping[int, str]:
        notes: dict[int, str] = {}
        _within_limit(lambda: notes.update(self._read(range(world_size))))
        return notes.copy() or self._remembered.copy()

    def _read(self, ranks: Iterable[int]) -> dict[int, str]:
        return {rank: self._store.get(str(rank)).decode() for rank in ranks if self._store.check([str(rank)])}


def _within_limit(access: Callable[[], Any]) -> None:
    if _is_over.is_set():
        return

    def attempt() -> None:
        try:
            access()
        except Exception:
            return  # a board that cannot be reached is silent; the error being reported matters more

    thread = Thread(target=attempt, daemon=True, name="polyaccel board")
    _attempts.add(thread)
    thread.start()
    thread.join(_LIMIT_S)


_attempts: WeakSet[Thread] = WeakSet()
_is_over = Event()


@atexit.register
def _end_attempts() -> None:
    """End calls before the interpreter ends: torch aborts when its store returns into a finished one."""
    _is_over.set()
    for thread in list(_attempts):
        thread.join(_END_S)
