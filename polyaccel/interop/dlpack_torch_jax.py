"""Tensors of torch as arrays of JAX and back, by DLPack: the same memory where both agree on it, a copy where not.

[Note: Memory shared by DLPack]
JAX reads a tensor's memory and believes that it never changes; torch changes it as it likes. Therefore the caller of
`to_jax` waits for the result before it returns (`block_until_ready`), and keeps no array beyond that. Results are new
memory: one that jit passed through from an input, or returns twice, is copied, or a change in place of one tensor would
be a change of another, and a parameter's memory may serve other parameters soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import jax
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from polyaccel.errors import PolyaccelError
from polyaccel.jax.views import CopyCount

_INT32 = torch.iinfo(torch.int32)
_WIDE_INTEGERS = (torch.int64, torch.uint64)
_WIDE_NUMBERS = (torch.float64, torch.complex128)


class Handover:
    """Hands tensors and arrays over, from any thread, and counts which were copied."""

    def __init__(self) -> None:
        self._views = 0
        self._copies = 0
        self._lock = Lock()

    def count(self) -> CopyCount:
        """How many tensors and arrays were handed over so far without a copy, and how many with one."""
        with self._lock:
            return CopyCount(self._views, self._copies)

    def to_jax(self, tensor: Tensor) -> jax.Array:
        """Return `tensor` as a JAX array, valid until it changes. See [Note: Memory shared by DLPack]."""
        given = tensor.detach()
        if given.layout is not torch.strided:
            raise PolyaccelError(f"JAX has no {given.layout} tensors", hint="call to_dense() on it", value=given.layout)
        plain = narrow(given.resolve_conj().resolve_neg().contiguous())
        try:
            array: jax.Array = jax.dlpack.from_dlpack(plain)
        except Exception as error:
            raise PolyaccelError(
                f"JAX cannot take a {plain.dtype} tensor on {plain.device}: {type(error).__name__}: {error}",
                hint="use a device that JAX has too (JAX_PLATFORMS), or move the layer's inputs to the CPU",
                value=str(plain.device),
            ) from error
        self.note(given.numel() == 0 or array.unsafe_buffer_pointer() == given.data_ptr())
        return array

    def to_torch(self, arrays: Iterable[jax.Array], inputs: Sequence[jax.Array] = ()) -> list[Tensor]:
        """Computed `arrays` as tensors with separate memory: no two share any, nor does one with an input."""
        taken = {array.unsafe_buffer_pointer() for array in inputs}
        tensors = []
        for array in arrays:
            tensor: Tensor = from_dlpack(array)
            pointer = tensor.data_ptr()
            is_own = tensor.numel() == 0 or pointer not in taken
            taken.add(pointer)
            self.note(is_own)
            tensors.append(tensor if is_own else tensor.clone())
        return tensors

    def note(self, is_view: bool) -> None:
        """Count one tensor or array that was handed over."""
        with self._lock:
            self._views += is_view
            self._copies += not is_view


def narrow(tensor: Tensor) -> Tensor:
    """`tensor` in a type that JAX keeps as it is. Raises PolyaccelError where that would change a value."""
    if jax.dtypes.canonicalize_dtype("int64") == "int64":
        return tensor
    if tensor.dtype in _WIDE_NUMBERS:
        raise PolyaccelError(
            f"JAX would cut {tensor.dtype} to half of its bits in silence",
            hint='use float32, or jax.config.update("jax_enable_x64", True) before JAX is used',
            value=str(tensor.dtype),
        )
    if tensor.dtype not in _WIDE_INTEGERS:
        return tensor
    if tensor.numel():
        least, most = (int(bound) for bound in tensor.aminmax())
        if least < _INT32.min or most > _INT32.max:
            raise PolyaccelError(
                f"integers from {least} to {most} do not fit into JAX's 32 bits",
                hint='jax.config.update("jax_enable_x64", True) before JAX is used',
                value=(least, most),
            )
    return tensor.to(torch.int32)


def is_differentiable(value: Any) -> bool:
    """Whether gradients of a tensor of torch exist in its type."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
