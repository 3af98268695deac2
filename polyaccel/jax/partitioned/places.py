"""Where each leaf of the parameters rests on a mesh, and where its gradient and optimizer states do.

A leaf is cut as the script's `PartitionSpec` has it. ZeRO cuts states, gradients and at stage 3 the leaf itself once
more, along its longest dimension that the ranks of data divide. A leaf without such a dimension stays as it is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from polyaccel.core.types import ParamSpec
from polyaccel.errors import ShardingError
from polyaccel.jax.native.mesh import AXIS, DeviceMesh
from polyaccel.jax.partitioned.logical_axes import (
    Rules,
    checked_rules,
    named_axes,
    require_names,
    specs_by_rules,
    with_rules,
)
from polyaccel.jax.pytree import path_name
from polyaccel.zero.plan.policy import Placement, ZeroPolicy


@dataclass(frozen=True)
class Partition:
    """A script's own mesh: the axes that it cuts each parameter and the batch along."""

    mesh: Mesh
    specs: Any
    """A tree of PartitionSpec for the parameters, or for subtrees of them; None: whole."""
    batch_axes: tuple[str, ...]
    """The axes that cut the first dimension of a batch, over which ZeRO cuts what it cuts."""
    rules: Rules | None = None
    """What flax makes of names of axes in the function; None: what the script sets."""
    must_use: frozenset[str] = frozenset()
    """Axes that no parameter has, so that the function has to name them."""

    @classmethod
    def of(cls, mesh: Mesh, specs: Any, batch_spec: PartitionSpec | None) -> Partition:
        """Return the partition. Raises ShardingError for a mesh or specs that no program can have."""
        if not isinstance(mesh, Mesh):
            kind = type(mesh).__name__
            raise ShardingError(f"mesh is a {kind}", hint="pass a jax.sharding.Mesh", value=kind)
        if any(kind is AxisType.Manual for kind in mesh.axis_types):
            raise ShardingError(
                f"the mesh has axes of the types {[kind.name for kind in mesh.axis_types]}",
                hint="make it with axis_types=(jax.sharding.AxisType.Auto,) * n: the engine lets JAX place arrays",
                value=str(mesh.axis_types),
            )
        mesh = automatic(mesh)
        named = {axis for spec in _leaves_of(specs) for axis in _axes_of(spec)}
        if batch_spec is None:
            axes = tuple(axis for axis in mesh.axis_names if axis not in named or mesh.axis_names == (axis,))
        else:
            axes = _axes_of(batch_spec)
            named |= set(axes)
            if any(entry is not None for entry in _spec_of(batch_spec)[1:]):
                raise ShardingError(
                    f"batch_spec {batch_spec} cuts more than the first dimension",
                    hint="cut others by with_sharding_constraint in the function",
                    value=str(batch_spec),
                )
        if unknown := sorted(named - set(mesh.axis_names)):
            raise ShardingError(
                f"the specs name the axes {unknown}, and the mesh has {list(mesh.axis_names)}",
                hint="name axes of the mesh",
                value=unknown,
            )
        if batch_spec is None and not axes and mesh.size > 1:
            raise ShardingError(
                f"param_specs use all axes of the mesh, {list(mesh.axis_names)}, and none is left for the batch",
                hint="name those that cut the batch: batch_spec=PartitionSpec('fsdp')",
                value=list(mesh.axis_names),
            )
        return cls(mesh, specs, axes)

    @property
    def data_size(self) -> int:
        """The number of parts of a batch."""
        return prod(self.mesh.shape[axis] for axis in self.batch_axes)

    def axes_of_params(self) -> set[str]:
        """Return the axes that cut a parameter."""
        return {axis for spec in _leaves_of(self.specs) for axis in _axes_of(spec)}

    @contextmanager
    def context(self) -> Iterator[None]:
        """The mesh as JAX's context, and the rules as flax's."""
        with jax.set_mesh(self.mesh), with_rules(self.rules):
            yield

    def on_host(self, tree: Any) -> Any:
        """As `host_tree`."""
        return host_tree(tree)

    def device_mesh(self) -> DeviceMesh:
        """All devices side by side, for what is cut evenly over them. Raises ShardingError if they are scattered."""
        devices = list(self.mesh.devices.flat)
        here = [at for at, device in enumerate(devices) if device.process_index == jax.process_index()]
        if not here or here != list(range(here[0], here[0] + len(here))):
            raise ShardingError(
                f"this process's devices stand at {here} of the mesh, and not side by side",
                hint="order the devices of the mesh by process: its last axes over the devices of one",
                value=here,
            )
        flat = Mesh(np.array(devices), (AXIS,))
        return DeviceMesh(flat, tuple(devices[at] for at in here), here[0])

    def specs_by_name(self, names: Sequence[str]) -> dict[str, PartitionSpec]:
        """The spec of each parameter. Raises ShardingError for one that belongs to none."""
        found = dict.fromkeys(names, PartitionSpec())
        for path, spec in jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=_is_spec)[0]:
            place = path_name(path)
            own = place.removesuffix(".value")  # variables of nnx have such a leaf
            below = [name for name in names if not place or name in (place, own) or name.startswith(f"{place}.")]
            if not below:
                raise ShardingError(
                    f"param_specs has a spec for {place!r}, and no parameter has this name",
                    hint=f"give it the tree of the parameters, such as {list(names)[:4]}",
                    value=place,
                )
            found |= dict.fromkeys(below, _spec_of(spec))
        return found


