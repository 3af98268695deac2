"""The operations that each device implements in its own way, declared once.

An `Op` is the name of an operation with a typed signature. A `KernelTable` maps ops to their implementations on one
device; the step looks kernels up in the accelerator's table and never asks for the device's name.
`polyaccel.ops.reference` says in float64 numpy what each op means, and the testkit compares every kernel with it.

[Note: Slice-independent rounding]
A kernel's result for an element must not depend on where the buffer starts or ends (masked tails, the same use of
fused multiply-add everywhere), for then stages that cut parameters differently stay bitwise equal.

[Note: Stochastic rounding]
Updates smaller than half the spacing of a 16-bit type are lost when every weight goes to the nearest number. Rounded
stochastically, a value goes to the neighbour below in magnitude, or above with the probability of its distance from
there, so that its mean is the value. Which way is decided by 32 bits that depend on a key and the element's index in
its parameter only (`polyaccel.ops.rounding`), so that, as above, slices do not matter, nor do threads or devices.
Only 16-bit weights are rounded in this way: `out`, and `master` where that has 16 bits. States and gradients are
rounded to the nearest number, and so are infinities, NaN and values beyond the type's largest number. A value that the
type can hold is kept. A float64 value is rounded to float32 first.

[Note: Matrix product kernels]
Matrix products are part of the model's graph, whose memory the framework manages. Their kernels therefore take and
return arrays of the framework (torch tensors, numpy arrays), and an accelerator may have none: the framework's own
products are the fallback. `Accelerator.matrix_kernels` gives a table of the products that are worth replacing.

Conventions: every buffer of a call lies on one device; `numel` is equal unless said otherwise; kernels are queued on
the accelerator's current stream and may return before they have run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import PluginContractError, ShardingError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Op(Generic[F]):
    """The declaration of an operation: its name in tables and reports, and a short description."""

    name: str
    summary: str


@dataclass(frozen=True, slots=True)
class StochasticRounding:
    """The randomness with which one call rounds its weights; see [Note: Stochastic rounding].

    `key` (64 bits) differs for each parameter and update. `start` is the index, in the parameter, of the first element
    of the call's buffers.
    """

    key: int
    start: int = 0

    def at(self, offset: int) -> StochasticRounding:
        """The rounding of buffers that begin `offset` elements later."""
        return StochasticRounding(self.key, self.start + offset)


class ReduceFn(Protocol):
    def __call__(self, target: Buffer, source: Buffer, op: ReduceOp) -> None:
        """`target[i] = op(target[i], source[i])` in `target`'s element type (`source`'s may differ); AVG only adds."""


class ScaleFn(Protocol):
    def __call__(self, target: Buffer, factor: float) -> None:
        """`target[i] *= factor`."""


class CastFn(Protocol):
    def __call__(self, source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
        """`out[i] = source[i]` in `out`'s type."""


