"""The contract suite of an installed plugin, by its name, for `polyaccel plugins check`.

Tests of one process run in a worker of their own (`RankPool` of one rank), so that a plugin that crashes or hangs is a
failed test and not the end of the check.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import SkipTest

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import choose_accelerator, host_accelerator
from polyaccel.checkpoint.storage import Storage
from polyaccel.comm.base import CommBackend, Communicator
from polyaccel.engine.metrics import Monitor
from polyaccel.launch.base import Launcher
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.testkit.accelerator import AcceleratorContract
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.comm.faults import CommFaultContract
from polyaccel.testkit.contract import CheckOutcome, list_tests, run_test
from polyaccel.testkit.launcher import LauncherContract
from polyaccel.testkit.monitor import MonitorContract
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.storage import StorageContract
from polyaccel.testkit.tier import TierContract

BASES: Mapping[PluginGroup, type[Any]] = MappingProxyType(
    {
        PluginGroup.ACCELERATORS: Accelerator,
        PluginGroup.COMM: CommBackend,
        PluginGroup.TIERS: Tier,
        PluginGroup.STORAGE: Storage,
        PluginGroup.LAUNCHERS: Launcher,
        PluginGroup.MONITORS: Monitor,
    }
)
"""The ABC that a plugin of each group derives from."""

TEST_TIMEOUT_S = 300.0


def load(group: PluginGroup, name: str) -> type[Any]:
    """The plugin's class, checked. Raises what `load_plugin` raises."""
    base = BASES[group]
    return load_plugin(group, name, base, base.API_VERSION)


def run_suite(group: PluginGroup, name: str, *, accelerator: str, place: str | None) -> Iterator[CheckOutcome]:
    """Every test of the suite of a plugin of any group but comm, in turn, each as it ends.

    `accelerator` names the device whose states a tier holds. `place` is an empty place for a storage, and a folder for
    the files of a tier; None takes a temporary folder.
    """
    with RankPool(1, backend="local", accelerator=accelerator) as pool, _folder(place) as folder:
        for test in list_tests(type(_contract(group, name, folder, accelerator))):
            location = f"{folder.rstrip('/')}/{test}"
            yield _in_worker(pool, test, run_named, group.value, name, test, location, accelerator)


def run_comm_suite(pool: RankPool) -> Iterator[CheckOutcome]:
    """The communicators' contract on the ranks of `pool`; nothing more where they do not meet."""
    meeting = run_test("test_ranks_meet", lambda: pool.run(methodcaller("barrier")))
    yield meeting
    if meeting.state == "failed":
        return
    suite = _PoolContract(pool)
    for test in list_tests(CommContract):
        yield run_test(test, getattr(suite, test))


def run_comm_faults(name: str, accelerator: str, ranks: int) -> Iterator[CheckOutcome]:
    """The contract for ranks that stay away or die, on `ranks` ranks of the comm backend `name`."""
    suite = _NamedFaults(name, accelerator, ranks)
    for test in list_tests(CommFaultContract):
        yield run_test(test, getattr(suite, test))


def run_training(pool: RankPool, accelerator: Accelerator) -> CheckOutcome:
    """Ten steps of a torch module at every stage, through `polyaccel.initialize`, on the ranks of `pool`."""

    def train() -> None:
        if accelerator.torch_device_type is None or find_spec("torch") is None:
            raise SkipTest("torch does not know the device, or is not installed")
        pool.run(train_torch, timeout_s=TEST_TIMEOUT_S)

    return run_test("test_ten_steps_of_a_torch_module_agree_at_every_stage", train)


def run_named(
    communicator: Communicator, group: str, name: str, test: str, place: str, accelerator: str
) -> CheckOutcome:
    """Run one test of a plugin's suite, in the process of `communicator`."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # a warning of somebody else's package breaks no promise
        suite = _contract(PluginGroup(group), name, place, accelerator)
        return run_test(test, getattr(suite, test))


def train_torch(communicator: Communicator) -> None:
    """Train a torch module in the process of `communicator`."""
    from polyaccel.testkit.training.torch_training import check_torch_stages

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        check_torch_stages(communicator)


def _in_worker(pool: RankPool, test: str, task: Callable[..., CheckOutcome], *args: Any) -> CheckOutcome:
    outcomes: list[CheckOutcome] = []
    ended = run_test(test, lambda: outcomes.extend(pool.run(task, *args, timeout_s=TEST_TIMEOUT_S)))
    return outcomes[0] if outcomes else ended


@contextmanager
def _folder(place: str | None) -> Iterator[str]:
    if place is not None:
        yield place
    else:
        with tempfile.TemporaryDirectory(prefix="polyaccel-check-") as folder:
            yield folder


def _contract(group: PluginGroup, name: str, place: str, accelerator: str) -> Any:
    """The suite of one plugin."""
    if group is PluginGroup.ACCELERATORS:
        return _NamedAccelerator(name)
    plugin = load(group, name)
    if group is PluginGroup.TIERS:
        return _NamedTier(plugin, accelerator, place)
    if group is PluginGroup.STORAGE:
        return _NamedStorage(plugin, place)
    return _NamedLauncher(plugin) if group is PluginGroup.LAUNCHERS else _NamedMonitor(plugin)


class _NamedAccelerator(AcceleratorContract):
    def __init__(self, name: str) -> None:
        self._name = name

    def make(self) -> Accelerator:
        return choose_accelerator(self._name)


class _NamedStorage(StorageContract):
    def __init__(self, plugin: type[Storage], place: str) -> None:
        self._plugin, self._place = plugin, place

    def make(self) -> Storage:
        return self._plugin(self._place)


class _NamedTier(TierContract):
    def __init__(self, plugin: type[Tier], accelerator: str, place: str) -> None:
        self._plugin, self._accelerator, self._place = plugin, accelerator, place

    def make(self) -> Tier:
        tier = self._plugin()
        accelerator = choose_accelerator(self._accelerator)
        Path(self._place).mkdir(parents=True, exist_ok=True)
        tier.open(accelerator, host_accelerator(accelerator), TierOptions(run_id="check", path=self._place))
        return tier


class _NamedLauncher(LauncherContract):
    def __init__(self, plugin: type[Launcher]) -> None:
        self._plugin = plugin

    def make(self) -> Launcher:
        return self._plugin()


class _NamedMonitor(MonitorContract):
    def __init__(self, plugin: type[Monitor]) -> None:
        self._plugin = plugin

    def make(self) -> Monitor:
        return self._plugin()


class _PoolContract(CommContract):
    """The communicators' contract on ranks that run already."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self.world_sizes = (pool.world_size,)  # type: ignore[misc]

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(body, *args, timeout_s=TEST_TIMEOUT_S)


class _NamedFaults(CommFaultContract):
    def __init__(self, backend: str, accelerator: str, world_size: int) -> None:
        self._backend, self._accelerator = backend, accelerator
        self.world_size = world_size  # type: ignore[misc]

    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return RankPool(
            world_size,
            backend=self._backend,
            accelerator=self._accelerator,
            by_port=True,
            comm_timeout_s=comm_timeout_s,
            grace_s=grace_s,
        )
