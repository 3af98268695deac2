"""The operations that a device may do better than the reference, each declared once.

An `Op` is a name with a typed signature and its meaning. A `KernelTable` maps ops to implementations; an accelerator
hands out its table, and the step asks the table, never the device's name. `polyaccel.ops.reference` has the float64
meaning of each op in numpy, and the testkit compares every registered kernel with it.

[Note: Slices and rounding]
A kernel's result for an element must not depend on where the buffer starts or ends (masked tails, the same use of
fused multiply-add everywhere), for then stages that cut parameters differently stay bitwise equal.

[Note: Stochastic rounding]
Updates smaller than half the spacing of a 16-bit type are lost when every weight goes to the nearest number. Rounded
stochastically, a value goes to the neighbour below in magnitude, or above with the probability of its distance from
there, so that its mean is the value. Which way is decided by 32 bits that depend on a key and the element's index in
its parameter only (`polyaccel.ops.random_bits`), so that, as above, slices do not matter, nor do threads or devices.
It concerns weights of 16 bits, which are `out`, and `master` where it has so few; states and gradients go to nearest.
So do infinities, NaN and what lies beyond the largest number. A number of the type stays what it is. float64 is
rounded to float32 first.

[Note: Matrix products]
They are part of the model's graph, whose memory its framework manages. Hence they take and return arrays of the
framework (torch tensors, numpy arrays), and no accelerator need have them: the framework's own are the fallback. A
table of them comes from `Accelerator.matrix_kernels` and holds what is worth to be used.

Conventions: every buffer of a call lies on one device; `numel` is equal unless said otherwise; kernels are queued on
the accelerator's current stream and may return before they have run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from polyaccel.buffer import Buffer
from polyaccel.errors import PluginContractError
from polyaccel.types import ReduceOp

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Op(Generic[F]):
    """The declaration of an operation: its name in tables and reports, and one sentence on what it does."""

    name: str
    summary: str


@dataclass(frozen=True, slots=True)
class StochasticRounding:
    """How to round the weights of a call: `key` (64 bits) stands for the parameter and its update, `start` is the index
    in it of the buffers' first element. See [Note: Stochastic rounding]."""

    key: int
    start: int = 0

    def at(self, offset: int) -> StochasticRounding:
        """The same for buffers that begin `offset` elements later."""
        return StochasticRounding(self.key, self.start + offset)


class CombineFn(Protocol):
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
        infinities propagate, which is how overflow is found.
        """


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """What one Adam step needs. `step` counts from 1; `decoupled` is AdamW's decay, else it joins the gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    bias_correction: bool = True


