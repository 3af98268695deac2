"""A pytree of parameters as the ZeRO step sees it: names, views into buckets, gradients handed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ParamSpec
from polyaccel.engine.model_adapter import ModelAdapter
from polyaccel.jax.optax_on_owners import OptaxOnOwners
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.program.params import Leaf
from polyaccel.jax.program.stacking import Stacking, repeated_blocks
from polyaccel.jax.pytree import as_array, dtype_of, named_leaves
from polyaccel.jax.views import ParamViews, array_over
from polyaccel.zero.buckets.params import ParamBuckets
from polyaccel.zero.update.optimizers import SliceOptimizer


class JaxAdapter(ModelAdapter):
    """The parameters of `params`, the floating ones trained and held as `param_dtype` (None: as they are).

    `stacked` names subtrees whose layers are to be separate parameters (`polyaccel.jax.program.stacking`).
    """

    def __init__(
        self, params: Any, accelerator: Accelerator, param_dtype: DType | None, stacked: Sequence[str] = ()
    ) -> None:
        self._leaves, self.structure = named_leaves(params)
        self._accelerator = accelerator
        self._specs: dict[str, ParamSpec] = {}
        for fqn, leaf in self._leaves.items():
            own = dtype_of(fqn, leaf)
            dtype = param_dtype if param_dtype is not None and own.is_floating else own
            shape = leaf.shape if isinstance(leaf, jax.Array) else jax.numpy.shape(leaf)
            self._specs[fqn] = ParamSpec(fqn, tuple(shape), dtype, trainable=own.is_floating)
        self.stacking = Stacking(self._specs, stacked)
        self.views = ParamViews({fqn: spec.shape for fqn, spec in self._specs.items()})
        self._updates: Mapping[str, str] = {}
        self._sharded: set[str] = set()
        """Parameters that are whole nowhere, except while a unit of the program needs them."""

    @property
    def is_trained(self) -> tuple[bool, ...]:
        """Whether each leaf is trained, in tree order."""
        return tuple(spec.trainable for spec in self._specs.values())

    @property
    def originals(self) -> dict[str, Any]:
        """The arrays that the engine was built from, of JAX or numpy, until `let_go`."""
        return {fqn: leaf for fqn, leaf in self._leaves.items() if isinstance(leaf, (jax.Array, np.ndarray))}

    def let_go(self) -> None:
        """Drop the caller's arrays, after all of them have been read."""
        self._leaves.clear()

    def param_specs(self) -> Sequence[ParamSpec]:
        return tuple(reversed(tuple(self.stacking.specs())))

    def unit_names(self) -> dict[str, str]:
        """Repeated blocks, and layers that are stacked, are units; everything else is the root's."""
        return repeated_blocks(self._specs) | self.stacking.units()

    def separate(self, optimizer: SliceOptimizer | None) -> None:
        """Let parameters that an optax transformation updates differently share no bucket."""
        if isinstance(optimizer, OptaxOptimizer):
            self._updates = optimizer.follow({name: layer.fqn for name, layer in self.stacking.layers.items()})
        if isinstance(optimizer, OptaxOnOwners):
            optimizer.place = lambda name, start: self.stacking.in_whole(name, (), start)[::2]

    def update_names(self) -> Mapping[str, str]:
        return self._updates

    def leaves(self) -> list[Leaf]:
        """The parameters in tree order, as programs that gather them name them."""
        return [
            Leaf(
                index=index,
                fqn=fqn,
                shape=spec.shape,
                dtype=spec.dtype,
                is_trained=spec.trainable,
                is_whole=fqn not in self._sharded and not self.stacking.is_stacked(fqn),
                is_stacked=self.stacking.is_stacked(fqn),
                names=self.stacking.names(fqn),
            )
            for index, (fqn, spec) in enumerate(self._specs.items())
        ]

    def read_param(self, fqn: str) -> Buffer:
        layer = self.stacking.layers.get(fqn)
        leaf = self._leaves[fqn] if layer is None else self._leaves[layer.fqn][layer.index]
        return self._accelerator.import_array(as_array(leaf))

    def on_bound(self, fqn: str, view: Buffer) -> None:
        if fqn not in self._sharded and fqn not in self.stacking.layers:
            self.views.bind(fqn, view)

    def on_freed(self, fqn: str) -> None:
        self._sharded.add(fqn)

    def release(self) -> None:
        """Does nothing: no hooks are attached to a function, and the arrays keep the engine's memory alive."""

    def tree(self, params: ParamBuckets) -> Any:
        """Copy the parameters into the caller's tree. Collective where they are sharded."""
        arrays = self.views.copied(self._accelerator)
        copies = {
            fqn: self._accelerator.allocate(spec.numel, spec.dtype)
            for fqn, spec in self._specs.items()
            if fqn not in arrays
        }
        for param in params:
            wanted = [slot for slot in param.bucket.slots if slot.param.fqn not in arrays]
            if wanted:
                with params.unsharded_view(param.bucket.index) as full:
                    for slot in wanted:
                        fqn, _, start = self.stacking.in_whole(slot.param.fqn, slot.param.shape, 0)
                        part = copies[fqn].view(start, slot.param.numel)
                        part.copy_from(full.view(slot.offset, slot.param.numel))
        for fqn, copy in copies.items():
            arrays[fqn] = array_over(copy, self._specs[fqn].shape, f"parameter {fqn!r}")
        return jax.tree_util.tree_unflatten(self.structure, [arrays[fqn] for fqn in self._specs])

    def gradients(self, arrays: Sequence[jax.Array]) -> Sequence[tuple[str, Buffer]]:
        """Return flat gradients of trained leaves by name, in bucket order, those of stacked layers one by one; none if
        the program handed them over."""
        if not arrays:
            return ()
        trained = [leaf for leaf in self.leaves() if leaf.is_trained]
        found = {
            name: array[at] if leaf.is_stacked else array
            for leaf, array in zip(trained, arrays, strict=True)
            for at, name in enumerate(leaf.names)
        }
        names = (spec.fqn for spec in self.param_specs() if spec.fqn in found)
        return [(name, self._accelerator.import_array(found[name])) for name in names]
