"""Which ranks share a host, and a communicator of two levels where that pays."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from polyaccel.comm.base import CommBackend, Communicator
from polyaccel.comm.host_address import host_name
from polyaccel.comm.init.backends import WITHIN_HOST, comm_backend
from polyaccel.comm.wrappers.hierarchical import is_two_level, two_level
from polyaccel.errors import CommError

_log = logging.getLogger(__name__)


def make_hierarchical(flat: Communicator, local_rank: int) -> Communicator:
    """`flat`, or the same group with shared memory inside hosts where every host has the same number of ranks, at least
    two. Collective; rank 0 logs why it stays flat on several hosts. `local_rank` is what the launcher set."""
    within = comm_backend(WITHIN_HOST)
    probe = within.probe()
    notes = flat.all_gather_object((host_name() if probe.usable else "", local_rank, probe.reason))
    reason = next((why for system, _, why in notes if not system), "")
    hosts = ranks_by_host([(system, number) for system, number, _ in notes])
    sizes = [len(members) for members in hosts]
    if not reason and (len(hosts) == 1 or set(sizes) == {1}):
        return flat
    if not reason and not is_two_level(hosts):
        reason = f"the hosts have {', '.join(map(str, sizes))} ranks, and shared memory inside hosts needs equally many"
    if not reason and within.most_ranks is not None and sizes[0] > within.most_ranks:
        reason = f"{sizes[0]} ranks on a host are more than {within.most_ranks}"
    if not reason:
        intra, reason = _share(flat, within, hosts)
        if intra is not None and not reason:
            return two_level(flat, intra, hosts)
        if intra is not None:
            intra.close()
    if flat.rank == 0:
        _log.info("all ranks talk by %s: %s", flat.backend, reason)
    return flat


def ranks_by_host(places: Sequence[tuple[str, int]]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, from every rank's (running system, number on its host); hosts by their first rank.

    Ranks of one system whose launcher counts from 0 more than once are on as many hosts: containers and network
    namespaces are hosts to their launchers.
    """
    seen: Counter[tuple[str, int]] = Counter()
    hosts: dict[tuple[str, int], list[int]] = {}
    for rank, (system, local_rank) in enumerate(places):
        hosts.setdefault((system, seen[system, local_rank]), []).append(rank)
        seen[system, local_rank] += 1
    return tuple(tuple(members) for members in hosts.values())


def _share(
    flat: Communicator, within: type[CommBackend], hosts: Sequence[Sequence[int]]
) -> tuple[Communicator | None, str]:
    """Shared memory for this host's ranks, and why some rank could not have it. Collective over all of `flat`."""
    near = None
    for one in hosts:
        near = flat.split(one) or near
    intra, failure = None, ""
    if near is None:
        raise CommError(f"rank {flat.rank} is on none of the hosts {list(hosts)}", value=hosts)
    try:
        intra = within().connect_within(near, flat.board())
    except CommError as error:
        failure = error.message
    failures = flat.all_gather_object(failure)
    near.close()  # not before all ranks have come here: some might still be connecting
    return intra, next((why for why in failures if why), "")
