"""`ReadItem`: a range of a saved tensor that a rank loads."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.core.block import Block
from polyaccel.core.types import DType


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Elements [start, start + length) of the flattened `block` of a saved tensor (None: of the whole tensor).

    `dtype` is that of the buffer that takes them.
    """

    fqn: str
    kind: str
    start: int
    length: int
    dtype: DType
    block: Block | None = None
