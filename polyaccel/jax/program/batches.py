"""The batches that users pass: arrays of any library, in any pytree, and how they are cut.

Micro-batches and devices share a batch: each gets an equal part of every array along the first axis, which counts
samples. An array whose first axis does not count samples (class weights, a target network, a random key) must be
declared `replicated`. Numbers are whole for every part.

[Note: Looked-up arrays of a batch]
An array that is as long as the batch by chance is cut as samples are. Rows of a part are others than rows of the whole,
and JAX takes the last row for an index beyond the end, so this cut must not go unnoticed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from polyaccel.errors import PolyaccelError


def looked_up(program: ClosedJaxpr, at: Sequence[int]) -> set[int]:
    """Those of the arguments `at` of a traced function in which it looks up rows along the first axis."""
    invars = program.jaxpr.invars
    return set(_walk(program.jaxpr, {invars[index]: index for index in at}))


def _walk(jaxpr: Jaxpr, known: Mapping[Any, int]) -> Iterator[int]:
    """`known`: the variables that are an argument, in whatever type."""
    own = dict(known)
    for equation in jaxpr.eqns:
        given = [None if isinstance(atom, Literal) else own.get(atom) for atom in equation.invars]
        if all(index is None for index in given):
            continue
        name = equation.primitive.name
        if name == "gather" and given[0] is not None and _takes_rows(equation):
            yield given[0]
        if name in _SAME and given[0] is not None:
            own[equation.outvars[0]] = given[0]
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = equation.params.get(key)
            body = getattr(inner, "jaxpr", inner)
            if isinstance(body, Jaxpr) and len(body.invars) == len(equation.invars):
                inside = {var: index for var, index in zip(body.invars, given, strict=True) if index is not None}
                yield from _walk(body, inside)


_SAME = frozenset({"convert_element_type", "copy", "stop_gradient"})


def _takes_rows(equation: Any) -> bool:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    # Of indices along several axes, the first may well count the samples: logits[arange(samples), labels].
    return tuple(numbers.start_index_map) == (0,) and sizes[0] < equation.invars[0].aval.shape[0]


@jax.tree_util.register_pytree_node_class
class Replicated:
    """A part of a batch that every micro-batch and every device gets whole. `replicated` makes it.

    Args:
        value: Array, or pytree of arrays.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"replicated({self.value!r})"

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> Replicated:
        return cls(*children)


def replicated(value: Any) -> Replicated:
    """Mark a part of a batch that has no axis over samples, so that every micro-batch and every device gets it whole.

    It is what `PartitionSpec()` is in JAX. Use it for class weights, the parameters of a target or teacher network,
    tables and random keys.

    Args:
        value: Array, or pytree of arrays. The function gets `value` itself.

    Returns:
        The marked value, to be put into a batch.

    Example:
        ```python
        engine.train_batch({"x": x, "weights": polyaccel.jax.replicated(weights)})
        ```
    """
    return Replicated(value)


def as_inputs(batch: Any, device: Any = None) -> Any:
    """Return `batch` as the function gets it: without `replicated` marks, on `device` if given."""

    def convert(path: Any, value: Any) -> Any:
        if isinstance(value, Replicated):
            return as_inputs(value.value, device)
        return _as_input(path, value, device)

    return jax.tree_util.tree_map_with_path(convert, batch, is_leaf=_is_replicated)


def split_batch(batch: Any, count: int, *, over: str, length_cure: str) -> list[Any]:
    """Split `batch` in `count` equal parts along first axes; `replicated` marks stay, `over` names parts."""
    if count == 1:
        return [batch]
    pairs, structure = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_replicated)
    leaves = [leaf if _is_replicated(leaf) else _as_input(path, leaf, None) for path, leaf in pairs]
    names = [_name(path) for path, _ in pairs]
    is_cut = [not _is_replicated(leaf) and (jnp.ndim(leaf) > 0 or _is_key(leaf)) for leaf in leaves]
    _require_samples(
        {name: leaf for name, leaf, wanted in zip(names, leaves, is_cut, strict=True) if wanted},
        *(count, over, length_cure),
    )

    def part(leaf: Any, at: int) -> Any:
        size = leaf.shape[0] // count
        return leaf[at * size : (at + 1) * size]

    return [
        jax.tree.unflatten(
            structure, [part(leaf, at) if wanted else leaf for leaf, wanted in zip(leaves, is_cut, strict=True)]
        )
        for at in range(count)
    ]


def cast_floats(batch: Any, dtype: Any) -> Any:
    """`batch` with its floating arrays as `dtype`. Numbers of Python stay: they take the type of what they meet."""

    def cast(value: Any) -> Any:
        is_array = jnp.issubdtype(jnp.result_type(value), jnp.floating) and not is_weak(value)
        return value.astype(dtype) if is_array else value

    return jax.tree.map(cast, batch)


