"""The backends that torch brings along: gloo, nccl, xccl and hccl. Light to import; torch is loaded when connecting.

[Note: Two process groups]
Scripts use `torch.distributed` beside us (a DistributedSampler asks it for the rank), so its default group always
exists afterwards: the one that the script made is adopted, else we make it. Our collectives run on a second group of
all ranks, which has our time limit and in which no call of the script can stand between ours.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.base import CommBackend, Communicator, Rendezvous
from polyaccel.comm.single import SingleCommunicator
from polyaccel.errors import CommError, CommTimeout


def initialized_world() -> tuple[int, int] | None:
    """(rank, world size) of torch's default group if the script made one; imports nothing."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


class TorchBackend(CommBackend):
    """A backend of torch.distributed, by its name there."""

    library: ClassVar[str | None] = None
    """A file in torch's lib folder without which the backend is not built in; None if it always is or is a module."""
    module: ClassVar[str | None] = None
    """A module whose import adds the backend to torch."""

    @classmethod
    def probe(cls) -> Probe:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return Probe(False, "torch is not installed")
        if cls.module is not None and find_spec(cls.module) is None:
            return Probe(False, f"{cls.module} is not installed")
        library = Path(spec.origin).parent / "lib" / cls.library if cls.library else None
        if library is not None and not library.exists():
            return Probe(False, f"this torch is built without {cls.name} (no {library.name})")
        return Probe(True, f"torch.distributed with {cls.name}")

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        probe = self.probe()
        if not probe.usable:
            raise CommError(
                f"comm backend {self.name!r} cannot be used: {probe.reason}",
                cure="choose another one: POLYACCEL_COMM or init_distributed(dist_backend=...)",
                value=self.name,
            )
        join_default_group(type(self), rendezvous, timeout_s)
        if rendezvous.world_size == 1:
            return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
        # Both import torch, which this module must not.
        from polyaccel.comm.torch_communicator import TorchCommunicator, new_group
        from polyaccel.comm.torch_exchange import ExchangeCommunicator

        ranks = tuple(range(rendezvous.world_size))
        on_host = self.name == "gloo" and accelerator.current_device().type == "cpu"
        kind = ExchangeCommunicator if on_host else TorchCommunicator
        group = new_group(ranks, self.name, timeout_s)
        if group is None:
            raise CommError(f"rank {rendezvous.rank} is not in its own world {ranks}", value=ranks)
        return kind(group, ranks, accelerator, self.name, timeout_s)


def join_default_group(backend: type[TorchBackend], rendezvous: Rendezvous, timeout_s: float) -> None:
    """Make torch's default group over `backend`, or adopt the script's. Nothing happens for one process without one."""
    adopted = initialized_world()
    if rendezvous.world_size == 1 and adopted is None:
        return
    if backend.module is not None:
        import_module(backend.module)
    if adopted is None:
        _make_default_group(backend.name, rendezvous, timeout_s)
    elif adopted != (rendezvous.rank, rendezvous.world_size):
        raise CommError(
            f"torch.distributed is initialised as rank {adopted[0]} of {adopted[1]}, "
            f"but {rendezvous.source} says rank {rendezvous.rank} of {rendezvous.world_size}",
            cure="let both come from the same launcher, or drop your own init_process_group",
            value=adopted,
        )


def exchange_notes(topic: str, rank: int, world_size: int, text: str, timeout_s: float) -> list[str]:
    """Every rank's `text` for `topic`, in rank order, through the store where the default group met.

    Raises CommTimeout, naming them, when ranks post none within `timeout_s`.
    """
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    keys = [f"polyaccel/{topic}/{peer}" for peer in range(world_size)]
    try:
        store.set(keys[rank], text)
        store.wait(keys, timedelta(seconds=timeout_s))
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise CommTimeout(
            f"ranks {missing} did not say within {timeout_s:g} s how they are reached ({topic})",
            missing_ranks=missing,
            cure="all ranks must use the same backend; look for the first error among them",
            value=tuple(missing),
        ) from error


def _make_default_group(name: str, rendezvous: Rendezvous, timeout_s: float) -> None:
    import torch.distributed as dist

    where = rendezvous.init_method or f"tcp://{rendezvous.address}:{rendezvous.port}"
    try:
        dist.init_process_group(
            name,
            init_method=where,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        message = (
            f"rank {rendezvous.rank} could not meet the other {rendezvous.world_size - 1} ranks "
            f"at {where} ({rendezvous.source}) within {timeout_s:g} s: {reason}"
        )
        cure = "check that all ranks were started, with the same address and port, and that the port is free"
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        raise (CommTimeout if late else CommError)(message, cure=cure, value=where) from error


class GlooBackend(TorchBackend):
    """Host memory over TCP. See `torch_exchange` for what we do ourselves."""

    name: ClassVar[str] = "gloo"


class NcclBackend(TorchBackend):
    """NVIDIA's library (and RCCL under the same name)."""

    name: ClassVar[str] = "nccl"
    library: ClassVar[str | None] = "libtorch_cuda.so"

    @classmethod
    def probe(cls) -> Probe:
        probe = super().probe()
        spec = find_spec("torch")
        if probe.usable or spec is None or spec.origin is None:
            return probe
        rocm = Path(spec.origin).parent / "lib" / "libtorch_hip.so"
        return Probe(True, "torch.distributed with rccl") if rocm.exists() else probe


class XcclBackend(TorchBackend):
    """Intel GPUs, native in torch. Not run on hardware."""

    name: ClassVar[str] = "xccl"
    library: ClassVar[str | None] = "libtorch_xpu.so"


class HcclBackend(TorchBackend):
    """Ascend NPUs through torch_npu. Not run on hardware."""

    name: ClassVar[str] = "hccl"
    module: ClassVar[str | None] = "torch_npu"
