"""Backends of torch.distributed: gloo, nccl, xccl, hccl, and by name those that other packages register with it.

Light to import; torch is loaded when connecting. See [Note: Default group of torch] in `comm.torch_group`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import CommBackend, Communicator, Rendezvous, unusable_error
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.torch_group import join_default_group
from polyaccel.errors import CommError
from polyaccel.registry import PluginGroup, load_plugin

REGISTRARS = "torch.distributed.backends"
"""The entry-point group in which packages offer backends to torch."""


class TorchBackend(CommBackend):
    """A backend of torch.distributed. `name` is its name there."""

    library: ClassVar[str | None] = None
    """File in torch's lib folder that a built-in backend needs; None if it needs none or is a module."""
    modules: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Modules whose import adds the backend to torch, by torch's name of the device; empty if torch has it."""
    device: ClassVar[str | None] = None
    """Plugin name of the accelerator that the library needs; None if it needs none, or with `modules`."""

    @classmethod
    def probe(cls) -> Probe:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return Probe(False, "torch is not installed")
        packages = {module.partition(".")[0] for module in cls.modules.values()}
        if packages and not any(map(find_spec, packages)):
            return Probe(False, f"{' or '.join(sorted(packages))} is not installed")
        library = Path(spec.origin).parent / "lib" / cls.library if cls.library else None
        if library is not None and not library.exists():
            return Probe(False, f"this torch is built without {cls.name} (no {library.name})")
        return cls.probe_device(f"torch.distributed with {cls.name}")

    @classmethod
    def probe_device(cls, library: str) -> Probe:
        """Probe the device that an installed library needs: torch's builds for GPUs run on hosts without any too.

        Args:
            library: Description of the library, which is the reason of a usable probe.

        Returns:
            The probe.
        """
        if cls.device is not None:
            plugin: type[Accelerator] = load_plugin(
                PluginGroup.ACCELERATORS, cls.device, Accelerator, Accelerator.API_VERSION
            )
            present = plugin.probe()
            if not present.usable:
                return Probe(False, f"it needs accelerator {cls.device!r}: {present.reason}")
        return Probe(True, library)

    @classmethod
    def named(cls, name: str) -> type[CommBackend] | None:
        """Return a backend that torch has under this name, or would have by an entry point of REGISTRARS.

        A package registers its backend when it is imported (`Backend.register_backend`), or by the entry point, a
        function without arguments. Neither torch nor the package is imported here.

        Args:
            name: torch's name of the backend.

        Returns:
            A class of that name; None where there is none.
        """
        dist: Any = sys.modules.get("torch.distributed")
        is_known = dist is not None and dist.is_available() and name in dist.Backend.backend_list
        registrars = metadata.entry_points(group=REGISTRARS, name=name)
        if not is_known and not registrars:
            return None
        members = {"name": name, "registrar": next(iter(registrars), None), "__doc__": OutOfTreeBackend.__doc__}
        return type("OutOfTreeBackend", (OutOfTreeBackend,), members)

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        probe = self.probe()
        if not probe.usable:
            raise unusable_error(self.name, probe.reason)
        self.register(accelerator)
        deadline = rendezvous.deadline(timeout_s)
        device = accelerator.current_device().index

        def enter() -> None:
            if device is not None:
                accelerator.set_device(device)

        join_default_group(self.name, rendezvous, deadline, enter)
        if rendezvous.world_size == 1:
            return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
        # These import torch, which this module must not.
        from polyaccel.comm.backends.torch.communicator import new_group
        from polyaccel.comm.backends.torch.device import DeviceCommunicator
        from polyaccel.comm.backends.torch.exchange import ExchangeCommunicator
        from polyaccel.comm.wrappers.staged import StagedCommunicator

        ranks = tuple(range(rendezvous.world_size))
        is_staged = self.name == "gloo" and accelerator.torch_device_type != "cpu"
        worker = host_accelerator(accelerator) if is_staged else accelerator
        kind = ExchangeCommunicator if self.name == "gloo" else DeviceCommunicator

        def make() -> Any:
            enter()
            return new_group(ranks, self.name, timeout_s)

        group = deadline.run(f"the group of all ranks over {self.name}", make)
        if group is None:
            raise CommError(f"rank {rendezvous.rank} is not in its own world {ranks}", value=ranks)
        communicator = kind(group, ranks, worker, self.name, timeout_s)
        return StagedCommunicator(communicator, accelerator) if is_staged else communicator

    def register(self, accelerator: Accelerator) -> None:
        """Register the backend with torch, if torch lacks it.

        Args:
            accelerator: Device of the buffers that will be sent.

        Raises:
            CommError: The backend cannot be registered, or does not read the accelerator's memory.
        """
        devices = (self.device,) if self.device is not None else tuple(self.modules)
        device = accelerator.torch_device_type or accelerator.name
        if devices and device not in devices:
            raise CommError(
                f"comm backend {self.name!r} is for {' and '.join(devices)}, not for {accelerator.name}",
                hint="choose another one: POLYACCEL_COMM or init_distributed(dist_backend=...)",
                value=accelerator.name,
            )
        if self.modules:
            import_module(self.modules[device])


class GlooBackend(TorchBackend):
    """Host memory over TCP: torch's messages, of which `exchange` composes the collectives."""

    name: ClassVar[str] = "gloo"

    def connect_apart(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        from polyaccel.comm.backends.torch.apart import connect_apart  # it imports torch

        return connect_apart(rendezvous, accelerator, timeout_s)


class NcclBackend(TorchBackend):
    """NVIDIA's library (and RCCL under the same name)."""

    name: ClassVar[str] = "nccl"
    library: ClassVar[str | None] = "libtorch_cuda.so"
    device: ClassVar[str | None] = "cuda"

    @classmethod
    def probe(cls) -> Probe:
        probe = super().probe()
        spec = find_spec("torch")
        if probe.usable or spec is None or spec.origin is None:
            return probe
        rocm = Path(spec.origin).parent / "lib" / "libtorch_hip.so"
        return cls.probe_device("torch.distributed with rccl") if rocm.exists() else probe


class XcclBackend(TorchBackend):
    """Intel GPUs, native in torch. Not run on hardware."""

    name: ClassVar[str] = "xccl"
    library: ClassVar[str | None] = "libtorch_xpu.so"
    device: ClassVar[str | None] = "xpu"


class HcclBackend(TorchBackend):
    """Two libraries of one name: Ascend's for `npu`, Gaudi's for `hpu`. Not run on hardware."""

    name: ClassVar[str] = "hccl"
    modules: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"npu": "torch_npu", "hpu": "habana_frameworks.torch.distributed.hccl"}
    )


class OutOfTreeBackend(TorchBackend):
    """A backend that another package registers with torch, when it is imported or by its entry point."""

    registrar: ClassVar[metadata.EntryPoint | None] = None

    def register(self, accelerator: Accelerator) -> None:
        import torch.distributed as dist

        known = dist.Backend.backend_list
        if self.registrar is None or self.name in known:
            return
        # Younger versions of torch do this themselves when the name is first used.
        try:
            self.registrar.load()()
        except Exception as error:
            raise CommError(
                f"{self.registrar.value} could not register backend {self.name!r}: {type(error).__name__}: {error}",
                hint=f"it is the entry point of a package, in group {REGISTRARS!r}: repair or uninstall that",
                value=self.registrar.value,
            ) from error
        if self.name not in known:
            raise CommError(
                f"{self.registrar.value} registered no backend {self.name!r} with torch, which has {known}",
                hint="the entry point's name is the backend's, in lower case",
                value=self.name,
            )