def adopt_mesh(params: Any, mesh: Any, specs: Any, batch_spec: Any, rules: Any = None) -> Partition | None:
    """Return the partition of the arguments, or of parameters that lie on a mesh already; None without any.

    Raises ShardingError for arguments that contradict each other, and for names of axes that no rule has.
    """
    own_rules = None if rules is None else checked_rules(rules)
    if specs is not None and rules is not None:
        hint = "pass one of the two"
        raise ShardingError("axis_rules and param_specs were both given", hint=hint, value="axis_rules")
    if not any(_is_spread(leaf) for leaf in jax.tree.leaves(params)):
        if mesh is None:
            return None
        if own_rules is not None and isinstance(mesh, Mesh):
            require_names(found := named_axes(params))
            specs = specs_by_rules(found, own_rules, mesh)
        return replace(Partition.of(mesh, specs, batch_spec), rules=own_rules)
    shardings = jax.tree.map(_sharding_of, params)
    meshes = {automatic(one.mesh) for one in jax.tree.leaves(shardings) if one is not None}
    if len(meshes | ({automatic(mesh)} if isinstance(mesh, Mesh) else {mesh} - {None})) != 1:
        raise ShardingError(
            f"the parameters lie on {len(meshes)} meshes",
            hint="put all of them on one: jax.device_put(params, NamedSharding(mesh, spec))",
            value=len(meshes),
        )
    (mesh,) = meshes
    if specs is None:
        specs = jax.tree.map(lambda one: PartitionSpec() if one is None else one.spec, shardings, is_leaf=_is_place)
    return replace(Partition.of(mesh, specs, batch_spec), rules=own_rules)


