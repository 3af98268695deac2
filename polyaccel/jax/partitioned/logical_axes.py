"""Names of a parameter's dimensions, as flax has them, and the rules by which they become axes of a mesh.

Boxes of linen (`with_logical_partitioning`, `with_partitioning`) and variables of nnx have such names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from polyaccel.errors import ShardingError
from polyaccel.jax.pytree import path_name

Rules = Sequence[tuple[str, Any]]
"""Pairs of a name and an axis of the mesh, several axes, or None. The first whose axes are free holds, as in flax."""
DEFAULT_RULES: Rules = (
    ("batch", ("data", "expert")),
    ("length", "sequence"),
    ("vocab", "tensor"),
    ("mlp", "tensor"),
    ("heads", "tensor"),
    ("q_heads", "tensor"),
    ("kv_heads", "tensor"),
    ("joined_kv", "tensor"),
    ("expert", "expert"),
    ("experts", "expert"),
    ("exp", "expert"),
    ("embed", None),
    ("kv", None),
    ("head_dim", None),
    ("kv_head_dim", None),
    ("norm", None),
    ("layers", None),
    ("stack", None),
    ("activation_batch", ("data", "expert")),
    ("activation_length", "sequence"),
    ("activation_vocab", "tensor"),
    ("activation_mlp", "tensor"),
    ("activation_heads", "tensor"),
    ("activation_kv_heads", "tensor"),
    ("activation_exp", "expert"),
    ("activation_embed", None),
    ("activation_kv", None),
)
"""Rules for the axes of a config, by the names of flax's guides, T5X and MaxText. ZeRO cuts what they leave whole."""


class NamedAxes(NamedTuple):
    """The names of a parameter's dimensions, and rules that it has, which precede others."""

    names: tuple[Any, ...]
    rules: Rules
    shape: tuple[int, ...]


def named_axes(params: Any) -> dict[str, NamedAxes]:
    """Return what a tree of parameters says of dimensions, by the dotted names of its boxes and variables."""
    paths = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_named)[0]
    return {path_name(path): _axes_of(node) for path, node in paths if _is_named(node)}


def require_names(found: dict[str, NamedAxes]) -> None:
    """Raise ShardingError for rules that concern no parameter."""
    if not found:
        raise ShardingError(
            "axis_rules was given, and no parameter has names of dimensions",
            hint="name dimensions in flax (nn.with_logical_partitioning, nnx.with_partitioning), or pass param_specs=",
            value="axis_rules",
        )


def specs_by_rules(found: dict[str, NamedAxes], rules: Rules, mesh: Mesh) -> dict[str, PartitionSpec]:
    """Return the spec of each of `found`. Raises ShardingError for names that are neither in `rules` nor of an axis."""
    specs, unknown = {}, dict[str, str]()
    for fqn, named in found.items():
        if len(named.names) != len(named.shape):
            raise ShardingError(
                f"parameter {fqn!r} of shape {named.shape} has {len(named.names)} names of axes, {named.names}",
                hint='name each dimension; a scan of layers by metadata_params={nn.PARTITION_NAME: "layers"}',
                value=fqn,
            )
        specs[fqn] = _spec_of(named, (*named.rules, *rules), mesh, unknown, fqn)
    if unknown:
        pairs = ", ".join(f'("{name}", None)' for name in unknown)
        raise ShardingError(
            f"no rule has the names of axes {list(unknown)}, of parameters such as {next(iter(unknown.values()))!r}",
            hint=f"add rules, with an axis of {list(mesh.axis_names)} or None: initialize(..., axis_rules=({pairs},)); "
            "they precede the engine's own",
            value=list(unknown),
        )
    return specs


def rules_of_context() -> Rules | None:
    """Return the rules that flax has now, by `flax.linen.logical_axis_rules`; None without any."""
    flax = _flax()
    return (flax.get_logical_axis_rules() or None) if flax is not None else None


def with_rules(rules: Rules | None) -> AbstractContextManager[Any]:
    """Let flax have these rules, for constraints in the function; None leaves it as it is."""
    flax = _flax()
    if flax is None or rules is None:
        return nullcontext()
    return flax.logical_axis_rules(tuple(rules))  # type: ignore[no-any-return]


def checked_rules(rules: Any) -> Rules:
    """Return rules of the script. Raises ShardingError for anything but pairs."""
    pairs = list(rules.items()) if hasattr(rules, "items") else list(rules)
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ShardingError(
                f"axis_rules has {pair!r}",
                hint='pass pairs of a name and an axis, as to flax.linen.logical_axis_rules: (("mlp", "tensor"),)',
                value=str(pair),
            )
    return [(name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs]


def _flax() -> Any:
    found = (sys.modules.get(name) for name in ("flax.core.spmd", "flax.linen.spmd"))
    return next((one for one in found if hasattr(one, "logical_axis_rules")), None)


def _spec_of(named: NamedAxes, rules: Rules, mesh: Mesh, unknown: dict[str, str], fqn: str) -> PartitionSpec:
    """The spec of one parameter; names that nothing has go to `unknown`."""
    entries: list[Any] = [None] * len(named.names)
    assigned: set[int] = set()
    used: set[str] = set()
    for name, target in (*rules, *((axis, axis) for axis in mesh.axis_names)):
        axes = tuple(axis for axis in _each(target) if axis not in mesh.axis_names or mesh.shape[axis] > 1)
        for at, own in enumerate(named.names):
            if own == name and at not in assigned and not used & set(axes):
                entries[at] = axes if len(axes) > 1 else (axes[0] if axes else None)
                assigned.add(at)
                used |= set(axes)
                break
    known = {name for name, _ in rules} | set(mesh.axis_names)
    for at, own in enumerate(named.names):
        if isinstance(own, (tuple, list)):  # axes of the mesh, which nnx and linen take too
            entries[at] = tuple(own)
        elif isinstance(own, str) and own not in known:
            unknown.setdefault(own, fqn)
    return PartitionSpec(*entries)


def _each(target: Any) -> Iterator[str]:
    if target is not None:
        yield from (target,) if isinstance(target, str) else target


def _is_named(node: Any) -> bool:
    return _names_of(node) is not None


def _names_of(node: Any) -> Any:
    """The names of a box of linen or a variable of nnx; None of any other node."""
    meta, nnx = sys.modules.get("flax.core.meta"), sys.modules.get("flax.nnx")
    if meta is not None and isinstance(node, meta.Partitioned):
        return node.names
    if nnx is not None and isinstance(node, nnx.Variable):
        of = node.get_metadata()
        found = next((of[key] for key in ("out_sharding", "sharding_names", "sharding") if of.get(key)), None)
        return getattr(found, "spec", found)
    return None


def _axes_of(node: Any) -> NamedAxes:
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(node, nnx.Variable):
        rules, value = node.get_metadata().get("sharding_rules"), node[...]
    else:
        rules, value = getattr(node, "rules", None), node.value
    return NamedAxes(tuple(_names_of(node)), rules or (), tuple(jnp.shape(value)))
