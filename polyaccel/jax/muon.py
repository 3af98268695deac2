"""The config's Muon as a transformation: Muon for matrices, AdamW for all else.

It has the two functions of an optax transformation, so it runs wherever those on whole parameters run. Matrices are
those of JAX: inputs by outputs. A stack of layers has a matrix for each of its first indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyaccel.engine.policies.muon import MUON, is_matrix
from polyaccel.errors import ConfigError, Problem
from polyaccel.jax.pytree import path_name

MUON_RATES = ("muon_lr", "adam_lr")
"""The hyperparameters that schedules move."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class MuonState(NamedTuple):
    """The learning rates, the number of updates, momenta of matrices, and AdamW's moments of all else."""

    hyperparams: dict[str, Any]
    count: Any
    momentum_buffer: Any
    exp_avg: Any
    exp_avg_sq: Any


class MuonTransformation:
    """Muon and AdamW with the config's arguments `params`. Raises ConfigError for those that JAX has no form of."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        wrong = {
            "per_head_muon": (False, "is not available for JAX, whose functions state no heads"),
            "tp_mode": ("gathered", "is not available for JAX, where XLA exchanges what a matrix needs"),
        }
        wrong["normuon_beta"] = (None, "is not available for JAX")
        found = [(key, what) for key, (only, what) in wrong.items() if params[key] != only]
        if found:
            given = [Problem(f"optimizer.params.{key}", params[key], what, "leave it out") for key, what in found]
            raise ConfigError(given)
        self._params = params
        rates = {"muon_lr": 0.02, "adam_lr": 3e-4}
        for name in rates:
            given = params["lr"] if params[name] is None else params[name]
            rates[name] = rates[name] if given is None else given
        self.rates = rates
        """The learning rates at the start."""

    def init(self, params: Any) -> MuonState:
        """Return the state of the tree `params` before the first update."""
        moments = _by_kind(params, False)
        return MuonState(
            {name: jnp.asarray(rate, jnp.float32) for name, rate in self.rates.items()},
            jnp.zeros((), jnp.float32),
            jax.tree.map(_zeros, _by_kind(params, True)),
            jax.tree.map(_zeros, moments),
            jax.tree.map(_zeros, moments),
        )

    def update(self, updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        """Return what is added to `params` for the gradients `updates`, and the next state."""
        leaves, structure = _named(params)
        grads = jax.tree.leaves(updates)
        momenta, averages, squares = (
            iter(jax.tree.leaves(each)) for each in (state.momentum_buffer, state.exp_avg, state.exp_avg_sq)
        )
        count = state.count + 1
        moved, kept = [], (list[Any](), list[Any](), list[Any]())
        for (fqn, param), grad in zip(leaves, grads, strict=True):
            if is_matrix(fqn, jnp.ndim(param)):
                change, momentum = self._matrix(param, grad, next(momenta), state.hyperparams["muon_lr"])
                kept[0].append(momentum)
            else:
                change, *moments = self._rest(
                    param, grad, next(averages), next(squares), count, state.hyperparams["adam_lr"]
                )
                kept[1].append(moments[0])
                kept[2].append(moments[1])
            moved.append(change.astype(jnp.result_type(param)))
        trees = (
            jax.tree.unflatten(jax.tree.structure(before), after)
            for before, after in zip((state.momentum_buffer, state.exp_avg, state.exp_avg_sq), kept, strict=True)
        )
        return jax.tree.unflatten(structure, moved), MuonState(state.hyperparams, count, *trees)

    def _matrix(self, param: Any, grad: Any, momentum: Any, rate: Any) -> tuple[Any, Any]:
        beta, decay = self._params["momentum"], self._params["weight_decay"]
        momentum = beta * momentum + (1 - beta) * grad
        wanted = (1 - beta) * grad + beta * momentum if self._params["nesterov"] else momentum
        if wanted.ndim == 4:  # height, width, inputs, outputs of a convolution
            wanted = wanted.reshape(-1, wanted.shape[-1])
        inputs, outputs = wanted.shape[-2:]
        scale = max(1.0, outputs / max(1, inputs)) ** 0.5
        if self._params["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * max(inputs, outputs) ** 0.5
        update = orthogonalize(wanted, self._params["ns_steps"], self._params["ns_dtype"]).reshape(param.shape)
        return -rate * (scale * update + decay * param), momentum

    def _rest(self, param: Any, grad: Any, average: Any, square: Any, count: Any, rate: Any) -> tuple[Any, Any, Any]:
        beta1, beta2 = self._params["betas"]
        average = beta1 * average + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad * grad
        direction = average / (1 - beta1**count)
        direction /= jnp.sqrt(square / (1 - beta2**count)) + self._params["eps"]
        return -rate * (direction + self._params["weight_decay"] * param), average, square


def transformation_of(section: Any) -> MuonTransformation | None:
    """Return the transformation of the config's section of an optimizer; None for one that is none."""
    return MuonTransformation(section.params) if section is not None and section.type == MUON else None


def orthogonalize(matrices: Any, steps: int, chosen: str | None = None) -> Any:
    """Return the orthogonal factor of matrices, nearly: in the `chosen` type, or in float32 on the CPU and in bfloat16
    elsewhere."""
    a, b, c = _COEFFICIENTS
    given = matrices.dtype
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    if given != jnp.float64:
        usual = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        x = x.astype(usual if chosen is None else chosen)
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + _EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).astype(given)


def _zeros(leaf: Any) -> Any:
    return jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))


def _named(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves with their names, and the structure; leaves may be traced."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in paths], structure


def _by_kind(params: Any, matrices: bool) -> Any:
    """The tree with its matrices, or with all else; empty tuples in place of others."""
    leaves, structure = _named(params)
    kept = [leaf if is_matrix(fqn, jnp.ndim(leaf)) is matrices else () for fqn, leaf in leaves]
    return jax.tree.unflatten(structure, kept)
