"""Loading: find a complete checkpoint, then assemble any range of any tensor from its pieces, verified."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from polyaccel.checkpoint.collective_call import barrier, on_rank_0, run_on_all
from polyaccel.checkpoint.format.commit import Commit, check_tag, read_commit, read_latest, read_manifest, tag_names
from polyaccel.checkpoint.format.extents import Extent, ExtentTable, FileLocations
from polyaccel.checkpoint.format.manifest import Manifest
from polyaccel.checkpoint.format.recognition import recognise, recognise_file
from polyaccel.checkpoint.format.tensors import Piece, TensorEntry
from polyaccel.checkpoint.load.cooperative.blobs import SavedBlobs
from polyaccel.checkpoint.load.cooperative.reading import CooperativeReader
from polyaccel.checkpoint.load.cooperative.windows import MemoryGroups
from polyaccel.checkpoint.load.per_node import select_checkpoint
from polyaccel.checkpoint.save.async_client import settle
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.file import as_storage
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

_log = logging.getLogger(__name__)
_Elements = npt.NDArray[np.void]
"""Elements that are moved and not computed with."""


@dataclass(frozen=True, slots=True)
class TagStatus:
    """A tag, and the problem that keeps it from being loaded, if it is not empty.

    `saved_at_s` is seconds since 1970 by the saving rank's clock, 0 where no marker has it.
    """

    tag: str
    saved_at_s: float
    problem: str = ""
    not_finite: str = ""
    """The first parameter with a value that is not finite, of a tag that can be loaded and should not be."""

    @property
    def is_good(self) -> bool:
        """Whether a run may continue from here."""
        return not self.problem and not self.not_finite


class CheckpointReader:
    """The complete checkpoint that `commit` names, for reading. Holds no file open."""

    def __init__(
        self, storage: Storage, commit: Commit, manifest: Manifest, locations: FileLocations | None = None
    ) -> None:
        self.storage = storage
        self.commit = commit
        self._manifest = manifest
        self._locations = locations
        self._verified: set[Piece] = set()
        self._together: CooperativeReader | None = None
        self._blobs = SavedBlobs(manifest, self._read_alone)

    @property
    def tag(self) -> str:
        return self.commit.tag

    @property
    def world_size(self) -> int:
        """How many ranks saved it. Tensors do not depend on it, `rank_blobs` do."""
        return self._manifest.world_size

    @property
    def scalars(self) -> dict[str, Any]:
        """The plain values that were saved with the tensors."""
        return self._manifest.scalars

    @property
    def about(self) -> dict[str, Any]:
        """What is recorded of the run that saved."""
        return self._manifest.about

    @property
    def not_finite(self) -> str:
        """The first parameter with a value that is not finite; empty where there is none."""
        return self._manifest.not_finite

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Every tensor, sorted by name and kind."""
        return self._manifest.tensors

    def has(self, fqn: str, kind: str) -> bool:
        return (fqn, kind) in self._manifest.by_name

    def tensor(self, fqn: str, kind: str) -> TensorEntry:
        """One tensor. Raises CheckpointError, with the nearest names, if it was not saved."""
        try:
            return self._manifest.by_name[fqn, kind]
        except KeyError:
            raise CheckpointError(
                f"{self.commit.tag!r} holds no {kind!r} of {fqn!r}", hint=self._suggest(fqn), value=(fqn, kind)
            ) from None

    def verify(self, fqn: str, kind: str, start: int, length: int, dtype: DType, *, block: Block | None = None) -> None:
        """Read and verify every piece that elements [start, start + length) of the flattened `block` of a tensor touch
        (None: of the whole tensor), each once in the life of this reader; they will be read as `dtype`. Memory is that
        of a piece.

        Inside `together` the pieces are only noted, for all ranks to read them. Raises CheckpointError naming file,
        tensor and elements.
        """
        tensor = self.tensor(fqn, kind)
        self._check_range(tensor, block, start, length)
        self._check_dtype(tensor, dtype, may_cast=True)
        for piece, _ in tensor.touched(block, start, length):
            if self._together is not None:
                self._together.request(Extent.of_piece(tensor, piece))
            elif piece not in self._verified:
                self._read_piece(tensor, piece)
                self._verified.add(piece)

    def read_into(
        self,
        fqn: str,
        kind: str,
        start: int,
        length: int,
        buffer: Buffer,
        *,
        block: Block | None = None,
        cast_through: Callable[[int, DType], Buffer] | None = None,
    ) -> None:
        """Overwrite `buffer`, of `length` elements, with elements [start, start + length) of the flattened `block` of a
        tensor (None: of the whole tensor).

        Every piece that the range touches is read whole and verified before any of it reaches `buffer`. A buffer of
        another element type than the stored one is refused, unless `cast_through` allocates (numel, dtype) buffers
        through which to convert. Raises CheckpointError naming file, tensor and elements; `buffer` may then have been
        filled in part.
        """
        tensor = self.tensor(fqn, kind)
        self._check_request(tensor, block, start, length, buffer, may_cast=cast_through is not None)
        through = None if buffer.dtype is tensor.dtype else cast_through
        if block is None and not tensor.is_cut:
            for piece, (copy,) in tensor.touched(None, start, length):
                data = memoryview(self._read_piece(tensor, piece))
                size = tensor.dtype.itemsize
                wanted = data[copy.source_offset * size : (copy.source_offset + copy.lengths[0]) * size]
                _fill(buffer.view(copy.target_offset, copy.lengths[0]), wanted, tensor.dtype, through)
            return
        run: _Elements = np.empty(length, f"V{tensor.dtype.itemsize}")
        for piece, copies in tensor.touched(block, start, length):
            stored = np.frombuffer(self._read_piece(tensor, piece), run.dtype)
            for copy in copies:
                source = _strided(stored, copy.source_offset, copy.lengths, copy.source_strides)
                _strided(run, copy.target_offset, copy.lengths, copy.target_strides)[...] = source
        _fill(buffer, run.view(np.uint8).data, tensor.dtype, through)

    def is_elsewhere(self, file: str) -> bool:
        """Whether a file of the save is on other hosts and not here, where each host has its own part."""
        return file in self._manifest.held and self.storage.size(f"{self.commit.folder}/{file}") is None

    def rank_blobs(self, rank: int) -> dict[str, bytes]:
        """The bytes that rank `rank` of the saving ranks saved for itself, by name, verified."""
        return self._blobs.of_rank(rank)

    def owned_blobs(self) -> dict[str, bytes]:
        """The bytes that one rank saved for all, under names that begin with `OWNED`, verified."""
        return self._blobs.owned()

    @contextmanager
    def together(
        self, communicator: Communicator, step: str, *, most_nbytes: int | None = None
    ) -> Iterator[CooperativeReader]:
        """All ranks of `communicator`, which opened the same save, read it together: each byte range once per host.

        Blobs of rank 0, of this rank and those of `OWNED` are read at once. In the block `verify` notes what this rank
        will read, then `CooperativeReader.verify` reads it, then `read_into` is for `CooperativeReader.load`.
        Collective. `most_nbytes` is as there. Raises CheckpointError on every rank, naming `step`.
        """
        where = self._locations or FileLocations.shared(communicator.world_size)
        groups = MemoryGroups.found(communicator, where.places)
        try:
            folder = self.commit.folder
            self._blobs.read_together(communicator, self.storage, folder, where, groups, step)
            table = ExtentTable.of_tensors(self._manifest)
            with CooperativeReader(communicator, self.storage, folder, table, where, groups, most_nbytes) as reading:
                self._together = reading
                yield reading
        finally:
            self._together = None
            groups.close()

    def _read_piece(self, tensor: TensorEntry, piece: Piece) -> bytes | memoryview:
        extent = Extent.of_piece(tensor, piece)
        if self._together is not None and self._together.is_wanted(extent):
            return self._together.read(extent)
        return self._read_alone(extent)

    def _read_alone(self, extent: Extent) -> bytes:
        if self.is_elsewhere(extent.file):
            path = f"{self.commit.folder}/{extent.file}"
            where = " or ".join(name for _, name in self._manifest.held[extent.file])
            raise CheckpointError(
                f"{path} is not in {self.storage.location}: each host has its own part of {self.tag!r}",
                hint=f"copy it here from {where}, or load on the hosts that saved",
                value=path,
            )
        return extent.read(self.storage, self.commit.folder)

    def _check_range(self, tensor: TensorEntry, block: Block | None, start: int, length: int) -> None:
        if block is not None and block.shape != tensor.shape:
            raise CheckpointError(
                f"a block of a tensor of {block.shape} is not a part of {tensor.fqn!r} ({tensor.kind}), saved with "
                f"shape {tensor.shape}",
                hint="load into a model of the same shapes",
                value=block.shape,
            )
        if not 0 <= start <= start + length <= (tensor.numel if block is None else block.numel):
            raise CheckpointError(
                f"elements [{start}, {start + length}) are not inside {tensor.fqn!r} ({tensor.kind}), "
                f"saved with shape {tensor.shape}",
                hint="load into a model of the same shapes",
                value=(start, length),
            )

    def _check_request(
        self, tensor: TensorEntry, block: Block | None, start: int, length: int, buffer: Buffer, *, may_cast: bool
    ) -> None:
        name = f"{tensor.fqn!r} ({tensor.kind})"
        self._check_range(tensor, block, start, length)
        if buffer.numel != length:
            raise CheckpointError(f"{length} elements of {name} do not fit a buffer of {buffer.numel}", value=length)
        self._check_dtype(tensor, buffer.dtype, may_cast=may_cast)

    def _check_dtype(self, tensor: TensorEntry, dtype: DType, *, may_cast: bool) -> None:
        if dtype is tensor.dtype:
            return
        hint = "load into a model with the same types"
        if dtype.is_floating == tensor.dtype.is_floating:
            if may_cast:
                return
            hint = "load with the same precision, or ask for the conversion with cast_through=accelerator.allocate"
        raise CheckpointError(
            f"{tensor.fqn!r} ({tensor.kind}) was saved as {tensor.dtype.value}, the buffer is {dtype.value}",
            hint=hint,
            value=tensor.dtype,
        )

    def _suggest(self, fqn: str) -> str:
        kinds = [kind for name, kind in self._manifest.by_name if name == fqn]
        if kinds:
            return f"of this tensor it holds {', '.join(kinds)}"
        names = sorted({name for name, _ in self._manifest.by_name})
        near = difflib.get_close_matches(fqn, names, n=3) or names[:3]
        return f"it holds {len(names)} tensors, such as {', '.join(near)}" if near else "it holds no tensors at all"


