"""The part of an engine that evaluates averaged weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from polyaccel.zero.averaged_weights import averaged_weights
from polyaccel.zero.engine import ZeroEngine


class AveragesWeights:
    """The part of an engine that puts averaged weights in the place of the trained ones."""

    zero: ZeroEngine
    optimizer: Any

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Evaluate and export averaged weights: inside the block they are the parameters of the module.

        They are the moving average of the config's `ema`, or what a schedule-free optimizer evaluates. Collective at
        both ends. Backward passes, updates and checkpoints are errors inside. Afterwards the weights have the bits that
        they had.

        Returns:
            A context manager.

        Raises:
            PolyaccelError: The run averages no weights, or the block is open already.
        """
        return averaged_weights(self.zero, () if self.optimizer is None else self.optimizer.param_groups)
