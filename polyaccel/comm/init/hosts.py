"""Which ranks share a host, and a communicator of two levels where that pays."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from polyaccel.comm.base import CommBackend, Communicator
from polyaccel.comm.init.backends import WITHIN_HOST, comm_backend
from polyaccel.comm.wrappers.hierarchical import is_two_level, two_level
from polyaccel.errors import CommError
from polyaccel.job.host_topology import HostTopology, host_id

_log = logging.getLogger(__name__)


def find_hosts(communicator: Communicator, local_rank: int) -> HostTopology:
    """Return which ranks of a job, all of them in `communicator`, share a host. Collective; one all-gather.

    `local_rank` is the launcher's. Parts that need to know take `Communicator.host_topology` and never ask again.
    """
    try:
        own = host_id()
    except OSError:  # no Linux
        own = socket.gethostname()
    return HostTopology.of_notes(communicator.rank, communicator.all_gather_object((own, local_rank)))


def make_hierarchical(flat: Communicator, topology: HostTopology) -> Communicator:
    """Return `flat`, or the same group with shared memory inside hosts where every host has the same number of ranks,
    at least two. Collective; rank 0 logs why it stays flat on several hosts."""
    within, hosts = comm_backend(WITHIN_HOST), topology.ranks_by_host
    sizes = [len(members) for members in hosts]
    if len(hosts) == 1 or set(sizes) == {1}:
        return flat
    reason = ""
    if not is_two_level(hosts):
        reason = f"the hosts have {', '.join(map(str, sizes))} ranks, and shared memory inside hosts needs equally many"
    elif within.most_ranks is not None and sizes[0] > within.most_ranks:
        reason = f"{sizes[0]} ranks on a host are more than {within.most_ranks}"
    else:
        probe = within.probe()
        reasons = flat.all_gather_object("" if probe.usable else probe.reason)
        reason = next((why for why in reasons if why), "")
    if not reason:
        intra, reason = _share(flat, within, hosts)
        if intra is not None and not reason:
            return two_level(flat, intra, hosts)
        if intra is not None:
            intra.close()
    if flat.rank == 0:
        _log.info("all ranks talk by %s: %s", flat.backend, reason)
    return flat


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
