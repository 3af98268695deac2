"""The summary of the communication log: counts, latencies, bandwidths, and time lost to stragglers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import fmean
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.comm.flight_recorder.log import CallKey, CommLog
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import CommError

_log = logging.getLogger(__name__)

_TORCH_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The calls of one key on this rank. Times in milliseconds, bandwidths in Gbit/s (10^9 bits).

    `algorithm_gbps` is the whole buffer over the mean latency, `bus_gbps` the same times what the algorithm must move
    of it, so that it compares with the link's own speed whatever the number of ranks (see `bus_factor`).
    `straggler_ms` is the part of the total in which this rank waited for later ones: what exceeds the shortest latency
    that any rank had in the same call. None where it was not asked for, or where ranks counted differently.
    """

    key: CallKey
    count: int
    total_ms: float
    mean_ms: float
    algorithm_gbps: float
    bus_gbps: float
    straggler_ms: float | None = None


def start_log(
    communicator: Communicator, ops: Iterable[str] = (), *, verbose: bool = False, callers: bool = False
) -> None:
    """Record latencies of this group and later splits; `verbose` logs each call. See `CommLog`."""
    if not isinstance(communicator, RecordingCommunicator):
        raise CommError(
            f"a {type(communicator).__name__} has no log", hint="use the communicator that init_distributed made"
        )
    communicator.log = CommLog(
        communicator.accelerator.current_stream,
        frozenset(_TORCH_NAMES.get(op, op) for op in ops),
        _say if verbose else None,
        callers,
    )


def reset_log() -> None:
    """Remove what was recorded; recording continues."""
    log = _own_log()
    if log is not None:
        log.reset()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, dict[int, dict[str, Any]]] | None:
    """Print on rank 0 the collectives that it recorded, longest total first. Collective. DeepSpeed's name.

    Args:
        show_straggler: Compare the ranks: the time by which this rank's calls exceed the shortest of the same call on
            any rank, which is spent waiting for later ranks.
        return_dict: Return this rank's figures too.

    Returns:
        With `return_dict` `{operation: {bytes: figures}}` of this rank, where the figures are the fields of `Row`
        (milliseconds, Gbit/s); it is empty if nothing is recorded. Otherwise None.
    """
    communicator, log = default_communicator(), _own_log()
    if log is None:
        if communicator.rank == 0:
            print('no collective was recorded: set "comms_logger": {"enabled": true} in the config')
        return {} if return_dict else None
    own = {key: list(latencies) for key, latencies in log.latencies_ms().items()}
    said = [(*astuple(key), latencies) for key, latencies in own.items()] if show_straggler else []
    gathered = communicator.all_gather_object(said)  # also a barrier, as users expect
    log_of_ranks = [{CallKey(*key): latencies for *key, latencies in one} for one in gathered]
    rows = [
        row_of(
            key,
            latencies,
            straggler_ms(latencies, (one.get(key, ()) for one in log_of_ranks)) if show_straggler else None,
        )
        for key, latencies in own.items()
    ]
    if communicator.rank == 0:
        print(as_table(rows), flush=True)
    return as_dict(rows) if return_dict else None


def bus_factor(op: str, world_size: int) -> float:
    """The share of the whole buffer that must move over a link: the formulas of nccl-tests (doc/PERFORMANCE.md)."""
    if op == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if op in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        return (world_size - 1) / world_size
    return 1.0


def row_of(key: CallKey, latencies_ms: Sequence[float], straggler_ms: float | None = None) -> Row:
    """The statistics of `latencies_ms`, at least one."""
    mean_ms = fmean(latencies_ms)
    gbps = key.nbytes * 8 / (mean_ms * 1e6) if mean_ms > 0 else 0.0
    bus_gbps = gbps * bus_factor(key.op, key.world_size)
    return Row(key, len(latencies_ms), sum(latencies_ms), mean_ms, gbps, bus_gbps, straggler_ms)


def straggler_ms(own_ms: Sequence[float], of_ranks_ms: Iterable[Sequence[float]]) -> float | None:
    """How much longer `own_ms` are together than the shortest of each call; None if ranks counted differently."""
    of_ranks = list(of_ranks_ms)
    if any(len(rank) != len(own_ms) for rank in of_ranks):
        return None
    return float(sum(own_ms) - sum(min(call) for call in zip(*of_ranks, strict=True)))


def as_dict(rows: Iterable[Row]) -> dict[str, dict[int, dict[str, Any]]]:
    """`{operation: {bytes: figures}}`; the operation with its caller where callers are counted apart."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        name = f"{row.key.op} by {row.key.caller}" if row.key.caller else row.key.op
        figures = {field: value for field, value in asdict(row).items() if field != "key"}
        found.setdefault(name, {})[row.key.nbytes] = figures
    return found


def as_table(rows: Iterable[Row]) -> str:
    """A table of `rows`, longest total first, 80 columns wide without callers and stragglers."""
    rows = sorted(rows, key=lambda row: -row.total_ms)
    with_stragglers = any(row.straggler_ms is not None for row in rows)
    head = f"{'operation':<18}{'bytes':>12}{'count':>8}{'total ms':>11}{'mean ms':>10}{'alg Gb/s':>10}{'bus Gb/s':>10}"
    lines = [head + (f"{'straggler ms':>14}" if with_stragglers else "")]
    for row in rows:
        line = f"{row.key.op:<18}{row.key.nbytes:>12}{row.count:>8}{row.total_ms:>11.2f}{row.mean_ms:>10.3f}"
        line += f"{row.algorithm_gbps:>10.2f}{row.bus_gbps:>10.2f}"
        if with_stragglers:
            line += f"{'?' if row.straggler_ms is None else f'{row.straggler_ms:.2f}':>14}"
        lines.append(line + (f"  {row.key.caller}" if row.key.caller else ""))
    return "\n".join(lines)


def _sentence(row: Row) -> str:
    caller = f" by {row.key.caller}" if row.key.caller else ""
    return (
        f"{row.key.op} of {row.key.nbytes} bytes{caller}: {row.mean_ms:.3f} ms, algorithm bandwidth"
        f" {row.algorithm_gbps:.2f} Gb/s, bus bandwidth {row.bus_gbps:.2f} Gb/s"
    )


def _say(key: CallKey, latency_ms: float) -> None:
    _log.info("%s", _sentence(row_of(key, [latency_ms])))


def _own_log() -> CommLog | None:
    communicator = default_communicator()
    return communicator.log if isinstance(communicator, RecordingCommunicator) else None
