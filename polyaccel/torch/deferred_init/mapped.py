"""Tensors that lie in mapped files: values that are not read yet.

Loaders like safetensors' map a file instead of reading it, and the system reads a page of it when it is used. So a
parameter that was loaded and not touched since costs no memory, and who copies a block of it reads that block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from polyaccel.torch.deferred_init.log import SMALL_NUMEL

_MAPS = Path("/proc/self/maps")
_SAMPLES = 2
_SAMPLE_NBYTES = 256
_JOINING = (torch.ops.aten.cat, torch.ops.aten.stack)


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    name: str


class MappedFiles:
    """The files that are mapped into this process, each mapping its own, as Linux lists them now. No files
    elsewhere."""

    def __init__(self) -> None:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines() if _MAPS.exists() else []
        self._mappings = [mapping for line in lines if (mapping := _parsed(line)) is not None]
        self._starts = [mapping.start for mapping in self._mappings]

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor`, which has memory, lies in a file."""
        return self._mapping_of(tensor) is not None

    def description(self, tensor: Tensor) -> list[Any] | None:
        """Describe the loaded values by file, place, writes and digest, to compare ranks; None if in no file."""
        mapping = self._mapping_of(tensor)
        if mapping is None or not tensor.is_contiguous():
            return None
        offset = tensor.data_ptr() - mapping.start + mapping.offset
        return [mapping.name, offset, tensor.nbytes, tensor._version, _digest(tensor)]

    def _mapping_of(self, tensor: Tensor) -> _Mapping | None:
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # also that of a tensor without values, which reports the CPU
            return None
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        at = bisect_right(self._starts, first) - 1
        return self._mappings[at] if at >= 0 and last <= self._mappings[at].end else None


def _parsed(line: str) -> _Mapping | None:
    """The mapping of a line of `/proc/self/maps`; None for one that is not a file's, or that others see written to."""
    span, access, offset, _, inode, *path = line.split(maxsplit=5)
    if inode == "0" or access[3:4] != "p" or not path or not path[0].startswith("/"):
        return None
    start, _, end = span.partition("-")
    return _Mapping(int(start, 16), int(end, 16), int(offset, 16), Path(path[0]).name)


def _digest(tensor: Tensor) -> bytes:
    """Digest a few bytes in the middle and at the end: checkpoints of one model differ in all of them."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    ends = [flat.numel() * number // _SAMPLES for number in range(1, _SAMPLES + 1)]
    taken = [flat[max(0, end - _SAMPLE_NBYTES) : end] for end in ends]
    return blake2b(torch.cat(taken).numpy().tobytes(), digest_size=16).digest()


def joins_files(function: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """Whether the call makes one large tensor of several that lie in files, as loaders do that fuse weights."""
    if function.overloadpacket not in _JOINING or sum(tensor.numel() for tensor in tensors) <= SMALL_NUMEL:
        return False
    files = MappedFiles()
    return all(files.has(tensor) for tensor in tensors)
