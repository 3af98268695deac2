"""`load_checkpoint(..., custom_load_fn=...)`: a user's own function makes the parameters of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.load.custom_load import GivenValue, GivenValues, call_load_fn, saved_values
from polyaccel.errors import CheckpointError
from polyaccel.jax.pytree import dtype_of, named_leaves

CustomLoad = Callable[..., Any]
"""Called as `fn(src=arrays, dst=params)`, of numpy arrays: `src` has the checkpoint's parameters and buffers by their
saved names, `dst` is the tree of parameters, the floating ones at least float32. Returns the tree to train with."""


@dataclass(frozen=True, slots=True)
class OwnTree:
    """A user's function, and the parameters as they are."""

    function: CustomLoad
    params: Any

    def values(self, saved: CheckpointReader, allocate: Any) -> GivenValues:
        """What the function makes of the checkpoint. Raises CheckpointError for a tree of another structure, and where
        the function raises."""
        src = {
            name: value.data.view(numpy_dtype(value.dtype)).reshape(value.shape)
            for name, value in saved_values(saved, allocate)
        }
        dst = jax.tree.map(_wide, self.params)
        made = call_load_fn(self.function, src, dst)
        found, wanted = jax.tree.structure(made), jax.tree.structure(dst)
        if found != wanted:
            raise CheckpointError(
                f"custom_load_fn returned a tree of the structure {str(found)[:200]}, not {str(wanted)[:200]}",
                hint="return a tree like dst",
                value=str(found)[:200],
            )
        return GivenValues({fqn: _value(fqn, leaf) for fqn, leaf in named_leaves(made)[0].items()})


def _wide(leaf: Any) -> np.ndarray[Any, Any]:
    array = np.array(leaf)
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) and array.itemsize < 4 else array


def _value(fqn: str, leaf: Any) -> GivenValue:
    dtype = dtype_of(fqn, leaf)
    array = np.ascontiguousarray(np.asarray(leaf), numpy_dtype(dtype))
    return GivenValue(np.shape(leaf), dtype, array.reshape(-1).view(np.uint8))