class SquareSumsFn(Protocol):
    def __call__(self, out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """For each (index, piece): `out[index] += sum(piece[i]**2)`.

        Accumulates in float64 where the device has it; `out` is float64 there and float32 elsewhere. NaN and
        infinities propagate: the step finds an overflow by them.
        """


class StateRole(Enum):
    """How a formula treats one of an optimizer's states."""

    AVERAGE = "average"
    """Read and written; of either sign."""
    MAGNITUDE = "magnitude"
    """Read and written; never negative."""
    DIRECTION = "direction"
    """Written and not read: what a later call subtracts from the weights."""


class ArrayMath(Protocol):
    """The arithmetic that a formula needs beyond Python's `+=`, `-=`, `*=` and `/=`, on arrays of one library.

    A result may lie in memory that the next call with the same `slot` overwrites.
    """

    def mul(self, a: Any, b: Any, slot: int = 0) -> Any:
        """`a * b` for an array `a` and a number or an array `b`."""

    def sqrt(self, a: Any, slot: int = 0) -> Any:
        """The square root of each element, correctly rounded."""

    def abs(self, a: Any, slot: int = 0) -> Any:
        """The magnitude of each element."""

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger of each two elements, NaN where either is NaN; may overwrite `a`."""

    def sign(self, a: Any) -> Any:
        """-1, 0 or 1 for each element, and NaN for NaN; may overwrite `a`."""

    def plus_decay(self, a: Any, weights: Any, decay: Any) -> Any:
        """`a + weights * decay`; may overwrite `a`."""

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        """`a` where the number `condition` is not 0, else `b`."""


Settings = Mapping[str, float]
"""An optimizer's hyperparameters by name, as floats: `lr`, `beta1`, `weight_decay`, ...; a switch is 0 or 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """The computation of one update for an element, as data: kernels look it up by name, or run `arrays`.

    `states` names the optimizer's states that the formula takes, in the order of a call, with their roles. Without
    `writes_weights` the master weights are only read, and the last state, of role DIRECTION, takes the result.
    """

    name: str
    states: tuple[tuple[str, StateRole], ...]
    constants: Callable[[Settings, int], tuple[float, ...]]
    """(settings, number of the update from 1) -> the constants of `arrays`, made in float64."""
    arrays: Callable[..., tuple[Any, ...]]
    """(ArrayMath, constants, master, gradient, states that are read) -> (master, every state), one rounding an
    operation. Arguments may be overwritten and returned."""
    reference: Callable[..., tuple[Any, ...]]
    """(ArrayMath, settings, number of the update, master, gradient, states that are read) -> (master, every state): the
    meaning, on float64 arrays of shape (numel,), written to be read. Nothing is modified."""
    writes_weights: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        """The states that the formula reads."""
        return tuple(name for name, role in self.states if role is not StateRole.DIRECTION)


@dataclass(frozen=True, slots=True)
class Rule:
    """The formula of one call of UPDATE, with the hyperparameters of the update number `step` (from 1)."""

    formula: Formula
    settings: Settings
    step: int = 1

    @property
    def constants(self) -> tuple[float, ...]:
        """The formula's constants."""
        return self.formula.constants(self.settings, self.step)

    def check(self, master: Buffer, grad: Buffer, states: Sequence[Buffer], out: Buffer | None) -> None:
        """Raise ShardingError unless these are as many states as the formula has, and all buffers are as long as
        `master`."""
        if len(states) != len(self.formula.states):
            names = ", ".join(name for name, _ in self.formula.states) or "none"
            raise ShardingError(
                f"{self.formula.name} got {len(states)} states", hint=f"it has {names}", value=len(states)
            )
        for other in (grad, *states, *(() if out is None else (out,))):
            if other.numel != master.numel:
                raise ShardingError(f"{other!r} does not match {master!r}", value=other.numel)

    def bump_version(self, master: Buffer, states: Sequence[Buffer], out: Buffer | None) -> None:
        """Note in each buffer that a call has written that it was."""
        for buffer in (*((master,) if self.formula.writes_weights else ()), *states):
            buffer.bump_version()
        if out is not None:
            out.bump_version()


class UpdateFn(Protocol):
    def __call__(
        self,
        rule: Rule,
        master: Buffer,
        grad: Buffer,
        states: Sequence[Buffer],
        out: Buffer | None = None,
        grad_scale: float = 1.0,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """One update by a rule of `polyaccel.ops.optimizers`.

        Uses `grad * grad_scale`, updates `master` and `states` (those of `rule.formula`, in its order) in place, and
        writes `master` to `out` in `out`'s type. May overwrite `grad`. Computes in float64 where `master` is float64,
        else in float32. Raises ShardingError as `Rule.check` does.
        """


class QuantizeFn(Protocol):
    def __call__(self, source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """Symmetric quantisation by blocks of `block_numel` elements, the last one perhaps shorter.

        `scales[b]` (float32) is the largest magnitude of block b divided by 127, and `codes` (int8) is `source / scale`
        to nearest even. With uint8 `codes` it is 4 bits, 7 in place of 127 and an even `block_numel`: two codes in
        two's complement share a byte, the first in the low half. A block that is not finite has scale NaN and codes 0,
        so that it comes back as NaN; a block of zeros has scale 0. Raises ShardingError when the sizes do not fit.
        """


class DequantizeFn(Protocol):
    def __call__(self, out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """`out[i] = codes[i] * scales[i // block_numel]` in `out`'s type, for codes and scales of `QuantizeFn`."""


LARGEST_CODE = {8: 127, 4: 7}
"""The largest code of each width in bits."""


def code_bits(values: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> int:
    """8 for int8 `codes`, 4 for uint8. Raises ShardingError when types or sizes are not those of `QuantizeFn`."""
    bits = {DType.INT8: 8, DType.UINT8: 4}.get(codes.dtype)
    if bits is None:
        raise ShardingError(
            f"{codes!r} cannot hold codes", hint="use int8, or uint8 for 4 bits", value=codes.dtype.value
        )
    if block_numel < 1 or (bits == 4 and block_numel % 2):
        raise ShardingError(
            f"blocks of {block_numel} cannot be quantised to {bits} bits", hint="use an even size", value=block_numel
        )
    wanted = values.numel if bits == 8 else (values.numel + 1) // 2
    if codes.numel != wanted:
        raise ShardingError(f"{codes!r} does not match {values!r}: {wanted} are needed", value=codes.numel)
    blocks = (values.numel + block_numel - 1) // block_numel
    if scales.numel != blocks or scales.dtype is not DType.FLOAT32:
        raise ShardingError(f"{scales!r} are not the {blocks} float32 scales of {values!r}", value=scales.numel)
    return bits


class LinearFn(Protocol):
    def __call__(self, x: Any, weight: Any, bias: Any | None) -> Any:
        """A new array (rows, outputs): `x @ weight.T + bias` for x (rows, inputs), weight (outputs, inputs), bias
        (outputs)."""


class LinearInputGradFn(Protocol):
    def __call__(self, grad: Any, weight: Any) -> Any:
        """A new array (rows, inputs): `grad @ weight` for grad (rows, outputs), weight (outputs, inputs)."""


class LinearWeightGradFn(Protocol):
    def __call__(self, grad: Any, x: Any) -> Any:
        """A new array (outputs, inputs): `grad.T @ x` for grad (rows, outputs), x (rows, inputs)."""


class MatmulFn(Protocol):
    def __call__(self, left: Any, right: Any) -> Any:
        """A new array (rows, columns): `left @ right` for left (rows, inner), right (inner, columns)."""


class MatmulLeftGradFn(Protocol):
    def __call__(self, grad: Any, right: Any) -> Any:
        """A new array (rows, inner): `grad @ right.T` for grad (rows, columns), right (inner, columns)."""


class MatmulRightGradFn(Protocol):
    def __call__(self, left: Any, grad: Any) -> Any:
        """A new array (inner, columns): `left.T @ grad` for left (rows, inner), grad (rows, columns)."""


class GroupedLinearFn(Protocol):
    def __call__(self, rows: Any, weights: Any, counts: Sequence[int], *, out: Any = None) -> Any:
        """(rows, outputs), in `out` where that is given, which is contiguous: of the next `counts[g]` of `rows` (rows,
        inputs) their product with group g's `weights` (groups, outputs, inputs), transposed. What a row gives does not
        depend on others."""


class GroupedInputGradFn(Protocol):
    def __call__(self, grad: Any, weights: Any, counts: Sequence[int]) -> Any:
        """A new array (rows, inputs): of the next `counts[g]` rows of `grad` (rows, outputs) their product with group
        g's `weights` (groups, outputs, inputs). What a row gives does not depend on others."""


class GroupedWeightGradFn(Protocol):
    def __call__(self, grad: Any, rows: Any, counts: Sequence[Sequence[int]]) -> Any:
        """A new array (groups, outputs, inputs): of the next rows of `grad` (rows, outputs) and `rows` (rows, inputs)
        the sum of `grad.T @ rows` over the parts of group g, which have `counts[g][0]`, `counts[g][1]`, ... rows: each
        part's product by itself, added in order."""


REDUCE: Op[ReduceFn] = Op("combine", "elementwise reduction of one buffer into another")
SCALE: Op[ScaleFn] = Op("scale", "multiply a buffer by a number")
CAST: Op[CastFn] = Op("cast", "copy into another element type, rounded to nearest or stochastically")
SQUARE_SUMS: Op[SquareSumsFn] = Op("square_sums", "squared norms of many pieces, accumulated in float64")
UPDATE: Op[UpdateFn] = Op("update", "an optimizer's update fused with unscale, clip factor and cast")
QUANTIZE: Op[QuantizeFn] = Op("quantize", "blocks of numbers to int8 or 4-bit codes with a scale a block")
DEQUANTIZE: Op[DequantizeFn] = Op("dequantize", "codes and scales back to numbers")

ALL_OPS: tuple[Op[Any], ...] = (REDUCE, SCALE, CAST, SQUARE_SUMS, UPDATE, QUANTIZE, DEQUANTIZE)
"""The ops that the table of every accelerator holds."""

LINEAR: Op[LinearFn] = Op("linear", "a linear layer's output")
LINEAR_INPUT_GRAD: Op[LinearInputGradFn] = Op("linear_input_grad", "gradient of a linear layer's input")
LINEAR_WEIGHT_GRAD: Op[LinearWeightGradFn] = Op("linear_weight_grad", "gradient of a linear layer's weight")
MATMUL: Op[MatmulFn] = Op("matmul", "a product of two matrices")
MATMUL_LEFT_GRAD: Op[MatmulLeftGradFn] = Op("matmul_left_grad", "gradient of the left matrix of a product")
MATMUL_RIGHT_GRAD: Op[MatmulRightGradFn] = Op("matmul_right_grad", "gradient of the right matrix of a product")

GROUPED_LINEAR: Op[GroupedLinearFn] = Op("grouped_linear", "outputs of many linear layers, each of rows of its own")
GROUPED_INPUT_GRAD: Op[GroupedInputGradFn] = Op("grouped_input_grad", "gradient of their rows")
GROUPED_WEIGHT_GRAD: Op[GroupedWeightGradFn] = Op("grouped_weight_grad", "gradient of their weights, part by part")

MATRIX_OPS: tuple[Op[Any], ...] = (
    *(LINEAR, LINEAR_INPUT_GRAD, LINEAR_WEIGHT_GRAD),
    *(MATMUL, MATMUL_LEFT_GRAD, MATMUL_RIGHT_GRAD),
)
"""The ops of `Accelerator.matrix_kernels` that replace products of the framework where they are faster. See
[Note: Matrix product kernels]."""

GROUPED_OPS: tuple[Op[Any], ...] = (GROUPED_LINEAR, GROUPED_INPUT_GRAD, GROUPED_WEIGHT_GRAD)
"""The ops that `Accelerator.matrix_kernels` may hold too, all of them or none: experts compute by them, whatever the
framework's speed, because their results do not depend on what lies beside a row."""


class KernelTable:
    """The kernels of one accelerator, by op. Immutable; `replaced` gives a table with some entries exchanged."""

    def __init__(self, provider: str, kernels: Mapping[Op[Any], Callable[..., Any]]) -> None:
        self._kernels = dict(kernels)
        self._providers = dict.fromkeys(self._kernels, provider)

    def __getitem__(self, op: Op[F]) -> F:
        """The kernel for `op`. Raises PluginContractError when the accelerator registered none."""
        try:
            return self._kernels[op]  # type: ignore[return-value]
        except KeyError:
            known = ", ".join(entry.name for entry in self._kernels)
            raise PluginContractError(
                f"no kernel for op {op.name!r} is registered",
                hint=f"the accelerator's kernel table has: {known}",
                value=op.name,
            ) from None

    def __contains__(self, op: Op[Any]) -> bool:
        return op in self._kernels

    def __iter__(self) -> Iterator[Op[Any]]:
        return iter(self._kernels)

    def replaced(self, provider: str, kernels: Mapping[Op[Any], Callable[..., Any]]) -> KernelTable:
        """This table with `kernels` from `provider` in place of its own."""
        table = KernelTable("", {**self._kernels, **kernels})
        table._providers = {**self._providers, **dict.fromkeys(kernels, provider)}
        return table

    def only(self, ops: Collection[Op[Any]]) -> KernelTable:
        """A table with the entries of this one for `ops` alone."""
        table = KernelTable("", {op: kernel for op, kernel in self._kernels.items() if op in ops})
        table._providers = {op: self._providers[op] for op in table}
        return table

    def provider(self, op: Op[Any]) -> str:
        """The name, for reports, of the implementation of `op`: `torch`, `numpy`, `csrc avx512`, a plugin's name."""
        return self._providers[op]
