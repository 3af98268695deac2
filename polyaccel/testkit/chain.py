"""A model small enough to be its own specification: a chain of links with hand-written gradients, in float64.

Every operation is correctly rounded in one fixed order (no BLAS, no transcendental function), so equal inputs give
equal bits wherever the arrays lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polyaccel.types import ParamSpec

FloatArray = npt.NDArray[np.float64]
Batch = tuple[FloatArray, FloatArray]
"""Inputs (micro_batches, world_size, rows, width) and targets (micro_batches, world_size, rows, out_width)."""


@dataclass(frozen=True)
class Chain:
    """Links `f(h @ p)`, `f(h + p)` or `f(h * p)` for a parameter of 2, 1 or 0 dims, with `f(x) = x / (1 + |x|)`.

    `params` are all parameters, `links` their names in the order in which forward uses them: one may come several times
    (tied) or never (unused).
    """

    params: tuple[ParamSpec, ...]
    links: tuple[str, ...]

    def init_weights(self, seed: int = 0) -> dict[str, FloatArray]:
        """Random values for every parameter, in its shape."""
        rng = np.random.default_rng(seed)
        return {param.fqn: np.asarray(rng.normal(size=param.shape)) for param in self.params}

    def sample_batch(self, micro_batches: int, world_size: int, *, rows: int = 2, seed: int = 1) -> Batch:
        """Random inputs and targets that fit the first and last matrix."""
        matrices = [param.shape for fqn in self.links for param in self.params if param.fqn == fqn and param.shape[1:]]
        rng = np.random.default_rng(seed)
        leading = (micro_batches, world_size, rows)
        return rng.normal(size=(*leading, matrices[0][0])), rng.normal(size=(*leading, matrices[-1][1]))


def run_link(param: FloatArray, hidden: FloatArray) -> FloatArray:
    """One link forward: `hidden` (rows, width) -> (rows, out_width)."""
    before = _product(hidden, param) if param.ndim == 2 else hidden + param if param.ndim else hidden * param
    return before / (1.0 + np.abs(before))


def link_gradients(
    param: FloatArray, hidden: FloatArray, output: FloatArray, upstream: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """One link backward: the gradients of `hidden` and `param`, given its `output` and that output's gradient."""
    slope = 1.0 - np.abs(output)
    inner = upstream * slope * slope
    if param.ndim == 2:
        return _product(inner, param.T), _product(hidden.T, inner)
    if param.ndim == 1:
        return inner, inner.sum(axis=0)
    return inner * param, np.asarray((inner * hidden).sum())


def loss_and_gradient(output: FloatArray, target: FloatArray) -> tuple[float, FloatArray]:
    """Half the mean squared difference, and its gradient."""
    difference = output - target
    return float((difference * difference).sum() / (2 * difference.size)), difference / difference.size


def adam(param: FloatArray, grad: FloatArray, moments: Sequence[FloatArray], step: int) -> None:
    """One Adam step in place (Kingma & Ba 2015, algorithm 1) at learning rate 0.01; `step` counts from 1."""
    mean, square = moments
    mean *= 0.9
    mean += 0.1 * grad
    square *= 0.999
    square += 0.001 * (grad * grad)
    param -= 0.01 * (mean / (1.0 - 0.9**step)) / (np.sqrt(square / (1.0 - 0.999**step)) + 1e-8)


def train_plain(
    chain: Chain, weights: dict[str, FloatArray], batches: Sequence[Batch]
) -> tuple[dict[str, FloatArray], list[float]]:
    """One process, no buckets: each batch as a whole, one Adam step a batch. Returns trained weights and losses."""
    weights = {fqn: value.copy() for fqn, value in weights.items()}
    trainable = [param.fqn for param in chain.params if param.trainable]
    moments = {fqn: [np.zeros_like(weights[fqn]) for _ in range(2)] for fqn in trainable}
    losses = []
    for step, (inputs, targets) in enumerate(batches, start=1):
        activations = [inputs.reshape(-1, inputs.shape[-1])]
        for fqn in chain.links:
            activations.append(run_link(weights[fqn], activations[-1]))
        loss, upstream = loss_and_gradient(activations[-1], targets.reshape(-1, targets.shape[-1]))
        losses.append(loss)
        grads = {fqn: np.zeros_like(value) for fqn, value in weights.items()}
        for index, fqn in reversed(list(enumerate(chain.links))):
            upstream, grad = link_gradients(weights[fqn], activations[index], activations[index + 1], upstream)
            grads[fqn] += grad
        for fqn in trainable:
            adam(weights[fqn], grads[fqn], moments[fqn], step)
    return weights, losses


def _product(left: FloatArray, right: FloatArray) -> FloatArray:
    product: FloatArray = (left[:, :, None] * right[None, :, :]).sum(axis=1)
    return product
