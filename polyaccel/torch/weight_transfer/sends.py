"""`engine.send_weights`: the weights of this step for an inference server, while training continues."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

import torch
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.core.mesh import Mesh
from polyaccel.errors import PolyaccelError
from polyaccel.observability.timing import OUTSIDE, PhaseTimer
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.torch.weight_transfer.failures import packed, unpacked
from polyaccel.torch.weight_transfer.folder import FolderSender
from polyaccel.torch.weight_transfer.groups import GroupTransfer
from polyaccel.torch.weight_transfer.held_groups import SenderGroups
from polyaccel.torch.weight_transfer.manifest import Manifest
from polyaccel.torch.weight_transfer.receiver import SCHEME, TCP
from polyaccel.torch.weight_transfer.sender import SharedMemorySender
from polyaccel.torch.weight_transfer.source import WeightSource, active_adapter
from polyaccel.zero.engine import ZeroEngine

log = getLogger(__name__)
_FILE_NBYTES = 5 * 10**9
_SEGMENT_NBYTES = 4 << 20
"""Two of them stay in a processor's cache."""
_MESSAGE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class SentWeights:
    """A transfer that every receiver has confirmed.

    Attributes:
        version: Number of the weights.
        tensors: Number of tensors.
        nbytes: Bytes of all tensors.
        buckets: Buckets over shared memory, or files in a folder.
    """

    version: int
    tensors: int
    nbytes: int
    buckets: int


class SendsWeights:
    """The part of an engine that sends its weights."""

    zero: ZeroEngine
    adapter: TorchAdapter
    communicator: Communicator
    mesh: Mesh
    timer: PhaseTimer

    @property
    @abstractmethod
    def global_steps(self) -> int:
        """Updates since the start."""

    @property
    @abstractmethod
    def _own_module(self) -> nn.Module:
        """The user's module."""

    def send_weights(
        self,
        destination: str | os.PathLike[str] | Sequence[str],
        *,
        dtype: torch.dtype | None = None,
        adapters_only: bool = False,
        version: int | None = None,
        bucket_nbytes: int | None = None,
        timeout_s: float = 60.0,
    ) -> SentWeights:
        """Send the weights of this step to inference servers, or write them for one. Collective. Rank 0 sends; over
        `tcp://` each rank sends what it owns.

        Names and whole shapes are the model's own at every stage and with tensor ranks; tied parameters are sent once.
        No rank holds the whole model: sharded parameters are gathered bucket by bucket. Each tensor has a digest, which
        `WeightReceiver` and `read_weights` compare. A transfer that fails leaves the engine as it was, and training can
        continue.

        Args:
            destination: `unix:PATH`, the address of a `WeightReceiver` on the host of rank 0; `tcp://HOST:PORT`, that
                of one on any host; a sequence of either; or else a new folder, which gets safetensors files in the
                layout of Hugging Face.
            dtype: Type of floating tensors. None sends each in the type that the module computes with.
            adapters_only: Send the active adapter of PEFT alone, under the names of its files.
            version: Number of the weights. None takes the engine's steps.
            bucket_nbytes: Size of each of two buckets (4 MiB), or most bytes of a file (5 GB).
            timeout_s: Longest wait for a receiver to take a bucket.

        Returns:
            What was sent.

        Raises:
            PolyaccelError: On every rank: the receiver refused the weights, and the message has its reason. The module
                is spread over pipeline stages, or has no adapter.
            CommError: On every rank: there is no receiver, or it has gone.
            CommTimeout: On every rank: the receiver did not take a bucket in time.
            CheckpointError: On every rank: the folder is not new, or cannot be written.

        Example:
            ```python
            engine.send_weights("unix:/tmp/policy.sock", dtype=torch.bfloat16)
            ```
        """
        if self.mesh.has_several("pipe"):
            stages = self.mesh.size_of(("pipe",))
            raise PolyaccelError(f"weights are not sent by {stages} pipeline stages", hint="use ZeRO-3", value=stages)
        if bucket_nbytes is not None and bucket_nbytes < 1:
            raise PolyaccelError(f"no size of a bucket: {bucket_nbytes}", hint="use bytes", value=bucket_nbytes)
        adapter_name = active_adapter(self._own_module) if adapters_only else None
        with self.timer(OUTSIDE):
            self.adapter.require_nothing_away()
            self.zero.consistency.require()
            self.adapter.adopt_changes()
            source = WeightSource(self.adapter, self.zero, dtype=dtype, adapter_name=adapter_name)
            number = self.global_steps if version is None else version
            manifest = Manifest(source.infos, number, adapters_only)
            if receivers := addresses_of(destination, TCP):
                groups = GroupTransfer(self.communicator, manifest, receivers, timeout_s, self._weight_groups)
                try:
                    count = groups.send(source, bucket_nbytes or _MESSAGE_NBYTES)
                finally:
                    groups.close()
                return SentWeights(number, len(manifest.tensors), manifest.nbytes, count)
            transfer = _Transfer(self.communicator, manifest)
            try:
                if self.communicator.rank == 0:
                    transfer.open(destination, bucket_nbytes, timeout_s, self._own_module)
                transfer.agree()  # before anything is gathered: most failures are a receiver that is not there
                for place, value in source.values():
                    transfer.add(place, value)
                    if transfer.has_failed and not source.is_collective:
                        break
                transfer.finish()
                return transfer.agree()
            finally:
                transfer.close()

    @property
    def _weight_groups(self) -> SenderGroups:
        """This rank's groups with receivers, which `leave_receivers` leaves."""
        held: SenderGroups = self.__dict__.setdefault("_held_weight_groups", SenderGroups())
        return held

    def leave_receivers(self) -> None:
        """Leave the groups with receivers of `tcp://`, which are held from one transfer to the next."""
        self._weight_groups.close()


