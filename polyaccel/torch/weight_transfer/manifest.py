"""The manifest of a weight transfer: names, types and shapes of all tensors, in the order in which they are sent."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyaccel.accelerators.memory.torch import dtype_of, torch_dtype
from polyaccel.checkpoint.format.pieces import SAFETENSORS_TYPES
from polyaccel.errors import CommError

PROTOCOL = 1
"""Version of the messages and of the file of digests. See docs/reference/weight_transfer.md."""
_DTYPES = {name: torch_dtype(dtype) for dtype, name in SAFETENSORS_TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a weight transfer.

    Attributes:
        name: The model's own name.
        dtype: Type of the elements that are sent.
        shape: Whole shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def type_name(self) -> str:
        """What safetensors calls the type. Raises ShardingError for a type without a name there."""
        return SAFETENSORS_TYPES[dtype_of(self.dtype)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a weight transfer.

    Attributes:
        tensors: The tensors, in order.
        version: Number of the weights, by default the engine's steps.
        is_adapter: Whether the tensors are a PEFT adapter alone, under the names of its files.
    """

    tensors: tuple[TensorInfo, ...]
    version: int
    is_adapter: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors)

    def head(self) -> dict[str, Any]:
        """Return the values of a message, without tensors."""
        return {"protocol": PROTOCOL, "version": self.version, "adapter": self.is_adapter}

    def encoded_tensors(self) -> bytes:
        """Return the tensors as JSON."""
        return json.dumps([[info.name, info.type_name, list(info.shape)] for info in self.tensors]).encode()


def parse_manifest(head: dict[str, Any], tensors: Sequence[Any]) -> Manifest:
    """Return the manifest of a message. Raises CommError if it is malformed or of another protocol."""
    if head.get("protocol") != PROTOCOL:
        raise CommError(
            f"weight transfer of another protocol: {head.get('protocol')}, here {PROTOCOL}",
            hint="use the same version of polyaccel on both sides",
            value=head.get("protocol"),
        )
    try:
        infos = tuple(TensorInfo(str(name), _DTYPES[kind], tuple(map(int, shape))) for name, kind, shape in tensors)
        manifest = Manifest(infos, int(head["version"]), bool(head["adapter"]))
        negative = any(size < 0 for info in infos for size in info.shape)
        if negative or len({info.name for info in infos}) < len(infos):
            raise ValueError("a negative size, or a name twice")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CommError(f"malformed manifest of a weight transfer: {error!r}"[:300]) from error
    return manifest


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor."""
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data
