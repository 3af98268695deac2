"""The operations of decoding: few rows, whose time is that of reading weights and caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from polyaccel.ops.base import Op


class DecodeLinearFn(Protocol):
    def __call__(self, weight: Any, bias: Any | None) -> Callable[[Any], Any]:
        """Prepare a linear layer for few rows, whose result for a row does not depend on other rows.

        Args:
            weight: Shape (outputs, inputs), of any strides; used where it lies.
            bias: Shape (outputs,); None without one.

        Returns:
            A function of rows (rows, inputs) that returns `rows @ weight.T + bias`.
        """


@dataclass(frozen=True)
class PackedWeight:
    """A matrix of integers with a scale for each group of a row's inputs, as csrc/decode/grouped.h has it."""

    codes: Any
    """Bytes of shape (blocks of 16 outputs, groups, bytes of a group)."""
    scales: Any
    """Float32, shape (blocks of 16 outputs, groups, 16)."""
    outputs: int
    inputs: int
    group_size: int
    bits: int


class DecodeGroupedFn(Protocol):
    def __call__(self, weight: PackedWeight, bias: Any | None) -> Callable[[Any], Any]:
        """Prepare a linear layer of grouped weights, whose result for a row does not depend on other rows.

        Args:
            weight: The weight; used where it lies.
            bias: Shape (outputs,); None without one.

        Returns:
            A function of rows (rows, inputs) that returns `rows @ weight.T + bias`. It may round inputs to 16 bits with
            a scale a group.
        """


class DecodeAttentionFn(Protocol):
    def __call__(
        self, keys: Any, values: Any, turns: tuple[Any, Any] | None, heads: int, scale: float
    ) -> Callable[[Any, Any, Any, Any, Any], Any]:
        """Prepare attention of one new token of each sequence over a cache of keys and values.

        Args:
            keys: Cache of shape (slots, key heads, capacity, head), contiguous.
            values: Cache of the same shape.
            turns: Cosines and sines of rotary positions, each (capacity, rotated elements); None without.
            heads: Heads of queries, a multiple of the key heads.
            scale: Factor of the products of queries and keys.

        Returns:
            A function of queries, keys and values (sequences, their heads, head), and of each sequence's slot and
            position (int64). It turns queries and keys and writes keys and values into the cache. It returns
            (sequences, heads * head).
        """


DECODE_LINEAR: Op[DecodeLinearFn] = Op("decode_linear", "a linear layer's output for few rows")
DECODE_GROUPED: Op[DecodeGroupedFn] = Op("decode_grouped", "a linear layer of grouped weights for few rows")
DECODE_ATTENTION: Op[DecodeAttentionFn] = Op("decode_attention", "attention of new tokens over a cache")

DECODE_OPS: tuple[Op[Any], ...] = (DECODE_LINEAR, DECODE_GROUPED, DECODE_ATTENTION)
"""Ops of `Accelerator.decode_kernels`: what it lacks is computed by the framework."""