def open_checkpoint(
    source: Storage | str | os.PathLike[str],
    tag: str | None = None,
    *,
    communicator: Communicator | None = None,
    fallback: bool = False,
) -> CheckpointReader:
    """Open the checkpoint `tag`, or the one that `latest` names.

    With `communicator`, which then all ranks must give, rank 0 chooses and all ranks read the very same save. With
    `fallback` and no `tag`, the newest complete checkpoint is taken, with a warning in the log, when `latest` is
    missing or what it names is not complete. Where hosts have separate storages, all ranks choose together what they
    can have, and read by `CheckpointReader.together`.

    Raises CheckpointError, on all ranks, when the checkpoint is missing, incomplete or damaged; the message names the
    file and the tags that could be loaded instead.
    """
    settle()
    storage = as_storage(source)
    if communicator is None:
        return _choose(storage, tag, fallback)
    barrier(communicator, "open_checkpoint")
    if not storage.is_shared:
        chosen = select_checkpoint(storage, tag, communicator, fallback=fallback)
        return CheckpointReader(storage, chosen.commit, chosen.manifest, chosen.locations)
    readers: list[CheckpointReader] = []

    def choose() -> bytes:
        readers.append(_choose(storage, tag, fallback))
        return readers[0].commit.to_bytes()

    def follow() -> None:
        if not readers:
            readers.append(CheckpointReader(storage, commit, read_manifest(storage, commit)))

    marker = on_rank_0(communicator, "opening a checkpoint", choose)
    commit = Commit.from_bytes(marker, "the commit marker that rank 0 read")
    run_on_all(communicator, f"opening {commit.folder}", follow)
    return readers[0]