class AdamFn(Protocol):
    def __call__(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        out: Buffer | None,
        hyper: AdamHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """One Adam step (Kingma & Ba 2015, algorithm 1; decoupled decay: Loshchilov & Hutter 2019, algorithm 2).

        Uses `grad * grad_scale`, updates `master` and the moments in place, and writes `master` to `out` in `out`'s
        type. May overwrite `grad`.
        """


@dataclass(frozen=True, slots=True)
class SgdHyper:
    """What one SGD step needs. At the `first` step the momentum is the gradient itself (torch's rule)."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool


class SgdFn(Protocol):
    def __call__(
        self,
        master: Buffer,
        grad: Buffer,
        momentum: Buffer | None,
        out: Buffer | None,
        hyper: SgdHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """One step of SGD with momentum; `momentum` is None when `hyper.momentum` is 0."""


@dataclass(frozen=True, slots=True)
class AdagradHyper:
    lr: float
    eps: float
    weight_decay: float
    lr_decay: float
    step: int


class AdagradFn(Protocol):
    def __call__(
        self,
        master: Buffer,
        grad: Buffer,
        sum_sq: Buffer,
        out: Buffer | None,
        hyper: AdagradHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """One Adagrad step (Duchi et al. 2011): `sum_sq += g**2; master -= lr * g / (sqrt(sum_sq) + eps)`."""


@dataclass(frozen=True, slots=True)
class LionHyper:
    lr: float
    beta1: float
    beta2: float
    weight_decay: float


class LionFn(Protocol):
    def __call__(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        out: Buffer | None,
        hyper: LionHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """One Lion step (Chen et al. 2023, algorithm 2)."""


class LambDirectionFn(Protocol):
    def __call__(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        direction: Buffer,
        hyper: AdamHyper,
        grad_scale: float,
    ) -> None:
        """First half of a LAMB step (You et al. 2020, algorithm 2): moments, and the float32 `direction` with decay."""


class LambApplyFn(Protocol):
    def __call__(
        self,
        master: Buffer,
        direction: Buffer,
        out: Buffer | None,
        rate: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """Second half, for one parameter's slice: `master -= rate * direction`, and `master` to `out` in its type."""


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
        """`out[i] = codes[i] * scales[i // block_numel]` in `out`'s type, for what `QuantizeFn` wrote."""


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


COMBINE: Op[CombineFn] = Op("combine", "elementwise reduction of one buffer into another")
SCALE: Op[ScaleFn] = Op("scale", "multiply a buffer by a number")
CAST: Op[CastFn] = Op("cast", "copy into another element type, rounded to nearest or stochastically")
SQUARE_SUMS: Op[SquareSumsFn] = Op("square_sums", "squared norms of many pieces, accumulated in float64")
ADAM: Op[AdamFn] = Op("adam", "Adam and AdamW fused with unscale, clip factor and cast")
SGD: Op[SgdFn] = Op("sgd", "SGD with momentum fused with unscale, clip factor and cast")
ADAGRAD: Op[AdagradFn] = Op("adagrad", "Adagrad fused with unscale, clip factor and cast")
LION: Op[LionFn] = Op("lion", "Lion fused with unscale, clip factor and cast")
LAMB_DIRECTION: Op[LambDirectionFn] = Op("lamb_direction", "LAMB's moments and update direction")
LAMB_APPLY: Op[LambApplyFn] = Op("lamb_apply", "LAMB's update of one parameter slice")
QUANTIZE: Op[QuantizeFn] = Op("quantize", "blocks of numbers to int8 or 4-bit codes with a scale a block")
DEQUANTIZE: Op[DequantizeFn] = Op("dequantize", "codes and scales back to numbers")

ALL_OPS: tuple[Op[Any], ...] = (
    *(COMBINE, SCALE, CAST, SQUARE_SUMS),
    *(ADAM, SGD, ADAGRAD, LION, LAMB_DIRECTION, LAMB_APPLY),
    *(QUANTIZE, DEQUANTIZE),
)
"""What every accelerator has."""

LINEAR: Op[LinearFn] = Op("linear", "a linear layer's output")
LINEAR_INPUT_GRAD: Op[LinearInputGradFn] = Op("linear_input_grad", "gradient of a linear layer's input")
LINEAR_WEIGHT_GRAD: Op[LinearWeightGradFn] = Op("linear_weight_grad", "gradient of a linear layer's weight")
MATMUL: Op[MatmulFn] = Op("matmul", "a product of two matrices")
MATMUL_LEFT_GRAD: Op[MatmulLeftGradFn] = Op("matmul_left_grad", "gradient of the left matrix of a product")
MATMUL_RIGHT_GRAD: Op[MatmulRightGradFn] = Op("matmul_right_grad", "gradient of the right matrix of a product")

MATRIX_OPS: tuple[Op[Any], ...] = (
    *(LINEAR, LINEAR_INPUT_GRAD, LINEAR_WEIGHT_GRAD),
    *(MATMUL, MATMUL_LEFT_GRAD, MATMUL_RIGHT_GRAD),
)
"""What an accelerator may have. See [Note: Matrix products]."""


class KernelTable:
    """What implements each op on one accelerator. Immutable; `replaced` gives a table with some entries exchanged."""

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
                cure=f"the accelerator's kernel table has: {known}",
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
        """This table with nothing but `ops` in it."""
        table = KernelTable("", {op: kernel for op, kernel in self._kernels.items() if op in ops})
        table._providers = {op: self._providers[op] for op in table}
        return table

    def provider(self, op: Op[Any]) -> str:
        """Who implements `op`, for reports: `torch`, `numpy`, `csrc avx512`, a plugin's name."""
        return self._providers[op]