def is_weak(value: Any) -> bool:
    """Whether `value` is a number of Python, or follows from such numbers alone: it takes the type of what it meets."""
    return bool(getattr(jax.typeof(value), "weak_type", False))


def as_weak(value: Any) -> Any:
    """An array of JAX that takes the type of what it meets (`is_weak`)."""
    zero: Any = value.dtype.type(0).item()
    return jax.vmap(lambda one: jax.lax.full_like(zero, one))(value.reshape(-1)).reshape(value.shape)


@jax.tree_util.register_pytree_node_class
class WeakNumbers:
    """Numbers of Python in one array. An array over several devices cannot be weak; `as_weak` makes it so where it is
    traced."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> WeakNumbers:
        return cls(*children)


def samples_of(batch: Any) -> dict[int, str]:
    """The arrays of `batch` that `split_batch` cuts: their places among the leaves of the inputs, with their names."""
    marked = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.tree.map(lambda _: "", leaf) if _is_replicated(leaf) else _name(path),
        batch,
        is_leaf=_is_replicated,
    )
    pairs = zip(jax.tree.leaves(marked), jax.tree.leaves(batch), strict=True)
    return {at: name for at, (name, leaf) in enumerate(pairs) if name and jnp.ndim(leaf) > 0}


def _require_samples(arrays: dict[str, Any], count: int, over: str, length_cure: str) -> None:
    """Raise PolyaccelError unless every array has the same number of samples, a multiple of `count`."""
    hint = (
        "declare arrays that do not hold samples: polyaccel.jax.replicated(value) in the batch, which every part gets"
    )
    for name, array in arrays.items():
        if _is_key(array):
            raise PolyaccelError(
                f"{name} is a random key, and the batch is to be cut over {count} {over}",
                hint="use the key that the function gets as rng, a key a sample (jax.random.split), or "
                f"polyaccel.jax.replicated({name}), with which every part draws the same numbers",
                value=name,
            )
    lengths = {name: int(array.shape[0]) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise PolyaccelError(
            f"a batch whose arrays have first axes of different lengths cannot be cut over {count} {over}: {shown}",
            hint=hint,
            value=lengths,
        )
    length = next(iter(lengths.values()), count)
    if length % count or not length:
        raise PolyaccelError(f"{length} samples cannot be cut over {count} {over}", hint=length_cure, value=length)


def _is_replicated(value: Any) -> bool:
    return isinstance(value, Replicated)


def _is_key(value: Any) -> bool:
    """Whether `value` is one random key, in either of JAX's forms."""
    if not isinstance(value, (jax.Array, np.ndarray)):
        return False
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jnp.ndim(value) == 0
    return value.dtype == np.uint32 and value.shape in _RAW_KEYS


_RAW_KEYS = ((2,), (4,))
"""The shapes of keys that `jax.random.PRNGKey` makes. Arrays of samples of this type and shape are as good as none."""


def _name(path: Any) -> str:
    return f"batch{jax.tree_util.keystr(path)}"


def _as_input(path: Any, value: Any, device: Any) -> Any:
    if isinstance(value, jax.Array):
        return _array_of_jax(path, value, device)
    if isinstance(value, (bool, int, float, complex)):
        return value
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _array_of_torch(path, value)
    array = value if isinstance(value, (np.ndarray, np.generic)) else np.asarray(value)
    if array.dtype.kind in _NO_NUMBERS:
        kind = type(value).__name__
        what = f"a {kind}" if array.dtype == object else f"a {kind} of {array.dtype}"
        raise PolyaccelError(
            f"{_name(path)} is {what}", hint="pass arrays of numbers, in any pytree, and leave others out", value=kind
        )
    return array


_NO_NUMBERS = "OSUMm"


def _array_of_jax(path: Any, array: Any, device: Any) -> Any:
    if isinstance(array, jax.core.Tracer):
        return array
    if not array.is_fully_addressable:
        raise PolyaccelError(
            f"{_name(path)} lies on devices of several processes, {array.sharding}",
            hint="pass this process's own samples: the engine puts them on the devices",
            value=_name(path),
        )
    if device is None or array.devices() == {device}:
        return array
    return jax.device_put(array, device)


def _array_of_torch(path: Any, tensor: Any) -> Any:
    """The values of a tensor, whatever its type; numpy has no name for some."""
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        own = np.dtype(jnp.dtype(str(plain.dtype).removeprefix("torch.")))
        flat = plain.reshape(-1).view(sys.modules["torch"].uint8).numpy()
        return flat.view(own).reshape(tuple(plain.shape))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise PolyaccelError(
            f"{_name(path)} is a tensor that JAX cannot take: {type(error).__name__}: {error}",
            hint="pass a dense tensor of a type that JAX has, or an array",
            value=str(tensor.dtype),
        ) from error
