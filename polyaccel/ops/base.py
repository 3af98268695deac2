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
    """The declaration of an operation, whose type parameter is the signature of its kernels.

    Attributes:
        name: Name in tables and reports.
        summary: Short description.
    """

    name: str
    summary: str


@dataclass(frozen=True, slots=True)
class StochasticRounding:
    """The randomness with which one call rounds its weights; see [Note: Stochastic rounding].

    Attributes:
        key: 64 bits that differ for each parameter and update.
        start: Index in the parameter of the first element of the call's buffers.
    """

    key: int
    start: int = 0

    def at(self, offset: int) -> StochasticRounding:
        """Return the rounding of a slice.

        Args:
            offset: First element of the slice in the present buffers.

        Returns:
            The same key with a later start.
        """
        return StochasticRounding(self.key, self.start + offset)


class ReduceFn(Protocol):
    def __call__(self, target: Buffer, source: Buffer, op: ReduceOp) -> None:
        """Compute `target[i] = op(target[i], source[i])` in `target`'s element type.

        Args:
            target: Overwritten.
            source: Equal `numel`; its element type may differ.
            op: The reduction. AVG only adds.
        """


class ScaleFn(Protocol):
    def __call__(self, target: Buffer, factor: float) -> None:
        """Compute `target[i] *= factor`.

        Args:
            target: Overwritten. Of a floating-point type.
            factor: The number.
        """


