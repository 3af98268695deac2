"""A sum of known features with weights from trials: least squares that do not stray far from what is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

Features = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Weight:
    """Gaussian prior of a regression weight: mean, standard deviation and lower bound."""

    value: float
    spread: float
    least: float = -inf


class RidgeRegression:
    """A figure as a sum of features. Without measurements the weights are those that are known; each measurement moves
    them as far as it says more than that.

    The most likely weights where errors are normal: of measurements by a share of their value that each one says, of
    each weight by its spread.
    """

    def __init__(self, known: Mapping[str, Weight]) -> None:
        self._known = dict(known)
        self.weights = {name: weight.value for name, weight in known.items()}

    def fit(self, measured: Sequence[tuple[Features, float, float]]) -> None:
        """Take the weights that follow from `measured` (features, the figure, by what share it may be off) and from the
        prior."""
        names = [name for name, weight in self._known.items() if weight.spread > 0]
        rows, targets = [], []
        for features, figure, error in measured:
            scale = 1 / (error * max(abs(figure), 1e-12))
            rest = figure - sum(self._known[name].value * size for name, size in features.items() if name not in names)
            rows.append([scale * features.get(name, 0.0) * self._known[name].spread for name in names])
            targets.append(scale * (rest - sum(features.get(name, 0.0) * self._known[name].value for name in names)))
        if not rows:
            return
        matrix = np.vstack([np.array(rows), np.eye(len(names))])
        found, *_ = np.linalg.lstsq(matrix, np.concatenate([np.array(targets), np.zeros(len(names))]), rcond=None)
        for name, steps in zip(names, found, strict=True):
            known = self._known[name]
            self.weights[name] = max(known.least, known.value + float(steps) * known.spread)

    def __call__(self, features: Features) -> float:
        return sum(self.weights[name] * size for name, size in features.items())
