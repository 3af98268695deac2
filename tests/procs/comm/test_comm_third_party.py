"""Backends of other packages, installed by pip: one that torch is taught, and one that is a plugin of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from throwaway import Distribution, install, python

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.torch.backend import REGISTRARS, HcclBackend
from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.ranks.procs import RankPool

TORCH_BACKEND = """
import torch
import torch.distributed as dist


class Finished(dist.Work):
    def __init__(self, works, finish):
        super().__init__()
        self.works, self.finish = works, finish

    def wait(self, timeout=None):
        for work in self.works:
            work.wait()
        self.works = []
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self):
        return all(work.is_completed() for work in self.works)


class Acme(dist.ProcessGroup):
    '''Everything by gloo; averages by ourselves.'''

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "acme"

    def _set_group_name(self, name):  # torch keeps names with backends in C++, of which this has none
        self._name = name

    @property
    def group_name(self):
        return self._name

    def _reduced(self, start, out, opts):
        average = opts.reduceOp == dist.ReduceOp.AVG
        if average:
            opts.reduceOp = dist.ReduceOp.SUM
        return Finished([start(opts)], lambda: out.div_(self.size()) if average else None)

    def allreduce(self, tensors, opts):
        return self._reduced(lambda opts: self.gloo.allreduce(tensors, opts), tensors[0], opts)

    def reduce_scatter_single(self, out, source, opts):
        return self._reduced(lambda opts: self.gloo._reduce_scatter_base(out, source, opts), out, opts)

    def all_gather_single(self, out, source, opts):
        return Finished([self.gloo._allgather_base(out, source, opts)], None)

    _reduce_scatter_base, _allgather_base = reduce_scatter_single, all_gather_single

    def broadcast(self, tensors, opts):
        return Finished([self.gloo.broadcast(tensors, opts)], None)

    def alltoall_base(self, out, source, out_sizes, sizes, opts):
        return Finished([self.gloo.alltoall_base(out, source, out_sizes, sizes, opts)], None)

    def send(self, tensors, to, tag):
        return Finished([self.gloo.send(tensors, to, tag)], None)

    def recv(self, tensors, source, tag):
        return Finished([self.gloo.recv(tensors, source, tag)], None)

    def barrier(self, opts=None):
        return Finished([self.gloo.barrier()], None)


def register():
    dist.Backend.register_backend("acme", Acme, devices=["cpu"])


def register_nothing():
    pass


def fail():
    raise OSError("no such bus")
"""
PLUGIN = """
from polyaccel.comm.base import CommBackend
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.core.types import Probe

class Backend(CommBackend):
    API_VERSION = (3, 0)
    name = "busy"

    @classmethod
    def probe(cls):
        return Probe(True, "always")

    def connect(self, rendezvous, accelerator, *, timeout_s):
        return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
"""
PACKAGES = (
    Distribution(
        "acme_dist",
        "1.0",
        TORCH_BACKEND,
        {
            REGISTRARS: {
                "acme": "acme_dist:register",
                "hollow": "acme_dist:register_nothing",
                "broken": "acme_dist:fail",
            }
        },
    ),
    Distribution("busy_dist", "1.0", PLUGIN, {"polyaccel.comm": {"busy": "busy_dist:Backend"}}),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("packages") / "site"
    install(site, *PACKAGES)
    return site


@pytest.fixture(scope="module")
def pool(site: Path) -> Iterator[RankPool]:
    """Two ranks, which do not see the package before they connect to its backend."""
    with RankPool(2) as pool:
        yield pool


def over_acme(inner: Communicator, site: str, body: Callable[..., Any], *args: Any) -> Any:
    """`body` on a communicator of acme's, in a worker whose script has made a group of gloo's."""
    from polyaccel.comm.base import Rendezvous
    from polyaccel.comm.init.backends import comm_backend

    if site not in sys.path:
        sys.path.insert(0, site)
    rendezvous = Rendezvous(inner.rank, inner.world_size, inner.rank, inner.world_size, None, None, "test")
    backend = comm_backend("acme")
    assert "acme_dist" not in sys.modules or "acme" in sys.modules["torch.distributed"].Backend.backend_list
    comm = backend().connect(rendezvous, inner.accelerator, timeout_s=20)
    assert comm.backend == "acme"
    assert "acme_dist" in sys.modules
    return body(comm, *args)


class TestBackendThatTorchIsTaught(CommContract):
    world_sizes: ClassVar[tuple[int, ...]] = (2,)

    @pytest.fixture(autouse=True)
    def _pool(self, pool: RankPool, site: Path) -> None:
        self.pool, self.site = pool, str(site)

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(over_acme, self.site, body, *args)


def test_a_backend_that_a_script_registers_is_used_by_name(site: Path, tmp_path: Path) -> None:
    """Chosen by the variable, without an entry point; torch's own default group is made over it."""
    code = f"""
import os, sys
os.environ |= {{"POLYACCEL_COMM": "scripted", "RANK": "0", "WORLD_SIZE": "1"}}
import torch, torch.distributed as dist, acme_dist
dist.Backend.register_backend("scripted", acme_dist.Acme, devices=["cpu"])
dist.init_process_group("scripted", init_method="file://{tmp_path}/store", rank=0, world_size=1)
from polyaccel import comm
comm.init_distributed(timeout=60)
print(comm.default_communicator().backend, dist.get_backend(), comm.get_world_size())
"""
    assert python(code, site, cache=tmp_path).stdout == "scripted scripted 1\n"


def test_a_plugin_is_used_by_name_in_the_config(site: Path, tmp_path: Path) -> None:
    code = """
from polyaccel import comm
comm.init_distributed(config={"comm": {"backend": "busy"}})
print(comm.default_communicator().backend)
"""
    assert python(code, site, cache=tmp_path).stdout == "busy\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hollow", "CommError: acme_dist:register_nothing registered no backend 'hollow' with torch"),
        ("broken", "CommError: acme_dist:fail could not register backend 'broken': OSError: no such bus"),
        ("absent", "PluginNotFound: no comm backend plugin is called 'absent'"),
    ],
)
def test_a_backend_that_does_not_come_says_why(name: str, message: str, site: Path, tmp_path: Path) -> None:
    code = f"""
from polyaccel import comm
comm.init_distributed({name!r}, rank=0, world_size=2)
"""
    done = python(code, site, cache=tmp_path, check=False)
    assert done.returncode == 1
    assert message in done.stderr


class Device(CpuAccelerator):
    """The CPU under another device's name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = self.torch_device_type = name  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "module"), [("npu", "torch_npu"), ("hpu", "habana_frameworks.torch.distributed.hccl")]
)
def test_hccl_is_the_library_of_the_accelerator(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "habana_frameworks or torch_npu is not installed" in HcclBackend.probe().reason
    file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert HcclBackend.probe().usable
    HcclBackend().register(Device(name))
    package = module.partition(".")[0]
    imported = [one for one in sys.modules if one.partition(".")[0] == package]
    assert module in imported
    for one in imported:
        del sys.modules[one]


def test_hccl_is_not_for_other_accelerators() -> None:
    with pytest.raises(CommError) as caught:
        HcclBackend().register(CpuAccelerator())
    assert caught.value.value == "cpu"
    assert "'hccl'" in str(caught.value)
