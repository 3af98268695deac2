"""Gradients in the hands of a script: trees that it gets as means over ranks, and trees that it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import PolyaccelError
from polyaccel.jax.adapter import JaxAdapter
from polyaccel.jax.views import array_over


def leaves_like(tree: Any, adapter: JaxAdapter, what: str) -> list[Any]:
    """Return the leaves of `tree` in tree order. Raises PolyaccelError unless it is built as the parameters are."""
    hint = "pass a tree of the structure and the shapes of engine.params"
    structure = jax.tree.structure(tree)
    if structure != adapter.structure:
        text = str(structure)[:200]
        raise PolyaccelError(f"{what} have another structure than the parameters: {text}", hint=hint, value=text)
    leaves: list[Any] = jax.tree.leaves(tree)
    for leaf, wanted in zip(leaves, adapter.leaves(), strict=True):
        if jnp.shape(leaf) != wanted.shape:
            raise PolyaccelError(
                f"{what} have the shape {jnp.shape(leaf)} for parameter {wanted.fqn!r} of shape {wanted.shape}",
                hint=hint,
                value=wanted.fqn,
            )
    return leaves


def tree_of_gradients(trained: Sequence[Any], adapter: JaxAdapter) -> Any:
    """Return gradients of the trained leaves as the caller's tree, with zeros for the others."""
    remaining = iter(trained)
    found = [
        next(remaining) if leaf.is_trained else jnp.zeros(leaf.shape, numpy_dtype(leaf.dtype))
        for leaf in adapter.leaves()
    ]
    return jax.tree.unflatten(adapter.structure, found)


def trained_gradients(tree: Any, adapter: JaxAdapter, factor: float) -> list[jax.Array]:
    """Return `tree * factor` for the trained leaves, in their own types."""
    leaves = leaves_like(tree, adapter, "the gradients")
    return [
        _scaled(jnp.asarray(leaf), factor, numpy_dtype(of.dtype))
        for leaf, of in zip(leaves, adapter.leaves(), strict=True)
        if of.is_trained
    ]


def _scaled(leaf: jax.Array, factor: float, dtype: Any) -> jax.Array:
    """`leaf * factor`, multiplied in at least float32."""
    if factor == 1.0:
        return leaf.astype(dtype)
    return (leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) * factor).astype(dtype)


def mean_over_ranks(arrays: Sequence[jax.Array], communicator: Communicator, accelerator: Accelerator) -> list[Any]:
    """Return the mean of each array over the ranks, computed in at least float32. Collective."""
    if communicator.world_size == 1:
        return list(arrays)
    wide = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    flat = jnp.concatenate([jnp.ravel(array).astype(wide) for array in arrays])
    travels = communicator.allocate(flat.size, DType.parse(np.dtype(wide).name))
    travels.copy_from(accelerator.import_array(jax.block_until_ready(flat)))
    communicator.all_reduce(travels, ReduceOp.AVG, label="gradients in hand").wait()
    whole = jnp.array(array_over(travels, (flat.size,), "gradients in hand"), copy=True)
    jax.block_until_ready(whole)
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = jnp.split(whole, ends)
    return [part.reshape(array.shape).astype(array.dtype) for part, array in zip(parts, arrays, strict=True)]