def automatic(mesh: Mesh) -> Mesh:
    """The mesh on which JAX places arrays, of one whose axes are explicit: types of axes change no number."""
    if all(kind is AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def sharding_on(mesh: Mesh, leaf: Any) -> NamedSharding | None:
    """The place of an array that lies on `mesh`; None of any other array. Raises ShardingError for another mesh."""
    found = _sharding_of(leaf)
    if found is not None:
        found = NamedSharding(automatic(found.mesh), found.spec)
    if found is not None and found.mesh != mesh:
        raise ShardingError(
            f"the state lies on a mesh of {dict(found.mesh.shape)}, and the parameters on {dict(mesh.shape)}",
            hint="put both on one mesh, or pass whole arrays as state=",
            value=str(dict(found.mesh.shape)),
        )
    return found


def host_tree(tree: Any) -> Any:
    """A tree whose leaves that lie on several devices are arrays of numpy. Collective where other processes have
    parts of them."""
    return jax.tree.map(_on_host, tree)


class LeafPlaces:
    """The places of every parameter's arrays: as the loss function gets it (`function`), as it rests (`param`), of
    its gradient and update (`state`), and as its states rest (`stored`), in host memory if `offloads`."""

    def __init__(self, devices: DeviceMesh, partition: Partition | None, policy: ZeroPolicy, *, offloads: bool) -> None:
        self.devices = devices
        self.partition = partition
        self.mesh = devices.mesh if partition is None else partition.mesh
        self._axes = (AXIS,) if partition is None else partition.batch_axes
        self._policy = policy
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        self.function: dict[str, NamedSharding] = {}
        self.param: dict[str, NamedSharding] = {}
        self.state: dict[str, NamedSharding] = {}
        self.stored: dict[str, NamedSharding] = {}
        self.carried: Sequence[NamedSharding] = ()
        """Of the leaves of the state that a function on a script's mesh carries."""
        self._memory_kind = "pinned_host" if offloads else None

    def add(self, specs: Sequence[ParamSpec], stacked: Collection[str], persistent: Collection[str]) -> None:
        """Find the places of all of `specs`: `stacked` have layers along their first axis, `persistent` stay whole.

        Raises ShardingError for a parameter that its spec cannot cut.
        """
        names = [spec.fqn for spec in specs]
        given = {} if self.partition is None else self.partition.specs_by_name(names)
        for spec in specs:
            own = given.get(spec.fqn, PartitionSpec())
            self._require_even(spec, own)
            cut = self.cut(spec.shape, own, first=int(spec.fqn in stacked))
            is_sharded = self._policy.params is Placement.SHARDED and spec.trainable and spec.fqn not in persistent
            self.function[spec.fqn] = NamedSharding(self.mesh, own)
            self.param[spec.fqn] = NamedSharding(self.mesh, cut if is_sharded else own)
            # Where a parameter stays whole, a collective for a part this small costs more than it saves.
            is_small = spec.fqn in persistent and spec.numel < _LEAST_NUMEL
            is_cut = self._policy.optim is Placement.SHARDED and not is_small
            self.state[spec.fqn] = NamedSharding(self.mesh, cut if is_cut else own)
            self.stored[spec.fqn] = self.rest(self.state[spec.fqn])

    def rest(self, place: NamedSharding) -> NamedSharding:
        """Where what is updated at `place` rests."""
        return place if self._memory_kind is None else place.with_memory_kind(self._memory_kind)

    def of_state(self, shape: tuple[int, ...]) -> NamedSharding:
        """The place of an array that belongs to no single parameter."""
        is_cut = self._policy.optim is Placement.SHARDED and prod(shape) >= _LEAST_NUMEL
        return NamedSharding(self.mesh, self.cut(shape, PartitionSpec()) if is_cut else PartitionSpec())

    def cut(self, shape: Sequence[int], spec: PartitionSpec, first: int = 0) -> PartitionSpec:
        """`spec` with its axes of data, on a dimension from `first` on that they divide: the longest, or on the
        engine's own mesh the first, so that collectives of parts transpose nothing."""
        parts = [_names(entry) for entry in spec] + [()] * (len(shape) - len(spec))
        axes = tuple(axis for axis in self._axes if axis not in {name for part in parts for name in part})
        count = prod(self.mesh.shape[axis] for axis in axes)
        if count == 1:
            return spec
        local = [size // self._count(part) for size, part in zip(shape, parts, strict=True)]
        usable = [at for at, size in enumerate(local) if at >= first and size and size % count == 0]
        if not usable:
            return spec
        at = usable[0] if self.partition is None else max(usable, key=lambda at: local[at])
        parts[at] = (*parts[at], *axes)
        return PartitionSpec(*(part if len(part) > 1 else (part[0] if part else None) for part in parts))

    def _require_even(self, spec: ParamSpec, own: PartitionSpec) -> None:
        if len(own) > len(spec.shape):
            raise ShardingError(
                f"parameter {spec.fqn!r} of shape {spec.shape} has the spec {own} of {len(own)} dimensions",
                hint="give a spec of no more dimensions than the array has",
                value=str(own),
            )
        for size, entry in zip(spec.shape, own, strict=False):
            if size % (count := self._count(_names(entry))):
                raise ShardingError(
                    f"parameter {spec.fqn!r} of shape {spec.shape} is not cut evenly by {own}: {size} over {count}",
                    hint="cut another dimension, or pad this one",
                    value=size,
                )

    def _count(self, axes: Sequence[str]) -> int:
        return prod(self.mesh.shape[axis] for axis in axes)


_LEAST_NUMEL = 1 << 12
"""An array of fewer elements is not worth a cut."""


def dimension_of(spec: PartitionSpec) -> int | None:
    """The dimension that a spec of one axis cuts."""
    return next((at for at, entry in enumerate(spec) if entry is not None), None)


def within(place: NamedSharding, layers: int) -> NamedSharding:
    """The place of a slice along the first `layers` axes."""
    return NamedSharding(place.mesh, PartitionSpec(*place.spec[layers:]))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _axes_of(spec: Any) -> tuple[str, ...]:
    return tuple(name for entry in _spec_of(spec) for name in _names(entry))


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, NamedSharding))


def _is_place(node: Any) -> bool:
    return node is None or isinstance(node, NamedSharding)


def _spec_of(node: Any) -> PartitionSpec:
    """The spec of a leaf of `param_specs`. Raises ShardingError for another kind of leaf."""
    if node is None:
        return PartitionSpec()
    found = node.spec if isinstance(node, NamedSharding) else node
    if not isinstance(found, PartitionSpec):
        kind = type(node).__name__
        raise ShardingError(
            f"param_specs has a {kind} among its leaves", hint="use jax.sharding.PartitionSpec", value=kind
        )
    return found


def _leaves_of(specs: Any) -> list[Any]:
    found: list[Any] = jax.tree.leaves(specs, is_leaf=_is_spec)
    return found


def _sharding_of(leaf: Any) -> NamedSharding | None:
    found = getattr(leaf, "sharding", None)
    return found if isinstance(found, NamedSharding) and found.mesh.size > 1 else None


def _is_spread(leaf: Any) -> bool:
    """Whether a leaf lies on several devices."""
    return isinstance(leaf, jax.Array) and not leaf.is_deleted() and len(leaf.devices()) > 1


def _on_host(leaf: Any) -> Any:
    """A leaf that lies on several devices as one array of numpy; others as they are."""
    if not _is_spread(leaf):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_on_host(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(leaf, tiled=True))
