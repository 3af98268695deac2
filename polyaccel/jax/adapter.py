"""A pytree of parameters as the ZeRO step sees it: names, views into buckets, gradients handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.engine.base import ModelAdapter
from polyaccel.jax.pytree import as_array, dtype_of, named_leaves
from polyaccel.jax.views import ParamViews
from polyaccel.types import DType, ParamSpec


class JaxAdapter(ModelAdapter):
    """The parameters of `params`, the floating ones trained and held as `param_dtype` (None: as they are)."""

    def __init__(self, params: Any, accelerator: Accelerator, param_dtype: DType | None) -> None:
        self._leaves, self.structure = named_leaves(params)
        self._accelerator = accelerator
        self._specs: dict[str, ParamSpec] = {}
        for fqn, leaf in self._leaves.items():
            own = dtype_of(fqn, leaf)
            dtype = param_dtype if param_dtype is not None and own.is_floating else own
            shape = leaf.shape if isinstance(leaf, jax.Array) else jax.numpy.shape(leaf)
            self._specs[fqn] = ParamSpec(fqn, tuple(shape), dtype, trainable=own.is_floating)
        self.views = ParamViews({fqn: spec.shape for fqn, spec in self._specs.items()})

    @property
    def is_trained(self) -> tuple[bool, ...]:
        """Whether each leaf is trained, in tree order."""
        return tuple(spec.trainable for spec in self._specs.values())

    @property
    def originals(self) -> dict[str, Any]:
        """The arrays that the engine was built from, of JAX or numpy, until `let_go`."""
        return {fqn: leaf for fqn, leaf in self._leaves.items() if isinstance(leaf, (jax.Array, np.ndarray))}

    def let_go(self) -> None:
        """Everything has been read: the caller's arrays are the caller's alone."""
        self._leaves.clear()

    def param_specs(self) -> Sequence[ParamSpec]:
        return tuple(reversed(self._specs.values()))

    def unit_names(self) -> dict[str, str]:
        """Every parameter belongs to the root unit: nothing is gathered piecewise."""
        return dict.fromkeys(self._specs, "")

    def read_param(self, fqn: str) -> Buffer:
        return self._accelerator.import_array(as_array(self._leaves[fqn]))

    def on_bound(self, fqn: str, view: Buffer) -> None:
        self.views.bind(fqn, view)

    def release(self) -> None:
        """Nothing is attached to a function; the arrays keep the engine's memory alive."""

    def tree(self) -> Any:
        """The parameters as the caller's kind of tree, over the engine's memory."""
        return jax.tree_util.tree_unflatten(self.structure, self.views.arrays())

    def gradients(self, arrays: Sequence[jax.Array]) -> Sequence[tuple[str, Buffer]]:
        """The names and flat contents of the trained leaves' gradients, those first that fill the first bucket."""
        trained = [fqn for fqn, spec in self._specs.items() if spec.trainable]
        pairs = zip(reversed(trained), reversed(arrays), strict=True)
        return [(fqn, self._accelerator.import_array(array)) for fqn, array in pairs]
