"""The operations of decoding: few rows, whose time is that of reading weights and caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class LayerPages:
    """Where a layer's keys and values are: see [Note: Pages of keys and values] in csrc/decode/attention.h."""

    table: Any
    """Int64, shape (slots, pages of a slot): addresses of pages, zero where there is none."""
    tokens: int
    """Tokens of a page."""
    key_heads: int
    head: int
    dtype: Any
    keys: int
    """The first element of the layer's keys in a page."""
    values: int


class DecodeAttentionFn(Protocol):
    def __call__(
        self, pages: LayerPages, turns: tuple[Any, Any] | None, heads: int, scale: float
    ) -> Callable[[Any, Any, Any, Any, Any], Any]:
        """Prepare attention of one new token of each sequence over a cache of keys and values.

        Args:
            pages: The cache. A slot has a page for each token that is asked for.
            turns: Cosines and sines of rotary positions, each (capacity, rotated elements); None without.
            heads: Heads of queries, a multiple of the key heads.
            scale: Factor of the products of queries and keys.

        Returns:
            A function of queries, keys and values (sequences, their heads, head), and of each sequence's slot and
            position (int64). It turns queries and keys and writes keys and values into pages. It returns
            (sequences, heads * head).
        """


@dataclass(frozen=True)
class LinearStep:
    """`y = x @ weight.T + bias`; a weight may be packed."""

    weight: Any
    bias: Any | None
    x: Any
    y: Any


@dataclass(frozen=True)
class AttentionStep:
    """Attention as `DecodeAttentionFn` has it."""

    pages: LayerPages
    turns: tuple[Any, Any] | None
    heads: int
    scale: float
    q: Any
    k: Any
    v: Any
    out: Any
    slots: Any
    positions: Any


@dataclass(frozen=True)
class RowwiseStep:
    """`y` of each row in `per_row` parts, by `kind`: "rms_norm" and "layer_norm" with weight and bias; "silu", "gelu",
    "gelu_tanh" and "relu", times `other` where there is one; "add" for x + other."""

    kind: str
    x: Any
    y: Any
    other: Any | None = None
    weight: Any | None = None
    bias: Any | None = None
    eps: float = 0.0
    per_row: int = 1


DecodeStep = LinearStep | AttentionStep | RowwiseStep


class DecodeStepsFn(Protocol):
    def __call__(self, steps: Sequence[DecodeStep]) -> Callable[[int], None]:
        """Prepare operations over fixed memory as one call.

        Args:
            steps: Operations of one element type. Their arrays have a row for each sequence that there may be.

        Returns:
            A function that runs them for so many rows, the first ones.
        """


DECODE_STEPS: Op[DecodeStepsFn] = Op("decode_steps", "a token of each sequence in one call")
DECODE_LINEAR: Op[DecodeLinearFn] = Op("decode_linear", "a linear layer's output for few rows")
DECODE_GROUPED: Op[DecodeGroupedFn] = Op("decode_grouped", "a linear layer of grouped weights for few rows")
DECODE_ATTENTION: Op[DecodeAttentionFn] = Op("decode_attention", "attention of new tokens over a cache")

DECODE_OPS: tuple[Op[Any], ...] = (DECODE_LINEAR, DECODE_GROUPED, DECODE_ATTENTION, DECODE_STEPS)
"""Ops of `Accelerator.decode_kernels`: what it lacks is computed by the framework."""
