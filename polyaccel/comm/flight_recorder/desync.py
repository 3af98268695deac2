"""Where ranks diverged, from their dumps: the first call of a group that some rank made otherwise, or did not make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyaccel.comm.flight_recorder.dump import Dump, DumpedCall

_NOTHING = "did not call it"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first number at which the ranks of a group are not together.

    `calls` has what each rank that left a dump did there: its call, or None for none. `is_waiting` are the ranks whose
    call had not ended.
    """

    group: tuple[int, ...]
    seq: int
    calls: Mapping[int, DumpedCall | None]
    last: Mapping[int, DumpedCall | None]
    """The last call on this group of each rank that did not make call `seq`."""

    @property
    def is_waiting(self) -> tuple[int, ...]:
        return tuple(rank for rank, call in self.calls.items() if call is not None and call.ended_s is None)


@dataclass(frozen=True, slots=True)
class AgreeingGroup:
    """A group whose ranks made the same calls, from `first` to `last`, as far as their dumps reach."""

    group: tuple[int, ...]
    first: int
    last: int
    ranks: tuple[int, ...]
    is_waiting: tuple[int, ...]
    """The ranks whose last call had not ended."""


def find_desync(dumps: Sequence[Dump]) -> list[Divergence | AgreeingGroup]:
    """Return a finding for each group with calls in `dumps`, largest first; without messages and lost records."""
    by_group: dict[tuple[int, ...], dict[int, dict[int, DumpedCall]]] = defaultdict(dict)
    for dump in dumps:
        for call in dump.calls:
            if not call.is_message:
                by_group[call.group].setdefault(dump.rank, {})[call.seq] = call
    present = {dump.rank for dump in dumps}
    return [
        _compare_group(group, {rank: ranks.get(rank, {}) for rank in group if rank in present})
        for group, ranks in sorted(by_group.items(), key=lambda item: (-len(item[0]), item[0]))
    ]


def _compare_group(group: tuple[int, ...], ranks: Mapping[int, Mapping[int, DumpedCall]]) -> Divergence | AgreeingGroup:
    first = max(min(calls) for calls in ranks.values() if calls)
    last = max(max(calls) for calls in ranks.values() if calls)
    for seq in sorted(seq for seq in set().union(*ranks.values()) if first <= seq <= last):
        here = {rank: calls.get(seq) for rank, calls in ranks.items()}
        if len({call.what if call else None for call in here.values()}) > 1:
            missing = [rank for rank, call in here.items() if call is None]
            lasts = {rank: ranks[rank][max(ranks[rank])] if ranks[rank] else None for rank in missing}
            return Divergence(group, seq, here, lasts)
    waiting = tuple(rank for rank, calls in ranks.items() if calls[last].ended_s is None)
    return AgreeingGroup(group, first, last, tuple(ranks), waiting)


def as_text(findings: Sequence[Divergence | AgreeingGroup], dumps: Sequence[Dump]) -> str:
    """The findings for people: one paragraph a group."""
    ranks = sorted(dump.rank for dump in dumps)
    lines = [f"{len(dumps)} dumps, ranks {listed(ranks)} of {dumps[0].world_size}"]
    lines += [f"  rank {dump.rank}: {dump.reason}, pid {dump.pid} on {dump.host}" for dump in sorted(dumps, key=_rank)]
    absent = sorted(set(range(dumps[0].world_size)) - set(ranks))
    if absent:
        lines.append(f"  rank {listed(absent)}: no dump; killed, or never started?")
    for finding in findings:
        lines += ["", f"group of ranks {listed(finding.group)}"]
        lines += _agreement(finding) if isinstance(finding, AgreeingGroup) else _divergence(finding)
    return "\n".join(lines)


def _agreement(finding: AgreeingGroup) -> list[str]:
    waiting = f"; rank {listed(finding.is_waiting)} still waits in it" if finding.is_waiting else ""
    return [f"  same calls from #{finding.first} to #{finding.last}{waiting}"]


def _divergence(finding: Divergence) -> list[str]:
    said: dict[str, list[int]] = defaultdict(list)
    for rank, call in finding.calls.items():
        if call is None:
            before = finding.last[rank]
            last = f", its last was #{before.seq} {before.what}{before.purpose}" if before else ", nor any"
            said[_NOTHING + last].append(rank)
        else:
            said[f"{call.what}{call.purpose}{'' if call.ended_s else ' (waiting)'}"].append(rank)
    lines = [f"  the ranks part at #{finding.seq}:"]
    return lines + [f"    rank {listed(ranks)}: {what}" for what, ranks in said.items()]


def listed(ranks: Sequence[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3 and 6."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _rank(dump: Dump) -> int:
    return dump.rank
