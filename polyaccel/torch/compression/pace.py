"""When a weight loses bits whose block's curvature delays it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.engine.policies.compression import WeightRule

END = 2**48
"""More steps than any schedule has."""
_PACE = "bit_pace"
_LOST, _NEXT, _FACTOR = range(3)


class BitPace:
    """The bits of a layer's weight, of block number `block` (None: outside of all).

    [Note: Bits by curvature]
    A bit is lost after `period` steps, and each further one after twice as many as before, times the block's factor at
    that time. The factor is 1 to 5, more for a block with more curvature (MoQ of DeepSpeed; the idea is Q-BERT's, Shen
    et al. 2020, arXiv 1909.05840, section 3.1). So bits depend on the past, and a buffer has them: the bits lost, the
    step at which the next is lost, and the last factor. It is equal on all ranks.
    """

    def __init__(self, layer: nn.Module, rule: WeightRule, block: int | None) -> None:
        self.layer, self.rule, self.block = layer, rule, block
        self._version, self._known = -1, (0, 0, 1)
        layer.register_buffer(_PACE, torch.tensor([0, rule.period, 1], dtype=torch.int64))

    def bits_at(self, step: int) -> int:
        """Return the bits after `step` optimizer steps; 0 before it begins."""
        if step < self.rule.offset:
            return 0
        lost = END if step >= END else self._numbers()[_LOST]
        return max(self.rule.target_bits, self.rule.start_bits - lost)

    def is_due(self, step: int) -> bool:
        """Whether a bit is lost when `step` optimizer steps are done."""
        lost, following, _ = self._numbers()
        return self.rule.start_bits - lost > self.rule.target_bits and step - self.rule.offset >= following

    def lose(self, factor: int | None) -> None:
        """Lose a bit, and wait longer for the next; a `factor` of None is the last one."""
        lost, following, last = self._numbers()
        factor = last if factor is None else factor
        self._values().copy_(torch.tensor([lost + 1, 2 * following * factor, factor]))

    def _numbers(self) -> tuple[int, ...]:
        """The buffer's numbers, read again where it was written: a device would have to be waited for."""
        values = self._values()
        if values._version != self._version:
            self._known, self._version = tuple(values.tolist()), values._version
        return self._known

    def _values(self) -> Tensor:
        values = self.layer._buffers[_PACE]
        assert values is not None  # registered by __init__
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_version": -1}
