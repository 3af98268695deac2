"""The default communicator: one for the process, unless a thread that plays a rank has set its own."""

from __future__ import annotations

from contextvars import ContextVar

from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError

_thread_default: ContextVar[Communicator | None] = ContextVar("polyaccel_thread_communicator", default=None)
_process_default: Communicator | None = None


def is_initialized() -> bool:
    """Return whether there is a default communicator."""
    return (_thread_default.get() or _process_default) is not None


def default_communicator() -> Communicator:
    """Return the communicator over all ranks. Raises CommError before `init_distributed`."""
    communicator = _thread_default.get() or _process_default
    if communicator is None:
        raise CommError(
            "the default process group does not exist",
            hint="call polyaccel.init_distributed() or polyaccel.initialize(...) first",
        )
    return communicator


def set_default_communicator(communicator: Communicator | None) -> None:
    """Make `communicator` the default of this process.

    Args:
        communicator: Communicator over all ranks. The caller keeps ownership and closes it. None removes the default.
    """
    global _process_default
    _process_default = communicator


def set_thread_communicator(communicator: Communicator | None) -> None:
    """Make `communicator` the default in this thread's context only, for ranks that are threads."""
    _thread_default.set(communicator)


def own_thread_communicator() -> Communicator | None:
    """The communicator that `set_thread_communicator` set; None in a process whose ranks are processes."""
    return _thread_default.get()
