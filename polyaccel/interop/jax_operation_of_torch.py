"""A differentiable function of torch as one of JAX, by callbacks to the host: under jit, with gradients of any order.

[Note: Purity of JAX functions]
JAX may call a pure function as often as it likes, and the backward pass here runs it again. Hence a function that
changes its inputs is refused here, and one that depends on anything but its inputs is refused by
`torch_to_jax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from polyaccel.errors import PolyaccelError
from polyaccel.interop.dlpack_torch_jax import Handover, narrow

TensorFn = Callable[..., Sequence[Tensor]]
"""A function of an ExitStack and tensors. Contexts that it enters there last until its results' gradients are
computed."""


class HostOperation:
    """`run`, tensors on the CPU to tensors, on arrays; `arguments` and `results` are the shapes and types of both."""

    def __init__(
        self,
        run: TensorFn,
        arguments: Sequence[jax.ShapeDtypeStruct],
        results: Sequence[jax.ShapeDtypeStruct],
        handover: Handover,
    ) -> None:
        self._run = run
        self._arguments = tuple(arguments)
        self._results = tuple(results)
        self._handover = handover
        self._function = jax.custom_vjp(self._call_host)
        self._function.defvjp(self._save, self._pull)

    def __call__(self, *arrays: Any) -> Any:
        """The tuple of results."""
        return self._function(*arrays)

    def _call_host(self, *arrays: Any) -> Any:
        return jax.pure_callback(self._on_host, self._results, *arrays, vmap_method="sequential")

    def _save(self, *arrays: Any) -> Any:
        return self._function(*arrays), arrays

    def _pull(self, arrays: Any, cotangents: Any) -> Any:
        # For complex numbers torch's gradient is the conjugate of JAX's; real ones are left as they are.
        given = (jnp.conj(one) for one, result in zip(cotangents, self._results, strict=True) if _is_inexact(result))
        found = iter(self._gradient(*arrays, *given))
        return tuple(
            jnp.conj(next(found)) if _is_inexact(one) else np.zeros(one.shape, jax.dtypes.float0)
            for one in self._arguments
        )

    @cached_property
    def _gradient(self) -> HostOperation:
        """(arguments, gradients of the inexact results) to the gradients of the inexact arguments."""
        given = [result for result in self._results if _is_inexact(result)]
        wanted = [argument for argument in self._arguments if _is_inexact(argument)]
        return HostOperation(self._run_gradient, [*self._arguments, *given], wanted, self._handover)

    def _run_gradient(self, until: ExitStack, *tensors: Tensor) -> Sequence[Tensor]:
        count = len(self._arguments)
        is_differentiated = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [
                one.detach().requires_grad_() if _is_inexact(argument) and not one.requires_grad else one
                for one, argument in zip(tensors[:count], self._arguments, strict=True)
            ]
            wanted = [one for one, argument in zip(inputs, self._arguments, strict=True) if _is_inexact(argument)]
            results = zip(self._run(until, *inputs), self._results, strict=True)
            inexact = [result for result, expected in results if _is_inexact(expected)]
            pairs = [pair for pair in zip(inexact, tensors[count:], strict=True) if pair[0].requires_grad]
            if not pairs:
                return [torch.zeros_like(one) for one in wanted]
            return torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                create_graph=is_differentiated,
                allow_unused=True,
                materialize_grads=True,
            )

    def _on_host(self, *arrays: Any) -> tuple[np.ndarray[Any, Any], ...]:
        tensors = [from_dlpack(array) for array in arrays]
        for array, tensor in zip(arrays, tensors, strict=True):
            self._handover.note(tensor.numel() == 0 or array.unsafe_buffer_pointer() == tensor.data_ptr())
        with torch.no_grad(), ExitStack() as until:
            results = self._run(until, *tensors)
        require_unwritten(tensors)
        return tuple(
            self._to_host(narrow(result.detach()), expected)
            for result, expected in zip(results, self._results, strict=True)
        )

    def _to_host(self, tensor: Tensor, expected: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
        """`tensor` as numpy, which JAX copies from. Raises PolyaccelError where it is not what was `expected`."""
        if describe(tensor) != expected:
            raise PolyaccelError(
                f"the module returned {tensor.dtype} {tuple(tensor.shape)} where {expected.dtype} {expected.shape} was "
                "compiled",
                hint="let shapes and types of results depend on those of the inputs only",
                value=tuple(tensor.shape),
            )
        self._handover.note(False)
        plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = plain.view(torch.uint8).numpy()  # numpy has no name for some of torch's types, but JAX's dtypes do
        return raw.view(expected.dtype).reshape(expected.shape)  # type: ignore[no-any-return]


def require_unwritten(tensors: Sequence[Tensor]) -> None:
    """Raise PolyaccelError if any of `tensors`, new ones before the module ran, was changed in place."""
    if any(tensor._version for tensor in tensors):
        raise PolyaccelError(
            "the module changed an input or a parameter in place, which is the memory of JAX",
            hint="use the operation that gives a new tensor, for example relu for relu_",
        )


def describe(tensor: Tensor) -> jax.ShapeDtypeStruct:
    """Shape and type of `tensor` in JAX's words."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.dtype(str(tensor.dtype).removeprefix("torch.")))


def _is_inexact(described: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(described.dtype, jnp.inexact))