class _Transfer:
    """A transfer on every rank. A failure on rank 0 is kept until all ranks raise it."""

    def __init__(self, communicator: Communicator, manifest: Manifest) -> None:
        self._communicator, self._manifest = communicator, manifest
        self._sender: SharedMemorySender | FolderSender | None = None
        self._failure: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def open(
        self,
        destination: str | os.PathLike[str] | Sequence[str],
        bucket_nbytes: int | None,
        timeout_s: float,
        module: nn.Module,
    ) -> None:
        """Reach the receivers, or make the folder."""
        try:
            addresses = addresses_of(destination, SCHEME)
            if addresses:
                nbytes = min(bucket_nbytes or _SEGMENT_NBYTES, max(self._manifest.nbytes * 2, 1 << 12))
                self._sender = SharedMemorySender(addresses, self._manifest, nbytes, timeout_s)
            else:
                assert isinstance(destination, str | os.PathLike)  # other ones have addresses
                self._sender = FolderSender(Path(destination), self._manifest, bucket_nbytes or _FILE_NBYTES, module)
        except Exception as error:  # every rank raises it
            self._failure = error

    def add(self, place: int, value: torch.Tensor) -> None:
        """Send a tensor, unless the transfer has failed."""
        if self._sender is None or self._failure is not None:
            return
        try:
            self._sender.add(place, value, self._manifest.tensors[place].dtype)
        except Exception as error:  # every rank raises it, after the collectives of the others
            self._failed(error)

    def finish(self) -> None:
        """Wait until the receivers have all."""
        if self._sender is None or self._failure is not None:
            return
        try:
            self._sender.finish()
        except Exception as error:  # every rank raises it
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._failure = error
        assert self._sender is not None  # it has failed
        self._sender.abort(str(error))

    def agree(self) -> SentWeights:
        """Return what was sent so far. Collective; raises what failed on rank 0 on every rank."""
        failure = self._failure
        buckets = 0 if self._sender is None else self._sender.buckets
        mine = None if failure is None else packed(failure)
        found, buckets = self._communicator.broadcast_object((mine, buckets))
        if found is None:
            return SentWeights(self._manifest.version, len(self._manifest.tensors), self._manifest.nbytes, buckets)
        raise unpacked(found) from failure

    def close(self) -> None:
        """Close connections and files."""
        if self._sender is not None:
            self._sender.close()


def addresses_of(destination: str | os.PathLike[str] | Sequence[str], scheme: str) -> list[str]:
    """Return what follows `scheme` in the addresses of `destination`; nothing for another kind of destination. Raises
    PolyaccelError for a mixture, and for the same address twice: a receiver takes one connection at a time."""
    several = [destination] if isinstance(destination, str | os.PathLike) else [*destination]
    named = [str(one).removeprefix(scheme) for one in several if isinstance(one, str) and one.startswith(scheme)]
    schemes = {next((known for known in (SCHEME, TCP) if str(one).startswith(known)), "") for one in several}
    if len(schemes) != 1 or ("" in schemes and not isinstance(destination, str | os.PathLike)):
        raise PolyaccelError(
            f"no destination of weights: {destination!r}",
            hint="name unix:PATH or tcp://HOST:PORT of a receiver, several of one kind, or one folder",
            value=str(destination),
        )
    if twice := [one for one, times in Counter(named).items() if times > 1]:
        hint = "name each receiver once"
        raise PolyaccelError(f"weights to one receiver twice: {twice[0]!r}", hint=hint, value=str(destination))
    return named
