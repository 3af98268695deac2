"""Parameters as JAX users have them, a pytree of arrays, and as the engine has them: by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.core.types import DType
from polyaccel.errors import ShardingError

_WIDE = {np.dtype(name) for name in ("int64", "uint64")}


def named_leaves(params: Any) -> tuple[dict[str, Any], Any]:
    """Return named leaves in tree order and the structure; names are dotted paths, as in torch."""
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        fqn = path_name(path) or "params"
        if fqn in leaves:
            raise ShardingError(
                f"two parameters are called {fqn!r}", hint="use keys without dots where this is ambiguous", value=fqn
            )
        _check(fqn, leaf)
        leaves[fqn] = leaf
    if not leaves:
        raise ShardingError("params has no arrays", hint="pass the pytree of parameters that the function takes")
    return leaves, structure


def require_only_params(params: Any) -> None:
    """Raise ShardingError for a tree with moments or statistics, which would be trained silently."""
    for path, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_state)[0]:
        if not _is_state(node):
            continue
        kind, place = type(node).__name__, f"params{jax.tree_util.keystr(path)}"
        hint = "pass the parameters alone as params="
        if _has(node, "opt_state"):
            params_of, tx_of = (
                f" ({place}[{name!r}])" if isinstance(node, Mapping) else f" ({place}.{name})"
                for name in ("params", "tx")
            )
            hint += params_of if _has(node, "params") else ""
            hint += f", and the transformation as optimizer={tx_of if _has(node, 'tx') else ''}"
            what = "a training state"
        elif _is_of_optax(node):
            hint += ", and the transformation as optimizer=, whose states the engine makes"
            what = "a state of an optax transformation"
        elif _is_other_variable(node):
            hint = (
                "pass the module as params=, and fn(module, batch, rng) as model=; or nnx.split(module, nnx.Param, ...)"
            )
            what = "a variable of nnx other than nnx.Param"
        else:
            hint += f" ({place}['params']), and the others as state={{'batch_stats': {place}['batch_stats']}}"
            what = "variables with running statistics (batch_stats)"
        raise ShardingError(f"{place} is a {kind}, {what}: it would be trained as parameters", hint=hint, value=kind)


def _is_state(node: Any) -> bool:
    has_statistics = isinstance(node, Mapping) and "params" in node and "batch_stats" in node
    return has_statistics or _has(node, "opt_state") or _is_of_optax(node) or _is_other_variable(node)


def _is_other_variable(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)


def _has(node: Any, name: str) -> bool:
    return name in node if isinstance(node, Mapping) else hasattr(node, name)


def _is_of_optax(node: Any) -> bool:
    """Whether a node is a state of optax. Pairs of fast and slow weights are none."""
    is_its = isinstance(node, tuple) and type(node).__module__.partition(".")[0] == "optax"
    return is_its and type(node).__name__ != "LookaheadParams"


def dtype_of(fqn: str, leaf: Any) -> DType:
    """Return the type that JAX gives a leaf. Raises ShardingError for 64-bit integers and unknown types."""
    found = np.dtype(jnp.result_type(leaf)) if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
    if isinstance(leaf, (int, float)):  # numpy has 64 bits for Python's numbers, JAX its default type
        found = np.dtype(jnp.result_type(leaf))
    kept = np.dtype(jax.dtypes.canonicalize_dtype(found))
    if found in _WIDE and kept != found:
        raise ShardingError(
            f"parameter {fqn!r} is {found.name}, and JAX would cut it to {kept.name} in silence",
            hint='convert it to int32, or jax.config.update("jax_enable_x64", True) before JAX is used',
            value=found.name,
        )
    try:
        return DType.parse(kept.name)
    except ShardingError as error:
        if np.issubdtype(kept, np.complexfloating):
            hint = "make its real and imaginary parts two parameters: jax.lax.complex(re, im) in the function"
        elif kept.kind == "u":
            hint = f"convert it to a signed type (leaf.view(jnp.{kept.name[1:]}) keeps its bits), or close over it"
        else:
            hint = "use float32, bfloat16, float16, or integers of up to 32 bits"
        raise ShardingError(
            f"parameter {fqn!r} is {kept.name}, of which the engine holds no parameters", hint=hint, value=kept.name
        ) from error


def as_array(leaf: Any) -> jax.Array:
    """A leaf as an array of JAX, row-major on one device."""
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    layout = getattr(array.format.layout, "major_to_minor", None)
    if layout is None or tuple(layout) == tuple(range(array.ndim)):
        return array
    return jnp.asarray(np.array(array, order="C"))


def path_name(path: Any) -> str:
    """Return the dotted name of a path in a tree; empty for the tree itself."""
    return ".".join(key_name(key) for key in path)


def key_name(key: Any) -> str:
    """One key of a path: of a mapping, a sequence, an attribute, or a node that only numbers its children."""
    for name in ("key", "idx", "name"):
        found = getattr(key, name, None)
        if found is not None:
            return str(found)
    return str(key)


def _check(fqn: str, leaf: Any) -> None:
    """Raise ShardingError for a leaf that cannot be a parameter."""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ShardingError(
                f"parameter {fqn!r} was deleted or donated",
                hint="pass arrays that no jit with donate_argnums has taken",
                value=fqn,
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ShardingError(
                f"parameter {fqn!r} is a random key", hint="pass keys as rng, not as parameters", value=fqn
            )
        if len(leaf.devices()) != 1 or not leaf.is_fully_addressable:
            raise ShardingError(
                f"parameter {fqn!r} lies on {len(leaf.devices())} devices",
                hint="pass whole arrays on one device: the engine shards them over ranks, one device a rank",
                value=fqn,
            )
    elif not isinstance(leaf, (np.ndarray, np.generic, bool, int, float)):
        kind = type(leaf).__name__
        raise ShardingError(
            f"parameter {fqn!r} is a {kind}, not an array",
            hint="keep what is not an array out of params: close over it, or use equinox.partition",
            value=kind,
        )
