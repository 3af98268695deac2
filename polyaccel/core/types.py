"""Types that every package shares: element types, devices, parameters, plugin probes. No array framework."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from polyaccel.core.block import Block
from polyaccel.errors import ShardingError

CODE_BLOCK = 256
"""Elements that share a scale, where optimizer states are codes of 8 bits."""


class DType(Enum):
    """An element type. The value is the name that numpy, torch and JAX agree on."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    # Members are what they are by identity; Enum's own hash takes several times as long, in keys of every call.
    __hash__ = object.__hash__

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """Whether the type is a floating-point type."""
        return self.value.startswith(("float", "bfloat"))

    @classmethod
    def parse(cls, name: str) -> DType:
        """Return the type of a name.

        Args:
            name: Name of a member's value, or a short form of configs (fp32, fp16, bf16, half, float, double).

        Returns:
            The element type.

        Raises:
            ShardingError: The name is none of these.
        """
        try:
            return cls(_SHORT_NAMES.get(name, name))
        except ValueError:
            known = ", ".join(sorted([*_SHORT_NAMES, *(dtype.value for dtype in cls)]))
            raise ShardingError(f"no element type is called {name!r}", hint=f"use one of {known}", value=name) from None


class ReduceOp(Enum):
    """How a collective combines the ranks' elements. `AVG` is `SUM` divided by the number of ranks."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of a probe: whether a plugin could be used here and now, without using it.

    Attributes:
        usable: Whether it could.
        reason: Sentence for people: what was found, or what is missing.
        priority: Among usable accelerators the highest wins: 0 for the CPU, 100 for a real device.
    """

    usable: bool
    reason: str
    priority: int = 0


_ITEMSIZE = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}
_SHORT_NAMES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class DeviceId:
    """A device, written `name:1`, or `name` without an index.

    Attributes:
        type: Name of its accelerator.
        index: Its number among the devices of the process; None where devices have none.
    """

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter without its values.

    Attributes:
        fqn: Fully qualified name; of tied parameters, that of the first one.
        shape: Shape on this rank.
        dtype: Element type on the device.
        group: Index of its optimizer group.
        trainable: Whether it receives gradients.
        block: Part of the global tensor that this rank holds; None where that is all of it.
        cut: Axes of the mesh along which other ranks hold other blocks. Along all others the parameter is replicated.
        has_row_grads: Its gradients travel as those rows that a batch uses. True for a matrix without a `block` only.

    Raises:
        ShardingError: `block` has another local shape.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: DType
    group: int = 0
    trainable: bool = True
    block: Block | None = None
    cut: tuple[str, ...] = ()
    has_row_grads: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and self.block.local_shape != self.shape:
            raise ShardingError(
                f"{self.fqn!r} has the shape {self.shape}, its block {self.block.local_shape}", value=self.fqn
            )

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return self.shape if self.block is None else self.block.shape

    @property
    def global_numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.global_shape)

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return prod(self.shape)  # 1 for a scalar, whose shape is ()

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.numel * self.dtype.itemsize
