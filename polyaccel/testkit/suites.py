"""The contract suite of an installed plugin, by its name, for `polyaccel plugins check`.

Tests of one process run in their own worker (`RankPool` of one rank), so that a plugin that crashes or hangs is a
failed test and not the end of the check. A suite is given out row by row, before each runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import SkipTest

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import choose_accelerator, host_accelerator
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import CommBackend, Communicator
from polyaccel.launch.base import Launcher
from polyaccel.observability.metrics import Monitor
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.testkit.accelerator import AcceleratorContract
from polyaccel.testkit.comm import CommContract, CommFaultContract
from polyaccel.testkit.comm.faults import COMM_TIMEOUT_S
from polyaccel.testkit.contract import TIMEOUT_S, CheckOutcome, CheckRow, list_tests, run_test, wanted_by
from polyaccel.testkit.launcher import LauncherContract
from polyaccel.testkit.loading import LoadingContract
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
_UNDER_TORCHRUN = 6
"""Limits of a row that torchrun may take: the agent and its ranks start, and train at every stage without a word."""


@dataclass(frozen=True)
class Subject:
    """What is checked, and how: the plugin's `group` and `name`, the device whose memory a comm backend moves or a tier
    is for, an empty place for a storage or for files of a tier (None: a temporary folder), how many `ranks`, and how
    long a row may be silent."""

    group: PluginGroup
    name: str
    accelerator: str = "cpu"
    place: str | None = None
    ranks: int = 3
    timeout_s: float = TIMEOUT_S


def load(group: PluginGroup, name: str) -> type[Any]:
    """The plugin's class, checked. Raises what `load_plugin` raises."""
    base = BASES[group]
    return load_plugin(group, name, base, base.API_VERSION)


def loading_rows(subject: Subject) -> Iterator[CheckRow]:
    """Whether the plugin loads and can be used here; nothing more once one of these has failed."""
    suite = LoadingContract(subject.group, subject.name, subject.timeout_s)
    for row in _rows("plugin", suite):
        yield row
        if row.has_failed:
            return


def contract_rows(subject: Subject) -> Iterator[CheckRow]:
    """The suite of a plugin of any group but comm."""
    title = f"{subject.group.noun} contract"
    with _pool(1, backend="local", accelerator=subject.accelerator) as pool, _folder(subject.place) as folder:
        contract = CONTRACTS[subject.group]
        for test in list_tests(contract):
            args = (subject.group.value, subject.name, test, f"{folder.rstrip('/')}/{test}", subject.accelerator)
            act = partial(_in_worker, pool, test, subject.timeout_s, args)
            yield CheckRow(title, test, wanted_by(contract, test), act)


def rank_rows(subject: Subject, backend: str | None) -> Iterator[CheckRow]:
    """The comm contract of `backend` (None: the accelerator's own) between ranks of the accelerator, training over it,
    and what ranks see of one that fails; nothing more where they do not connect."""
    device = choose_accelerator(subject.accelerator)
    name = backend or device.communication_backend_name()
    title = f"comm contract: {name} between {subject.ranks} ranks of {subject.accelerator}"
    limits: dict[str, Any] = {"by_port": True, "start_timeout_s": subject.timeout_s}
    with _pool(subject.ranks, backend=name, accelerator=subject.accelerator, **limits) as pool:
        for row in _rows(title, MeetingContract(name, pool, subject.timeout_s)):
            yield row
            if row.has_failed or (row.outcome is not None and row.outcome.state == "skipped"):
                return
        yield from _rows(title, _PoolContract(pool, subject.timeout_s))
        training = TorchTrainingContract(pool, device, name, subject)
        yield from _rows(f"training on {subject.ranks} ranks", training)
    yield from _rows(f"comm contract: what {subject.ranks} ranks see of one that fails", _NamedFaults(name, subject))


def jax_rows(subject: Subject) -> Iterator[CheckRow]:
    """Training of a function of JAX on the accelerator, on ranks of the host and on all devices of a process
    elsewhere."""
    device = choose_accelerator(subject.accelerator)
    ranks = subject.ranks if device.capabilities().mutable_buffers else 1
    backend = device.communication_backend_name() if ranks > 1 else "local"
    with _pool(ranks, backend=backend, accelerator=subject.accelerator, by_port=True) as pool:
        yield from _rows("training with JAX", JaxTrainingContract(pool, subject.timeout_s))


def run_named(
    communicator: Communicator, group: str, name: str, test: str, place: str, accelerator: str
) -> CheckOutcome:
    """Run one test of a plugin's suite, in the process of `communicator`."""
    suite = _contract(PluginGroup(group), name, place, accelerator)
    return run_test(test, getattr(suite, test))


def train_torch(communicator: Communicator) -> None:
    """Train a torch module in the process of `communicator`."""
    from polyaccel.testkit.training.torch_training import check_torch_stages

    check_torch_stages(communicator)


def train_jax(communicator: Communicator) -> None:
    """Train a function of JAX in the process of `communicator`."""
    from polyaccel.testkit.training.jax_training import check_jax_stages

    check_jax_stages(communicator)


def _pool(ranks: int, **settings: Any) -> RankPool:
    """Workers in which a warning of a third-party package is shown: it breaks no promise."""
    return RankPool(ranks, warnings_fail=False, **settings)


