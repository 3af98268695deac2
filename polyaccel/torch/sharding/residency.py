"""Where the values of an engine's parameters are: `ParamResidency`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.ownership import OwnedParameters
from polyaccel.torch.sharding.sharded import hide, show
from polyaccel.zero.engine import ZeroEngine


class ParamResidency:
    """Shows parameters while the device has their values, and hides them while they are sharded or offloaded.

    `dtypes` are those of the parameters of `owned`, by name.
    """

    def __init__(self, owned: OwnedParameters, dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
        self._owned, self._dtypes, self._device = owned, dtypes, device
        self.away = ""
        """Names of the states that are offloaded now (`OffloadedStates`)."""

    def show(self, fqn: str, values: Tensor) -> None:
        """Give a parameter the memory of its values."""
        show(self._owned.by_name[fqn], self._owned.homes[fqn], values)

    def hide(self, fqn: str) -> None:
        """Leave a parameter without values."""
        hide(self._owned.by_name[fqn], self._owned.homes[fqn], self._dtypes[fqn], self._device)

    def require(self) -> None:
        """Raise ShardingError while states are offloaded."""
        if self.away:
            raise ShardingError(f"{self.away} are offloaded", hint="call engine.reload_states() first", value=self.away)

    def suspend(self, step: ZeroEngine) -> None:
        """Hide all parameters before they are offloaded: a use of one raises."""
        step.params.gathered.suspend()
        for fqn in self._dtypes:
            self.hide(fqn)

    def resume(self, step: ZeroEngine) -> None:
        """Show the parameters again; sharded ones stay sharded."""
        step.params.gathered.is_suspended = False
        for fqn in self._dtypes:
            place, slot = step.params.locate(fqn)
            if place.private_view is not None:
                self.show(fqn, place.private_view.view(slot.offset, slot.param.numel).raw)
