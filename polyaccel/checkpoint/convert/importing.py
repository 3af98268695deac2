"""Writing a checkpoint of tensors that come from elsewhere, so that an engine loads it like one that it saved.

[Note: Run values of an import]
A checkpoint has plain values in addition to its tensors (`polyaccel.engine.resume.SavedValues`). Weights alone say
nothing of a run: its counts are zero, its optimizer is unknown, and no parameter counts as trained, so that an engine
begins the optimizer states of each again. Where states come too, their parameters count as trained, with their updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from polyaccel.checkpoint import Commit, TensorPiece, save_checkpoint
from polyaccel.checkpoint.convert.elements import SourceBuffer
from polyaccel.checkpoint.format.imported import IMPORTED
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM
from polyaccel.comm.base import Communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

NO_LIMIT_S = 30 * 24 * 3600.0
"""The ranks are threads of this process, which end together; disks may be slow."""


@dataclass(frozen=True, slots=True)
class ImportTensor:
    """A tensor on its way in. `read(start, numel)` gives the bytes of elements of the flattened tensor."""

    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: DType
    read: Callable[[int, int], bytes]

    @classmethod
    def in_file(
        cls, fqn: str, shape: tuple[int, ...], dtype: DType, file: Path, offset: int, kind: str = PARAM
    ) -> ImportTensor:
        """A tensor that lies in a file from byte `offset` on."""

        def read(start: int, numel: int) -> bytes:
            with file.open("rb") as opened:
                opened.seek(offset + start * dtype.itemsize)
                data = opened.read(numel * dtype.itemsize)
            if len(data) != numel * dtype.itemsize:
                raise CheckpointError(f"{file} ends inside of {fqn!r}", hint="fetch it again", value=str(file))
            return data

        return cls(fqn, kind, shape, dtype, read)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something of the source that the checkpoint will not have, and why. `is_needed`: a run that continues would use
    it, as it would an optimizer state or a schedule."""

    name: str
    why: str
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class Incoming:
    """All that another tool saved, in the engine's words.

    `steps` has the number of updates of each parameter with optimizer states, `groups` the optimizer's groups without
    their parameters (None: unknown), `members` the names of those. See [Note: Imported optimizer states] in
    `polyaccel.checkpoint.format.imported` for the `family` and `positions`; `numbers` are states of one number a
    parameter.
    """

    tensors: Sequence[ImportTensor]
    steps: Mapping[str, int] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] | None = None
    members: Sequence[Sequence[str]] | None = None
    family: str | None = None
    positions: Sequence[int] | None = None
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    loss_scaler: Mapping[str, Any] = field(default_factory=dict)
    """As `LossScaler.state_dict` gives it; without one a dynamic scale begins at 65536."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    lr_scheduler: Mapping[str, Any] | None = None
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    """What the checkpoint has as bytes: a schedule's state that is not a plain value."""
    tied_weights: Mapping[str, str] = field(default_factory=dict)
    """The other names of tied parameters, each with the name of the tensor."""
    run: Mapping[str, Any] | None = None
    """The plain values of an engine's own checkpoint, in place of all of the above but tensors and blobs."""
    left_out: Sequence[LeftOut] = ()

    def weights(self) -> Incoming:
        """Parameters and buffers alone."""
        states = LeftOut("optimizer, schedule and counts", "--weights-only")
        kept = [tensor for tensor in self.tensors if tensor.kind in (PARAM, BUFFER)]
        left_out = [*self.left_out, states] if self.has_progress else self.left_out
        return Incoming(kept, tied_weights=self.tied_weights, left_out=left_out)

    @property
    def has_progress(self) -> bool:
        """Whether there is more than parameters and buffers."""
        return bool(self.steps or self.groups or self.counters or self.lr_scheduler or self.blobs or self.run)

    def scalars(self) -> dict[str, Any]:
        """The plain values of the checkpoint. See [Note: Run values of an import]."""
        if self.run is not None:
            return dict(self.run)
        counts = dict.fromkeys(("micro_steps", "global_steps", "global_samples", "skipped_steps"), 0)
        groups: dict[str, Any] | None = None
        if self.groups is not None:
            groups = {"param_groups": [dict(group) for group in self.groups]}
            if self.members is not None:
                groups["param_names"] = [[*names] for names in self.members]
        positions = None if self.positions is None else [*self.positions]
        return {
            "counters": {**counts, "gradient_accumulation_steps": 1, **self.counters},
            "loss_scaler": dict(self.loss_scaler) or {"loss_scale": 65536.0, "good_steps": 0, "tolerance": 1},
            "optimizer": groups,
            "optimizer_kind": None,
            IMPORTED: {"family": self.family, "positions": positions},
            "param_steps": dict(self.steps),
            "client_optimizer": {fqn: dict(numbers) for fqn, numbers in self.numbers.items()},
            "lr_scheduler": None if self.lr_scheduler is None else dict(self.lr_scheduler),
            "data": None,
            "client_state": dict(self.client_state),
            **({"tied_weights": dict(self.tied_weights)} if self.tied_weights else {}),
        }


def imported(incoming: Incoming, directory: str, tag: str, origin: str, progress: Callable[[int], None]) -> Commit:
    """Write `incoming` as the checkpoint `tag`, in 16 MiB next to its source; `about` records `origin`."""
    seen: set[tuple[str, str]] = set()
    for tensor in incoming.tensors:
        if (tensor.fqn, tensor.kind) in seen:
            raise CheckpointError(f"{tensor.fqn!r} ({tensor.kind}) comes twice", value=tensor.fqn)
        seen.add((tensor.fqn, tensor.kind))
    if not seen:
        raise CheckpointError(f"{origin} holds no tensor", hint="give the folder of a model", value=origin)

    def save(communicator: Communicator) -> Commit:
        return save_checkpoint(
            directory,
            tag,
            communicator=communicator,
            pieces=[_piece(tensor, progress) for tensor in incoming.tensors],
            scalars=incoming.scalars(),
            rank_blobs=dict(incoming.blobs),
            about={"imported_from": origin},
        )

    (commit,) = run_threads(1, save, timeout_s=NO_LIMIT_S)
    assert isinstance(commit, Commit)
    return commit


def _piece(tensor: ImportTensor, progress: Callable[[int], None]) -> TensorPiece:
    def read(start: int, numel: int) -> bytes:
        data = tensor.read(start, numel)
        progress(len(data))
        return data

    buffer = SourceBuffer(prod(tensor.shape), tensor.dtype, read)
    return TensorPiece(tensor.fqn, tensor.kind, tensor.shape, tensor.dtype, 0, buffer)
