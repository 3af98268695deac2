"""The states of an optax transformation on a tree of parameters, by what they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """One array of a transformation's state: one value for each element of parameter `param` (an index in tree order),
    or of none. `path` is where it stands, without the parameter's own path."""

    param: int | None
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_number(self) -> bool:
        """Whether it is one number for all parameters."""
        is_extended = jax.dtypes.issubdtype(self.dtype, jax.dtypes.extended)
        return self.param is None and self.shape == () and not is_extended

    @property
    def text(self) -> str:
        return str(jax.tree_util.keystr(self.path))


def state_leaves(params: Any, state: Any) -> list[StateLeaf]:
    """The leaves of `state` in tree order; both trees may hold shapes in place of arrays.

    A leaf belongs to the parameter whose path its own path ends with, if it has that shape.
    """
    places = {path: (at, leaf.shape) for at, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0])}
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        ends = (end for end in range(len(path) + 1) if places.get(path[end:], (0, None))[1] == leaf.shape)
        end = next(ends, None)
        param = None if end is None else places[path[end:]][0]
        leaves.append(StateLeaf(param, path[:end], tuple(leaf.shape), leaf.dtype))
    return leaves


def buffer_names(leaves: Sequence[StateLeaf]) -> list[str]:
    """The name of each of one parameter's states: the end of its path, so that parameters with states of the same kind
    in different parts of the transformation's state have them by the same name."""
    names: list[str] = []
    for leaf in leaves:
        end = "optax" + jax.tree_util.keystr(leaf.path[-1:])
        names.append(end if end not in names else f"{end}#{names.count(end) + 1}")
        while names[-1] in names[:-1]:
            names[-1] += "'"
    return names
