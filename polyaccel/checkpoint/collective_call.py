"""Steps whose outcome all ranks share: a failure on one rank is raised on every rank, before any of them continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError, CommError, CommTimeout, PolyaccelError

T = TypeVar("T")


def barrier(communicator: Communicator, name: str) -> None:
    """Wait until every rank has called the function `name`. Raises CommTimeout, with the likely cause."""
    hint = f"{name} must be called on every rank: call it outside of `if rank == 0`"
    try:
        communicator.barrier(label=f"{name} (must be called on every rank)")
    except CommTimeout as error:
        raise CommTimeout(
            f"{name}: not every rank arrived: {error.message}",
            missing_ranks=error.missing_ranks,
            hint=hint,
            value=error.value,
        ) from error
    except CommError as error:
        raise CommError(f"{name}: another rank did something else: {error}", hint=hint, value=error.value) from error


def run_on_all(communicator: Communicator, step: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank; return plain results by rank. Raises CheckpointError on all if any failed."""
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes = communicator.all_gather_object((result, None if failure is None else describe(failure)))
    require_success(step, {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}, failure)
    return [value for value, _ in outcomes]


def on_rank_0(communicator: Communicator, step: str, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone; return its plain result on every rank. Raises as `run_on_all`."""
    return run_on_all(communicator, step, lambda: [action()] if communicator.rank == 0 else [])[0][0]


def require_success(step: str, failed: Mapping[int, tuple[str, str]], own: Exception | None = None) -> None:
    """Raise CheckpointError where a step failed on any rank: `failed` is (message, hint) by rank, `own` this rank's."""
    if failed:
        what = "; ".join(f"rank {rank}: {message}" for rank, (message, _) in failed.items())
        hint = next((hint for _, hint in failed.values() if hint), "")
        raise CheckpointError(f"{step} failed on {what}", hint=hint, value=tuple(failed)) from own


def describe(error: Exception) -> tuple[str, str]:
    """Return the message and the hint of an error for another process."""
    if isinstance(error, PolyaccelError):
        return error.message, error.hint
    return f"{type(error).__name__}: {error}", ""
