"""A compiled function of JAX as an operation of torch's autograd, differentiable any number of times.

[Note: Recomputed JAX backward]
The operation saves its inputs, by autograd's own means, and its backward pass computes the rest again. So autograd
notices an input that was changed in between; activation checkpointing and `save_on_cpu` work; and of a sharded
parameter no memory is saved, which other parameters use by the time of the backward pass. Residuals that JAX would keep
are views of the very inputs, unseen by torch: an update between forward and backward would give wrong gradients in
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import ClosedJaxpr
from torch import Tensor

from polyaccel.interop.dlpack_torch_jax import Handover, is_differentiable

ArrayFn = Callable[..., Any]
"""Arrays to a pytree of arrays."""


Check = Callable[[ClosedJaxpr, Sequence[jax.Array]], None]
"""Raises if a program must not run on these arrays."""


class JaxOperation:
    """`fn`, arrays to a pytree of arrays, on tensors. Its gradient is an operation of this kind too.

    `check` is called before the first computation with arrays of new shapes; the gradients' programs hold no other
    constants.
    """

    def __init__(self, fn: ArrayFn, check: Check | None = None) -> None:
        self._fn = fn
        self._compiled = jax.jit(fn)
        self._check = check
        self._checked: set[Any] = set()
        self._gradients: dict[Any, JaxOperation] = {}

    def __call__(self, handover: Handover, *tensors: Tensor) -> Any:
        """The result, a pytree of tensors; `handover` counts tensors and arrays, those of the backward pass too."""
        structures: list[Any] = []
        results = _Apply.apply(self, handover, structures, *tensors)  # type: ignore[no-untyped-call]
        return jax.tree.unflatten(structures[0], results)

    def compute(self, handover: Handover, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The results, without a graph, and their tree structure."""
        arrays = [handover.to_jax(tensor) for tensor in tensors]
        self._require_checked(arrays)
        leaves, structure = jax.tree.flatten(jax.block_until_ready(self._compiled(*arrays)))
        return handover.to_torch(leaves, arrays), structure

    def _require_checked(self, arrays: Sequence[jax.Array]) -> None:
        if self._check is None:
            return
        signature = tuple((array.shape, array.dtype) for array in arrays)
        if signature not in self._checked:
            self._check(self._compiled.trace(*arrays).jaxpr, arrays)
            self._checked.add(signature)

    def gradient(self, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> JaxOperation:
        """(inputs, gradients of the `given` results) to a tuple of the gradients of the `wanted` inputs."""
        found = self._gradients.get((wanted, given))
        if found is None:
            found = JaxOperation(_gradient_of(self._fn, wanted, given))
            found = self._gradients.setdefault((wanted, given), found)  # another thread may have been here first
        return found


def _gradient_of(fn: ArrayFn, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> ArrayFn:
    def gradient(*arguments: Any) -> Any:
        inputs, cotangents = arguments[: len(wanted)], arguments[len(wanted) :]

        def of_wanted(*chosen: Any) -> tuple[Any, ...]:
            remaining = iter(chosen)
            every = [next(remaining) if is_wanted else one for one, is_wanted in zip(inputs, wanted, strict=True)]
            results = jax.tree.leaves(fn(*every))
            return tuple(result for result, is_given in zip(results, given, strict=True) if is_given)

        _, pull = jax.vjp(of_wanted, *(one for one, is_wanted in zip(inputs, wanted, strict=True) if is_wanted))
        # For complex numbers torch's gradient is the conjugate of JAX's; real ones are left as they are.
        return tuple(jnp.conj(found) for found in pull(tuple(jnp.conj(one) for one in cotangents)))

    return gradient


class _Apply(torch.autograd.Function):
    """See [Note: Recomputed JAX backward]."""

    @staticmethod
    def forward(
        ctx: Any, operation: JaxOperation, handover: Handover, structures: list[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results, structure = operation.compute(handover, tensors)
        structures.append(structure)
        ctx.operation, ctx.handover = operation, handover
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(result for result in results if not is_differentiable(result)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        given = tuple(gradient is not None for gradient in gradients)
        if not any(given):
            return (None,) * (len(wanted) + 3)
        operation = ctx.operation.gradient(wanted, given)
        given_gradients = (one for one in gradients if one is not None)
        found = iter(operation(ctx.handover, *ctx.saved_tensors, *given_gradients))
        return None, None, None, *(next(found) if is_wanted else None for is_wanted in wanted)