def list_checkpoints(source: Storage | str | os.PathLike[str]) -> tuple[TagStatus, ...]:
    """Every tag, newest first, and the problems that keep tags from being loaded. Reads manifests, but no tensors."""
    settle()
    storage = as_storage(source)
    found = [_status(storage, tag) for tag in tag_names(storage)]
    return tuple(sorted(found, key=lambda status: (status.saved_at_s, status.tag), reverse=True))


def _strided(memory: _Elements, offset: int, lengths: Sequence[int], strides: Sequence[int]) -> _Elements:
    """The array of `lengths` at `offset` in `memory`, which its corner and its strides, in elements, do not leave."""
    return as_strided(memory[offset:], lengths, [stride * memory.itemsize for stride in strides])


def _fill(target: Buffer, data: memoryview, dtype: DType, cast_through: Callable[[int, DType], Buffer] | None) -> None:
    """Overwrite `target` with `data` of `dtype`, converted through `cast_through` if given."""
    if cast_through is None:
        target.from_bytes(data)
        return
    stored = cast_through(target.numel, dtype)
    stored.from_bytes(data)
    target.copy_from(stored)


def _choose(storage: Storage, tag: str | None, fallback: bool) -> CheckpointReader:
    """Open the checkpoint that was asked for. Raises CheckpointError that lists those that could be opened instead."""
    try:
        wanted = read_latest(storage) if tag is None else check_tag(tag)
        if wanted is None:
            raise CheckpointError(f"there is no file 'latest' in {storage.location}", value=storage.location)
        return _open_tag(storage, wanted)
    except CheckpointError as error:
        if file := recognise_file(storage):
            raise file.error() from error
        tags = list_checkpoints(storage)
        complete = [status.tag for status in tags if status.is_good]
        if fallback and tag is None and complete:
            _log.warning("%s; loading %r, the newest complete checkpoint, instead", error.message, complete[0])
            return _open_tag(storage, complete[0])
        if not complete and (foreign := recognise(storage)):
            raise foreign.error() from error
        raise CheckpointError(
            f"{error.message}\n  {_inventory(storage, tags)}",
            hint=f"pass tag={complete[0]!r}, the newest that is complete" if complete else "check the directory",
            value=error.value,
        ) from error


