"""`deepspeed.comm.comms_logger`: what the engine's collectives took, read from polyaccel's own log of them."""

from __future__ import annotations

from typing import Any

import polyaccel.comm
from polyaccel.comm.default import default_communicator
from polyaccel.comm.flight_recorder.summary import reset_log as reset_log
from polyaccel.comm.flight_recorder.summary import row_of

Records = dict[str, dict[int, list[Any]]]
"""By operation and bytes: the number of calls, and milliseconds, Gbit/s and Gbit/s on the bus of each."""


class CommsLog:
    """The calls that were logged, under the names that scripts read. `"comms_logger"` in a config starts the log."""

    @property
    def comms_dict(self) -> Records:
        """The calls since the log began, or since this was last set."""
        log = getattr(default_communicator(), "log", None) if polyaccel.comm.is_initialized() else None
        found: Records = {}
        for key, latencies in (log.latencies_ms() if log is not None else {}).items():
            name = f"{key.op} | [Caller Func: {key.caller}]" if key.caller else key.op
            calls = found.setdefault(name, {}).setdefault(key.nbytes, [0, [], [], []])
            for latency in latencies:
                row = row_of(key, [latency])
                calls[0] += 1
                for column, value in zip(calls[1:], (latency, row.algorithm_gbps, row.bus_gbps), strict=True):
                    column.append(value)
        return found

    @comms_dict.setter
    def comms_dict(self, records: Records) -> None:
        """Scripts set it to `{}` to count afresh. The log holds what was measured, so nothing else can be set."""
        if polyaccel.comm.is_initialized():
            reset_log()

    def get_raw_data(self) -> Records:
        """As `comms_dict`."""
        return self.comms_dict

    def has_data(self) -> bool:
        """Whether a call was logged."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Count afresh."""
        self.comms_dict = {}

    def get_total_operations(self) -> int:
        """How many calls were logged."""
        return sum(calls[0] for sizes in self.comms_dict.values() for calls in sizes.values())

    def get_operation_names(self) -> list[str]:
        """The operations of which a call was logged."""
        return list(self.comms_dict)

    def log_all(self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False) -> Any:
        """As `log_summary`."""
        return polyaccel.comm.log_summary(show_straggler, return_dict)


comms_logger = CommsLog()


def has_comm_data() -> bool:
    """Whether a call was logged."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many calls were logged."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The operations of which a call was logged."""
    return comms_logger.get_operation_names()