class CastFn(Protocol):
    def __call__(self, source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
        """Compute `out[i] = source[i]` in `out`'s type.

        Args:
            source: Elements to convert.
            out: Overwritten. Equal `numel`.
            rounding: Rounds to 16 bits stochastically; None rounds to nearest even.
        """


class SquareSumsFn(Protocol):
    def __call__(self, out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """Add the squared norm of each piece: `out[index] += sum(piece[i]**2)`.

        Accumulates in float64 where the device has it. NaN and infinities propagate: the step finds an overflow by
        them.

        Args:
            out: Totals, float64 where the device has it and float32 elsewhere.
            pieces: Index in `out` and floating-point elements of each piece. An index may repeat.
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
    """Arithmetic that a formula needs in addition to Python's `+=`, `-=`, `*=` and `/=`, on arrays of one library.

    A result may lie in memory that the next call with the same `slot` overwrites.
    """

    def mul(self, a: Any, b: Any, slot: int = 0) -> Any:
        """Multiply elementwise.

        Args:
            a: Array.
            b: Number or array.
            slot: Names the memory of the result.

        Returns:
            `a * b`.
        """

    def sqrt(self, a: Any, slot: int = 0) -> Any:
        """Take the square root of each element, correctly rounded.

        Args:
            a: Array.
            slot: Names the memory of the result.

        Returns:
            The roots.
        """

    def abs(self, a: Any, slot: int = 0) -> Any:
        """Take the magnitude of each element.

        Args:
            a: Array.
            slot: Names the memory of the result.

        Returns:
            The magnitudes.
        """

    def maximum(self, a: Any, b: Any) -> Any:
        """Take the larger of each two elements, NaN where either is NaN.

        Args:
            a: Array, which may be overwritten.
            b: Array.

        Returns:
            The maxima.
        """

    def sign(self, a: Any) -> Any:
        """Take the sign of each element.

        Args:
            a: Array, which may be overwritten.

        Returns:
            -1, 0 or 1, and NaN for NaN.
        """

    def plus_decay(self, a: Any, weights: Any, decay: Any) -> Any:
        """Add weight decay.

        Args:
            a: Array, which may be overwritten.
            weights: Array.
            decay: Number.

        Returns:
            `a + weights * decay`.
        """

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        """Select one of two arrays.

        Args:
            condition: Number.
            a: Returned where `condition` is not 0.
            b: Returned else.

        Returns:
            `a` or `b` itself.
        """


Settings = Mapping[str, float]
"""An optimizer's hyperparameters by name, as floats: `lr`, `beta1`, `weight_decay`, ...; a switch is 0 or 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """The computation of one update for an element, as data: kernels look it up by name, or run `arrays`.

    Attributes:
        name: Name by which kernels select their implementation.
        states: Names and roles of the optimizer's states, in the order of a call.
        writes_weights: False: the master weights are only read, and the last state, of role DIRECTION, receives the
            result.
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
        """Names of the states that the formula reads."""
        return tuple(name for name, role in self.states if role is not StateRole.DIRECTION)


@dataclass(frozen=True, slots=True)
class Rule:
    """The formula of one call of UPDATE, with its hyperparameters.

    Attributes:
        formula: What is computed.
        settings: Hyperparameters by name.
        step: Number of the update, from 1.
    """

    formula: Formula
    settings: Settings
    step: int = 1

    @property
    def constants(self) -> tuple[float, ...]:
        """Constants of the formula, in its order."""
        return self.formula.constants(self.settings, self.step)

    def check(self, master: Buffer, grad: Buffer, states: Sequence[Buffer], out: Buffer | None) -> None:
        """Refuse buffers that do not fit the formula.

        Args:
            master: Master weights.
            grad: Gradients.
            states: States of the formula.
            out: Buffer for the weights in another type; None without one.

        Raises:
            ShardingError: The number of states is not that of the formula, or a buffer is not as long as `master`.
        """
        if len(states) != len(self.formula.states):
            names = ", ".join(name for name, _ in self.formula.states) or "none"
            raise ShardingError(
                f"{self.formula.name} got {len(states)} states", hint=f"it has {names}", value=len(states)
            )
        for other in (grad, *states, *(() if out is None else (out,))):
            if other.numel != master.numel:
                raise ShardingError(f"{other!r} does not match {master!r}", value=other.numel)

    def bump_version(self, master: Buffer, states: Sequence[Buffer], out: Buffer | None) -> None:
        """Mark the buffers that a call has written.

        Args:
            master: Master weights.
            states: States of the formula.
            out: Buffer for the weights in another type; None without one.
        """
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
        """Apply one update by a rule of `polyaccel.ops.optimizers`.

        Computes in float64 where `master` is float64, else in float32.

        Args:
            rule: Formula and hyperparameters.
            master: Master weights, updated in place.
            grad: Gradients, multiplied by `grad_scale`. May be overwritten.
            states: States of `rule.formula`, in its order, updated in place.
            out: Receives the updated weights in its own type; None for nothing.
            grad_scale: Factor of the gradients: unscaling and clipping.
            rounding: Rounds 16-bit weights stochastically; None rounds to nearest even.

        Raises:
            ShardingError: See `Rule.check`.
        """


class QuantizeFn(Protocol):
    def __call__(self, source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """Quantise symmetrically by blocks.

        `scales[b]` is the largest magnitude of block b divided by 127, or 7 for 4 bits. A code is `source / scale` to
        nearest even. A block that is not finite has scale NaN and codes 0, so that it is dequantised to NaN. A block of
        zeros has scale 0.

        Args:
            source: Elements of a floating-point type.
            codes: Overwritten. int8: one code an element. uint8: 4-bit codes in two's complement, two in a byte, the
                first in the low half.
            scales: Overwritten. float32, one a block.
            block_numel: Elements of a block, even for 4 bits. The last block may be shorter.

        Raises:
            ShardingError: Sizes or types do not fit.
        """


class DequantizeFn(Protocol):
    def __call__(self, out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """Compute `out[i] = codes[i] * scales[i // block_numel]` in `out`'s type.

        Args:
            out: Overwritten.
            codes: Codes of `QuantizeFn`.
            scales: Scales of `QuantizeFn`.
            block_numel: Elements of a block.

        Raises:
            ShardingError: Sizes or types do not fit.
        """


LARGEST_CODE = {8: 127, 4: 7}
"""The largest code of each width in bits."""


def code_bits(values: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> int:
    """Check the buffers of a quantisation and return the width of its codes.

    Args:
        values: Elements that are, or will be, quantised.
        codes: int8, or uint8 for two 4-bit codes in a byte.
        scales: float32, one a block.
        block_numel: Elements of a block.

    Returns:
        Bits of a code: 8 or 4.

    Raises:
        ShardingError: Sizes or types are not those of `QuantizeFn`.
    """
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
        """Compute a linear layer's output.

        Args:
            x: Shape (rows, inputs).
            weight: Shape (outputs, inputs).
            bias: Shape (outputs,); None without one.

        Returns:
            `x @ weight.T + bias`: a new array of shape (rows, outputs).
        """


class LinearInputGradFn(Protocol):
    def __call__(self, grad: Any, weight: Any) -> Any:
        """Compute the gradient of a linear layer's input.

        Args:
            grad: Gradient of the output, shape (rows, outputs).
            weight: Shape (outputs, inputs).

        Returns:
            `grad @ weight`: a new array of shape (rows, inputs).
        """


class LinearWeightGradFn(Protocol):
    def __call__(self, grad: Any, x: Any) -> Any:
        """Compute the gradient of a linear layer's weight.

        Args:
            grad: Gradient of the output, shape (rows, outputs).
            x: Input, shape (rows, inputs).

        Returns:
            `grad.T @ x`: a new array of shape (outputs, inputs).
        """


class MatmulFn(Protocol):
    def __call__(self, left: Any, right: Any) -> Any:
        """Multiply two matrices.

        Args:
            left: Shape (rows, inner).
            right: Shape (inner, columns).

        Returns:
            `left @ right`: a new array of shape (rows, columns).
        """


class MatmulLeftGradFn(Protocol):
    def __call__(self, grad: Any, right: Any) -> Any:
        """Compute the gradient of the left matrix of a product.

        Args:
            grad: Gradient of the product, shape (rows, columns).
            right: Shape (inner, columns).

        Returns:
            `grad @ right.T`: a new array of shape (rows, inner).
        """


class MatmulRightGradFn(Protocol):
    def __call__(self, left: Any, grad: Any) -> Any:
        """Compute the gradient of the right matrix of a product.

        Args:
            left: Shape (rows, inner).
            grad: Gradient of the product, shape (rows, columns).

        Returns:
            `left.T @ grad`: a new array of shape (inner, columns).
        """


class GroupedLinearFn(Protocol):
    def __call__(self, rows: Any, weights: Any, counts: Sequence[int], *, out: Any = None) -> Any:
        """Compute the outputs of one linear layer for each group of rows. The result of a row does not depend on other
        rows.

        Args:
            rows: Shape (rows, inputs), ordered by group.
            weights: Shape (groups, outputs, inputs).
            counts: Rows of each group.
            out: Contiguous array of shape (rows, outputs) for the result; None for a new one.

        Returns:
            `rows_g @ weights[g].T` for the rows of each group g: shape (rows, outputs).
        """


class GroupedInputGradFn(Protocol):
    def __call__(self, grad: Any, weights: Any, counts: Sequence[int]) -> Any:
        """Compute the gradient of the rows of grouped linear layers. The result of a row does not depend on other rows.

        Args:
            grad: Gradient of the outputs, shape (rows, outputs), ordered by group.
            weights: Shape (groups, outputs, inputs).
            counts: Rows of each group.

        Returns:
            `grad_g @ weights[g]` for the rows of each group g: a new array of shape (rows, inputs).
        """


class GroupedWeightGradFn(Protocol):
    def __call__(self, grad: Any, rows: Any, counts: Sequence[Sequence[int]]) -> Any:
        """Compute the gradient of the weights of grouped linear layers, part by part.

        Args:
            grad: Gradient of the outputs, shape (rows, outputs), ordered by group and part.
            rows: Inputs, shape (rows, inputs), in the same order.
            counts: For each group the rows of each of its parts.

        Returns:
            A new array of shape (groups, outputs, inputs): for each group the sum of `grad_p.T @ rows_p` over its parts
            p, each product computed separately and added in order.
        """


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
"""Ops that `Accelerator.matrix_kernels` may hold too, all of them or none. Experts compute by them, at any speed,
because the result of a row does not depend on other rows."""


class KernelTable:
    """The kernels of one accelerator, by op. Immutable.

    Args:
        provider: Name of the implementation, for reports.
        kernels: Kernel of each op.
    """

    def __init__(self, provider: str, kernels: Mapping[Op[Any], Callable[..., Any]]) -> None:
        self._kernels = dict(kernels)
        self._providers = dict.fromkeys(self._kernels, provider)

    def __getitem__(self, op: Op[F]) -> F:
        """Return the kernel of an op.

        Args:
            op: The op.

        Returns:
            Its kernel.

        Raises:
            PluginContractError: The accelerator registered none.
        """
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
        """Exchange some kernels.

        Args:
            provider: Name of the new kernels' implementation, for reports.
            kernels: Kernel of each op to exchange or add.

        Returns:
            A new table.
        """
        table = KernelTable("", {**self._kernels, **kernels})
        table._providers = {**self._providers, **dict.fromkeys(kernels, provider)}
        return table

    def only(self, ops: Collection[Op[Any]]) -> KernelTable:
        """Restrict the table to some ops.

        Args:
            ops: Ops to keep.

        Returns:
            A new table.
        """
        table = KernelTable("", {op: kernel for op, kernel in self._kernels.items() if op in ops})
        table._providers = {op: self._providers[op] for op in table}
        return table

    def provider(self, op: Op[Any]) -> str:
        """Return the name of the implementation of an op, for reports.

        Args:
            op: An op of this table.

        Returns:
            Such as `torch`, `numpy`, `csrc avx512`, or a plugin's name.
        """
        return self._providers[op]


def by_op(*kernels: Callable[..., Any]) -> dict[Op[Any], Callable[..., Any]]:
    """Return each of `kernels` under the op of its name.

    Args:
        *kernels: Functions with the names of ops.

    Returns:
        Kernels by op.
    """
    ops = {op.name: op for op in ALL_OPS}
    return {ops[kernel.__name__]: kernel for kernel in kernels}