def _open_tag(storage: Storage, tag: str) -> CheckpointReader:
    commit = read_commit(storage, tag)
    if commit is None:
        if foreign := recognise(storage, tag):
            raise foreign.error()
        what = "was never completed: it has no commit marker" if storage.names(tag) else "does not exist"
        raise CheckpointError(f"checkpoint {tag!r} in {storage.location} {what}", value=tag)
    if commit.tag != tag:
        raise CheckpointError(
            f"{tag!r} in {storage.location} holds the checkpoint {commit.tag!r}: the folder was renamed",
            hint=f"rename it back to {commit.tag!r}",
            value=tag,
        )
    return CheckpointReader(storage, commit, read_manifest(storage, commit))


def _status(storage: Storage, tag: str) -> TagStatus:
    saved_at_s = 0.0
    try:
        commit = read_commit(storage, tag)
        saved_at_s = commit.saved_at_s if commit else 0.0
        not_finite = _open_tag(storage, tag).not_finite
    except CheckpointError as error:
        return TagStatus(tag, saved_at_s, error.message)
    return TagStatus(tag, saved_at_s, not_finite=not_finite)


def _inventory(storage: Storage, tags: Sequence[TagStatus]) -> str:
    """A sentence that lists the checkpoints of a directory."""
    if not tags:
        return (
            f"{storage.location} holds no checkpoint" if storage.names() else f"{storage.location} is empty or missing"
        )
    complete = ", ".join(status.tag for status in tags if status.is_good) or "none"
    broken = ", ".join(status.tag for status in tags if status.problem)
    sick = ", ".join(status.tag for status in tags if status.not_finite)
    text = f"complete checkpoints there, newest first: {complete}"
    text += f"; not complete: {broken}" if broken else ""
    return text + (f"; of parameters that are not finite: {sick}" if sick else "")
