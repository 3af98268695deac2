"""The whole model of an engine whose rank has a stage of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyaccel.comm.base import Communicator
from polyaccel.torch.checkpoint.whole_model import own_blocks, require_fitting
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.pipeline.whole import merged_tensors, own_entries


class StagedStates(TorchEngine):
    """State dicts of the whole model, of which every stage has a part."""

    _line: Communicator
    """The stages in order."""
    _stages: int

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the state dict of the whole model. Every rank calls it.

        Args:
            exclude_frozen_parameters: Leave frozen parameters out.

        Returns:
            Entries of all stages, on every rank.
        """
        own = super().module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return merged_tensors(own, self._line, self.device) if self._stages > 1 else own

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state dict of the whole model. Every rank calls it.

        Args:
            state_dict: Entries of all stages, equal on all ranks.
            strict: Require the names of the model and no others.

        Raises:
            RuntimeError: Names or shapes differ, as in torch.
        """
        if self._stages > 1:
            own = self._own_module.state_dict(keep_vars=True)
            state_dict = own_entries(state_dict, own.keys(), self._line, strict=strict)
            blocks = own_blocks(self.adapter, state_dict)
            require_fitting(self._own_module, blocks, self.communicator, strict=strict)
        super().load_module_state_dict(state_dict, strict)

    def _entries_of_writer(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """As that of `TorchEngine`; every rank has the whole model meanwhile."""
        if self._stages == 1:
            return super()._entries_of_writer(exclude_frozen=exclude_frozen)
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen)
        if self.communicator.rank:
            return {}
        return {name: one.to("cpu", copy=True) if isinstance(one, Tensor) else one for name, one in state.items()}
