"""What a stage computes for one chunk of a list of layers, as compiled programs.

[Note: Residuals of a chunk]
The program of a forward pass gives what it computes and what its backward pass needs, which is the program of another
task. Parameters and inputs among that are not given back, which would copy them: it is noted where they belong, and
the backward pass is given them again. Parameters do not change between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.jax.pipeline.layers import LayerList, is_float
from polyaccel.jax.program.function import loss_and_aux

Check = Callable[[Any, tuple[Any, ...]], None]
"""`check(program, arguments)` refuses a program that must not run; see `LossFunction.check`."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """How a function that gives gradients is made of arrays: those that a program gave, in the places with -1, and
    arguments of that program by their number."""

    structure: Any
    sources: tuple[int, ...]


class ForwardPass(NamedTuple):
    """What a forward pass of training has made: a value, or of the last chunk (loss, auxiliary output); and what the
    backward pass needs."""

    result: Any
    kept: list[Any]
    how: _Pullback
    arguments: tuple[Any, Any, Any]
    """Trained leaves, other leaves, and the value that came in."""


class ChunkProgram:
    """The layers of `part` in training and in evaluation. `params` has a tree for each layer of the model, None for
    those of other chunks; `is_trained` has for each leaf there whether it has a gradient. Floating inputs have one too,
    except for those of the micro-batch."""

    def __init__(self, layers: LayerList, part: range, params: Any, is_trained: Sequence[bool], check: Check) -> None:
        self._layers, self._part = layers, part
        self._is_last = part.stop == len(layers.layers)
        self._structure = jax.tree.structure(params)
        self._is_trained = tuple(is_trained)
        self._check = check
        self._forward = jax.jit(self._differentiate)
        self._backward = jax.jit(_pulled_back)
        self._evaluation = jax.jit(self._evaluate)

    def forward(self, leaves: Sequence[Any], value: Any, labels: Any, rng: Any, factor: float) -> ForwardPass:
        """A forward pass with `leaves` of parameters, computed. The loss of the last chunk counts `factor` times in its
        gradients. Raises as `LossFunction.gradients` does."""
        trained, others = self._split(leaves)
        arguments = (trained, others, value, labels, rng, np.float32(factor))
        self._check(self._forward, arguments)
        result, kept, how = jax.block_until_ready(self._forward(*arguments))
        return ForwardPass(result, kept, how, (trained, others, value))

    def backward(self, made: ForwardPass, gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(gradients of the trained leaves, gradients of the floating leaves of the value that came in), computed.
        `gradients` are those of the floating leaves of the result; of the last chunk nothing."""
        given: Any = jnp.ones_like(made.result[0]) if self._is_last else list(gradients)
        found: tuple[list[Any], list[Any]] = self._backward(made.kept, made.how, made.arguments, given)
        jax.block_until_ready(found)
        return found

    def evaluate(self, leaves: Sequence[Any], value: Any, labels: Any) -> Any:
        """The result of a forward pass, computed, with None for the random key."""
        arguments = (*self._split(leaves), value, labels)
        self._check(self._evaluation, arguments)
        return jax.block_until_ready(self._evaluation(*arguments))

    def _split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(leaves, self._is_trained, strict=True))
        return [leaf for leaf, wanted in pairs if wanted], [leaf for leaf, wanted in pairs if not wanted]

    def _run(self, trained: Any, others: Any, value: Any, labels: Any, rng: Any) -> Any:
        wanted, rest = iter(trained), iter(others)
        leaves = [next(wanted) if is_trained else next(rest) for is_trained in self._is_trained]
        params = jax.tree_util.tree_unflatten(self._structure, leaves)
        found = self._layers.run(self._part, params, value, labels, rng)
        return loss_and_aux(found) if self._is_last else found

    def _differentiate(self, trained: Any, others: Any, value: Any, labels: Any, rng: Any, factor: Any) -> Any:
        leaves, structure = jax.tree.flatten(value)
        has_gradient = [self._part.start > 0 and is_float(leaf) for leaf in leaves]

        def run(trained: Any, floats: Any) -> Any:
            left = iter(floats)
            given = [next(left) if wanted else leaf for leaf, wanted in zip(leaves, has_gradient, strict=True)]
            result = self._run(trained, others, jax.tree.unflatten(structure, given), labels, rng)
            if self._is_last:
                return result[0] * factor.astype(result[0].dtype), result
            return [leaf for leaf in jax.tree.leaves(result) if is_float(leaf)], result

        floats = [leaf for leaf, wanted in zip(leaves, has_gradient, strict=True) if wanted]
        _, pullback, result = jax.vjp(run, trained, floats, has_aux=True)
        arrays, made_of = jax.tree.flatten(pullback)
        numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves((trained, others, value)))}
        sources = tuple(numbers.get(id(array), -1) for array in arrays)
        kept = [array for array, source in zip(arrays, sources, strict=True) if source < 0]
        return result, kept, _Pullback(made_of, sources)

    def _evaluate(self, trained: Any, others: Any, value: Any, labels: Any) -> Any:
        return self._run(trained, others, value, labels, None)


def _pulled_back(kept: Any, how: _Pullback, arguments: Any, gradients: Any) -> Any:
    left, given = iter(kept), jax.tree.leaves(arguments)
    arrays = [next(left) if source < 0 else given[source] for source in how.sources]
    of_params, of_inputs = jax.tree.unflatten(how.structure, arrays)(gradients)
    return list(of_params), list(of_inputs)
