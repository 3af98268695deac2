"""All-to-alls between hosts, directly and passed on by a rank of each host, in turns on the same ranks.

The hosts are network namespaces of this machine; `--link` limits what each may send. Parts are of one size, and of two
thirds to four thirds of it (*uneven*), whose sizes the ranks of a host exchange first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

from bench.measure import interleave
from bench.runner import Option, Settings, Start, begin, launch, parse, table

_CALLS = 10
_WAYS = {"direct": 0, "passed on": sys.maxsize}
"""The longest part that is passed on, in bytes."""


def main(argv: Sequence[str]) -> int:
    """Print a table of each number of ranks on a host."""
    options = {
        "hosts": Option(2, "hosts"),
        "slots": Option((2, 3), "ranks on each host"),
        "kib": Option((1, 32, 64, 128, 512), "sizes of a part"),
        "turns": Option(16, "of ten calls each"),
        "link": Option("", "what a host may send, as tc writes it; no limit if left out"),
    }
    args = parse("all-to-all", __doc__ or "", options, argv)
    begin()
    from bench.network import brought_up

    with brought_up(args.hosts) as hosts:
        if args.link:
            hosts.limit(args.link)
        for slots in args.slots:
            start = Start(args.hosts * slots, options=tuple(hosts.options(slots, {"GLOO_SOCKET_IFNAME": "eth0"})))
            rows = []
            for kib, kind, *ways in launch("all_to_all", "both", vars(args), start)[0]:
                cells = [f"{1e3 * way['median']:.2f} ({1e3 * way['least']:.2f})" for way in ways]
                cpu = [f"{1e3 * way['cpu']:.2f}" for way in ways]
                rows.append((str(kib), kind, *cells, f"{ways[1]['median'] / ways[0]['median']:.2f}", *cpu))
            title = f"{args.hosts} hosts of {slots}: ms a call, median (least), and CPU ms a rank"
            columns = ("KiB a part", "parts", "direct", "passed on", "ratio", "CPU, direct", "CPU, passed on")
            table(title, columns, rows)
    return 0


def work(variant: str, s: Settings) -> list[Any]:
    """Return rows of (KiB, kind of parts, direct, passed on), the last two with seconds of a call."""
    from polyaccel import comm
    from polyaccel.comm.wrappers import hierarchical
    from polyaccel.core.types import DType

    comm.init_distributed(timeout=60)
    communicator = comm.default_communicator()
    rank, world = communicator.rank, communicator.world_size

    def timed(call: Callable[[], object], nbytes: int) -> tuple[float, float]:
        hierarchical._short_nbytes = lambda *sizes, **kinds: nbytes
        communicator.barrier()
        began, cpu = perf_counter(), process_time()
        for _ in range(_CALLS):
            call()
        return (perf_counter() - began) / _CALLS, (process_time() - cpu) / _CALLS

    rows: list[Any] = []
    for kib in s["kib"]:
        for kind in ("equal", "uneven"):
            counts = [[_numel(kib, kind, sender, to) for to in range(world)] for sender in range(world)]
            sent, received = counts[rank], [line[rank] for line in counts]
            source = communicator.allocate(sum(sent), DType.FLOAT32)
            out = communicator.allocate(sum(received), DType.FLOAT32)
            parts: dict[str, Any] = {}
            if kind == "uneven":
                parts = {"counts": received, "source_counts": sent, "max_send_numel": max(map(max, counts))}
            call = partial(communicator.all_to_all, out, source, **parts)
            taken = interleave({way: partial(timed, call, nbytes) for way, nbytes in _WAYS.items()}, s["turns"])
            row: list[Any] = [kib, kind]
            for way in _WAYS:
                of_ranks: Any = communicator.all_gather_object(taken[way])
                slowest = [max(wall for wall, _ in turn) for turn in zip(*of_ranks, strict=True)]
                cpu = sum(median(cpu for _, cpu in turns) for turns in of_ranks) / world
                row.append({"median": median(slowest), "least": min(slowest), "cpu": cpu})
            rows.append(row)
    comm.destroy_process_group()
    return rows


def _numel(kib: int, kind: str, sender: int, to: int) -> int:
    whole = kib * 1024 // 4
    return whole if kind == "equal" else whole * (2 + (sender + 2 * to) % 3) // 3