def _rows(title: str, suite: Any) -> Iterator[CheckRow]:
    for test in list_tests(type(suite)):
        yield CheckRow(title, test, wanted_by(type(suite), test), partial(run_test, test, getattr(suite, test)))


def _in_worker(pool: RankPool, test: str, timeout_s: float, args: tuple[Any, ...]) -> CheckOutcome:
    outcomes: list[CheckOutcome] = []
    ended = run_test(test, lambda: outcomes.extend(pool.run(run_named, *args, timeout_s=timeout_s)))
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


class MeetingContract:
    """Whether ranks connect at all."""

    def __init__(self, backend: str, pool: RankPool, timeout_s: float) -> None:
        self._backend, self._pool, self._timeout_s = backend, pool, timeout_s

    def test_ranks_meet(self) -> None:
        """Ranks that a launcher has started join one group and pass a barrier: nothing else can be tried before."""
        if self._backend == "local":
            raise SkipTest("local joins one process")
        self._pool.run(methodcaller("barrier"), timeout_s=self._timeout_s)


class TorchTrainingContract:
    """Training on the accelerator over `backend` as users of torch do it."""

    def __init__(self, pool: RankPool, accelerator: Accelerator, backend: str, subject: Subject) -> None:
        self._pool, self._accelerator, self._backend, self._subject = pool, accelerator, backend, subject

    def test_ten_steps_of_a_torch_module_agree_at_every_stage(self) -> None:
        """A torch module trains as plain torch trains it, at stages 0 to 3, in 32 and 16 bits, with states and
        parameters offloaded, every parameter freed and gathered at stage 3: what the parts promise must add up."""
        self._require_torch()
        self._pool.run(train_torch, timeout_s=self._subject.timeout_s)

    def test_they_train_under_torchrun_too(self) -> None:
        """The same training in ranks that torchrun starts, as most jobs of torch are started: its agent listens at the
        port that the environment names, so that a backend which binds that port itself ends there."""
        self._require_torch()
        from polyaccel.testkit.training.torch_launched import check_under_torchrun

        subject = self._subject
        check_under_torchrun(
            subject.accelerator, self._backend, subject.ranks, timeout_s=_UNDER_TORCHRUN * subject.timeout_s
        )

    def _require_torch(self) -> None:
        if self._accelerator.torch_device_type is None or find_spec("torch") is None:
            raise SkipTest("torch does not have the device, or is not installed: no torch module trains on it")


class JaxTrainingContract:
    """Training on the accelerator as users of JAX do it."""

    def __init__(self, pool: RankPool, timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s

    def test_steps_of_a_function_of_jax_agree_at_every_stage(self) -> None:
        """A function of JAX trains as in float64, at every stage that there is for the device: where torch and JAX both
        have a device, both frontends must train on it."""
        if find_spec("jax") is None:
            raise SkipTest("JAX is not installed")
        self._pool.run(train_jax, timeout_s=self._timeout_s)


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
        self._ranks = count()

    def make(self) -> Tier:
        tier = self._plugin()
        accelerator = choose_accelerator(self._accelerator)
        Path(self._place).mkdir(parents=True, exist_ok=True)
        options = TierOptions(run_id="check", rank=next(self._ranks), path=self._place)
        tier.open(accelerator, host_accelerator(accelerator), options)
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

    def __init__(self, pool: RankPool, timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self.world_sizes = (pool.world_size,)  # type: ignore[misc]

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(body, *args, timeout_s=self._timeout_s)


class _NamedFaults(CommFaultContract):
    def __init__(self, backend: str, subject: Subject) -> None:
        self._backend, self._subject = backend, subject
        self.world_size = subject.ranks  # type: ignore[misc]

    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return _pool(
            world_size,
            backend=self._backend,
            accelerator=self._subject.accelerator,
            by_port=True,
            comm_timeout_s=comm_timeout_s,
            grace_s=grace_s,
        )

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        # The communicator's own limit has to end first.
        return pool.run(body, *args, timeout_s=max(2 * COMM_TIMEOUT_S, self._subject.timeout_s))


CONTRACTS: Mapping[PluginGroup, type[Any]] = MappingProxyType(
    {
        PluginGroup.ACCELERATORS: AcceleratorContract,
        PluginGroup.COMM: CommContract,
        PluginGroup.TIERS: TierContract,
        PluginGroup.STORAGE: StorageContract,
        PluginGroup.LAUNCHERS: LauncherContract,
        PluginGroup.MONITORS: MonitorContract,
    }
)
"""The contract of each group."""
ALL_CONTRACTS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "Every plugin": LoadingContract,
        "Accelerator": AcceleratorContract,
        "Ranks that meet": MeetingContract,
        "Communicator": CommContract,
        "Communicator, with a rank that fails": CommFaultContract,
        "Training with torch": TorchTrainingContract,
        "Training with JAX": JaxTrainingContract,
        "Tier": TierContract,
        "Storage": StorageContract,
        "Launcher": LauncherContract,
        "Monitor": MonitorContract,
    }
)
"""The contracts whose tests `polyaccel plugins check` runs, by what people call them."""
