"""What holds for every test: how examples are drawn, and fixtures of ranks as processes, started once a session."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.comm import destroy_process_group, is_initialized
from polyaccel.comm.discovery import GLOO_INTERFACE
from polyaccel.comm.launchers.request import VARIABLES
from polyaccel.comm.torch_group import initialized_world
from polyaccel.observability.console import ConsoleHandler
from polyaccel.testkit.ranks.mpi import MpiRankPool
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.worker import seed_generators

# What a measurement on this machine would choose is no test's business. Those of matrix products say what they want.
os.environ.setdefault("POLYACCEL_MATRIX_KERNELS", "off")

# A proof at the first step takes longer than most trainings of tests. Those of proofs want it, for each kind of mesh.
os.environ.setdefault("POLYACCEL_VERIFY", "off")

# Another number looks for tests that pass by the luck of their random weights.
os.environ.setdefault("TESTS_SEED", "0")

# Tests, their ranks and their jobs share a few cores: a second OpenMP thread would only spin and wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A program of XLA runs a few times in a test: it takes longer to compile than to run, and less where it stays as it is.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Most of the time of a test of JAX is XLA's, which need not compile the same program again for each engine, each rank
# and each file of tests. A limit to the size, which is never reached, makes JAX lock the folder: a rank could read what
# another has written half. Workers and ranks inherit the folder.
if "TESTS_XLA_PROGRAMS" not in os.environ:
    _programs = TemporaryDirectory(prefix="polyaccel-xla-")
    os.environ["TESTS_XLA_PROGRAMS"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(1 << 40)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

if find_spec("torch") is not None:
    import torch  # noqa: F401 - an unseeded one draws other numbers in each process: a file of tests could, as it loads it

if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # An example that takes long has met a busy machine. The rest stays what it is here, or in CI.
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")


@contextmanager
def _log_as_found() -> Iterator[None]:
    """The drop-in keeps polyaccel's lines from the root logger, where pytest looks for them in other tests. An engine
    that is made meanwhile finds no handler of pytest's there: it adds one and sets the level."""
    logger = getLogger("polyaccel")
    level, handlers = logger.level, set(logger.handlers)
    yield
    logger.propagate = True
    logger.setLevel(level)
    for handler in [each for each in logger.handlers if isinstance(each, ConsoleHandler) and each not in handlers]:
        logger.removeHandler(handler)


@pytest.fixture(autouse=True, scope="module")
def _lines_of_other_files() -> Iterator[None]:
    """Engines that a file's tests share are made before the first of these."""
    with _log_as_found():
        yield


@pytest.fixture(autouse=True)
def _lines_reach_pytest(_lines_of_other_files: None) -> Iterator[None]:
    with _log_as_found():
        yield


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed random numbers that files of tests draw when they are imported."""
    seed_generators(int(os.environ["TESTS_SEED"]))


@pytest.hookimpl(tryfirst=True)  # before fixtures of files and of the session draw numbers
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed random numbers, so that no test's weights depend on what its process ran before.

    Refuse copies of torch's weak references to storages too, of which fake modes are full: the storage is released once
    more for each, and a process that has freed memory of others dies, or waits for ever, in some later test."""
    seed_generators(int(os.environ["TESTS_SEED"]))
    for module, name in _COPIED_NEVER.items():
        if module in sys.modules:
            getattr(sys.modules[module], name).__deepcopy__ = _refuse_copy


_COPIED_NEVER = {
    "torch._subclasses.fake_tensor": "FakeTensorMode",
    "torch.multiprocessing.reductions": "StorageWeakRef",
}


def _refuse_copy(value: Any, memo: Any) -> Any:
    raise AssertionError(f"a {type(value).__name__} was copied by copy.deepcopy of what refers to one")


def _slow() -> dict[str, int]:
    """What `tests/slow.txt` names, with the number behind `1/`, 0 where none stands there."""
    lines = (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines()
    names = (line.partition(" 1/") for line in lines if not line.startswith("#"))
    return {name: int(number or 0) for name, _, number in names}


@pytest.hookimpl(tryfirst=True)  # before those that `-m` names are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `tests/slow.txt` names (files, classes, functions, some of their cases, single cases) is marked `slow`."""
    slow, seen = _slow(), Counter[str]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        parts = function.split("::")
        names = (item.nodeid, *("::".join(parts[:most]) for most in range(1, len(parts) + 1)))
        every = slow.get(function, 0)
        if (every and seen[function] % every) or any(slow.get(name) == 0 for name in names):
            item.add_marker("slow")
        seen[function] += 1


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: no collection of garbage need walk through it again, of which
    some tests ask for many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _programs_stay() -> Iterator[None]:
    """What JAX keeps of its traces and programs stays as well, hundreds of thousands of objects in a worker."""
    before = len(gc.get_objects())
    yield
    if len(gc.get_objects()) - before > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


_MANY_OBJECTS = 20_000


@contextmanager
def _ranks_as_found() -> Iterator[None]:
    """Process groups that are made meanwhile in this thread end: polyaccel's, and torch's default one. Launchers'
    variables are what they were: libraries make torch's group where they find some."""
    had_one, had_torchs = is_initialized(), initialized_world() is not None
    variables = {name: os.environ.get(name) for name in (*VARIABLES, GLOO_INTERFACE)}
    yield
    if is_initialized() and not had_one:
        destroy_process_group()
    if initialized_world() is not None and not had_torchs:
        import torch.distributed

        torch.distributed.destroy_process_group()
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="module")
def _no_ranks_of_other_files() -> Iterator[None]:
    with _ranks_as_found():
        yield


@pytest.fixture(autouse=True)
def _no_ranks_of_other_tests(_no_ranks_of_other_files: None) -> Iterator[None]:
    with _ranks_as_found():
        yield


@pytest.fixture(scope="session")
def rank_pool(mpi_pool: Callable[..., MpiRankPool]) -> Iterator[Callable[..., RankPool]]:
    """`rank_pool(world_size, backend="gloo", memory=None)`: worker processes joined by a backend, those of `mpi` by an
    mpirun, shared by the session and started on first use."""
    pools: dict[tuple[int, str, HostArrays | None], RankPool] = {}

    def pool(world_size: int, backend: str = "gloo", memory: HostArrays | None = None) -> RankPool:
        if backend == "mpi":
            return mpi_pool(world_size, memory or "torch")
        # A rank may wait while another one compiles a program, on a busy machine; one that fails is found out at once.
        seed = int(os.environ["TESTS_SEED"])
        new = RankPool(world_size, comm_timeout_s=120.0, backend=backend, memory=memory, seed=seed)
        return pools.setdefault((world_size, backend, memory), new)

    yield pool
    for one in pools.values():
        one.close()


@pytest.fixture(scope="session")
def mpi_pool() -> Iterator[Callable[..., MpiRankPool]]:
    """`mpi_pool(world_size, memory="torch")`: ranks of an mpirun, shared by the session and started on first use."""
    pools: dict[tuple[int, HostArrays], MpiRankPool] = {}

    def pool(world_size: int, memory: HostArrays = "torch") -> MpiRankPool:
        return pools.setdefault((world_size, memory), MpiRankPool(world_size, comm_timeout_s=120.0, memory=memory))

    yield pool
    for one in pools.values():
        one.close()
