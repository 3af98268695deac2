"""How long the communication of a step takes, by a measured table of collectives (`polyaccel comm bench`)."""

from __future__ import annotations

from polyaccel.comm.benchmark.table import CollectiveTimings, bus_factor
from polyaccel.zero.plan.bucket_plan import StepPlan
from polyaccel.zero.plan.traffic import PlannedCollective, exchanges_of, gathers_of


def comm_seconds(plan: StepPlan, table: CollectiveTimings) -> float:
    """The seconds that the collectives over the plan's buckets take one after another, none of them overlapped.

    Groups of fewer ranks than were measured are taken to have the same bus bandwidth. Raises CommError for a table
    that lacks an operation of the plan.
    """
    return sum(_seconds(each, table) for each in (*gathers_of(plan), *exchanges_of(plan)) if each.sent_nbytes)


def _seconds(each: PlannedCollective, table: CollectiveTimings) -> float:
    """A collective of n ranks sends its bus factor times its size, whatever the elements on the way are."""
    nbytes = round(each.sent_nbytes / bus_factor(each.kind, each.ranks))
    return table.seconds(each.kind, nbytes, each.ranks)
