"""Two levels over real processes: shared memory inside hosts that a launcher tells apart, gloo between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import norms_job
import pytest

from polyaccel.comm.backends.shm.backend import ShmBackend
from polyaccel.comm.base import Communicator
from polyaccel.comm.init import hosts
from polyaccel.comm.init.hosts import find_hosts, make_hierarchical
from polyaccel.comm.wrappers.hierarchical import HierarchicalCommunicator
from polyaccel.errors import CommError
from polyaccel.job.ports import free_port
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.ranks.procs import RankPool

pytestmark = pytest.mark.skipif(not ShmBackend.probe().usable, reason="needs Linux and the compiled library")

_shared: dict[int, Communicator] = {}


def on_two_hosts(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    """Run `body` with ranks that a launcher counted 0, 1, 0, 1 on their hosts."""
    if id(comm) not in _shared:
        everybody = comm.split(range(comm.world_size))
        assert everybody is not None
        _shared[id(comm)] = make_hierarchical(everybody, find_hosts(everybody, comm.rank % 2))
    both = _shared[id(comm)]
    assert isinstance(both, HierarchicalCommunicator)
    assert both.backend == "shm+gloo"
    return body(both, *args)


class TestTwoHosts(CommContract):
    world_sizes = (4,)

    @pytest.fixture(autouse=True)
    def _pools(self, rank_pool: Callable[[int], RankPool]) -> None:
        self.pools = rank_pool

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(on_two_hosts, body, *args)


def flat_on_uneven_hosts(comm: Communicator) -> bool:
    return make_hierarchical(comm, find_hosts(comm, [0, 1, 0][comm.rank])) is comm


def test_uneven_hosts_stay_flat(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(3).run(flat_on_uneven_hosts) == [True] * 3


def flat_where_memory_fails(comm: Communicator) -> tuple[bool, list[str]]:
    """Ranks 2 and 3 cannot share memory."""
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts._log, "info", lambda text, *args: messages.append(text % args))
        if comm.rank > 1:
            patch.setattr(ShmBackend, "connect_within", refuse)
        return make_hierarchical(comm, find_hosts(comm, comm.rank % 2)) is comm, messages


def refuse(*args: Any) -> Any:
    raise CommError("no room for shared memory")


def test_all_ranks_stay_flat_where_one_host_cannot_share_memory(rank_pool: Callable[[int], RankPool]) -> None:
    found = rank_pool(4).run(flat_where_memory_fails)
    assert [is_flat for is_flat, _ in found] == [True] * 4
    assert [told for _, told in found] == [["all ranks talk by gloo: no room for shared memory"], [], [], []]


SCRIPT = """
import logging, sys, warnings
warnings.simplefilter("error")
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from polyaccel import comm
comm.init_distributed(timeout=100)
print("BACKEND", comm.default_communicator().backend)
if sys.argv[1] != "none":
    from norms_job import norm_of_three_steps
    print("NORM", norm_of_three_steps(int(sys.argv[1])))
comm.destroy_process_group()
"""


def run_script(
    tmp_path: Path, stage: str, ranks_of: Sequence[int], *, prefixes: Sequence[Sequence[str]] = ((), ()), **environ: str
) -> list[str]:
    """What every rank printed; `ranks_of[h]` ranks on host h, whose commands begin with `prefixes[h]`."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    world = str(sum(ranks_of))
    shared = {**os.environ, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(Path(norms_job.__file__).parent), **environ}
    processes = []
    for host, count in enumerate(ranks_of):
        for local_rank in range(count):
            own = {"RANK": str(len(processes)), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(count)}
            command = [*prefixes[host], sys.executable, str(script), stage]
            processes.append(
                subprocess.Popen(command, env=shared | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def said(outputs: list[str], word: str) -> list[str]:
    """What follows `word` in the output of each rank."""
    return [line.split()[1] for out in outputs for line in out.splitlines() if line.startswith(word)]


def flat_norm(comm: Communicator) -> float:
    assert comm.backend == "gloo"
    return norms_job.norm_of_three_steps(2)


@pytest.fixture(scope="module")
def flat_norms(rank_pool: Callable[[int], RankPool]) -> list[float]:
    return rank_pool(4).run(flat_norm)


def test_scripts_get_two_levels_by_default(tmp_path: Path, flat_norms: list[float]) -> None:
    outputs = run_script(tmp_path, "3", (2, 2))
    assert said(outputs, "BACKEND") == ["shm+gloo"] * 4
    assert [float(norm) for norm in said(outputs, "NORM")] == pytest.approx(flat_norms, rel=1e-6)


def test_uneven_hosts_say_once_why_they_are_flat(tmp_path: Path) -> None:
    outputs = run_script(tmp_path, "none", (2, 1))
    assert said(outputs, "BACKEND") == ["gloo"] * 3
    sentence = "all ranks talk by gloo: the hosts have 2, 1 ranks, and shared memory inside hosts needs equally many"
    assert [out.count(sentence) for out in outputs] == [1, 0, 0]


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable: 10.83.0.1 and 10.83.0.2 on their eth0."""
    names = [f"pa{os.getpid()}{host}" for host in "ab"]
    cable = ["ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(cable, check=True, capture_output=True)
        for index, name in enumerate(names, 1):
            for command in (f"addr add 10.83.0.{index}/24 dev eth0", "link set eth0 up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *command.split()], check=True, capture_output=True)
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.skipif(shutil.which("ip") is None or os.geteuid() != 0, reason="network namespaces need ip and root")
def test_two_hosts_with_a_network_between_them(tmp_path: Path, namespaces: list[str], flat_norms: list[float]) -> None:
    prefixes = [("ip", "netns", "exec", name) for name in namespaces]
    where = {"MASTER_ADDR": "10.83.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
    outputs = run_script(tmp_path, "3", (2, 2), prefixes=prefixes, **where)
    assert said(outputs, "BACKEND") == ["shm+gloo"] * 4
    assert [float(norm) for norm in said(outputs, "NORM")] == pytest.approx(flat_norms, rel=1e-6)
