"""A module's weights as its users know them, at every stage: whole, under the module's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyaccel.torch.engine import TorchEngine


def whole_state_dict(engine: TorchEngine, *, exclude_frozen: bool) -> dict[str, Any]:
    """See `TorchEngine.module_state_dict`."""
    module = engine.module
    state: dict[str, Any] = module.state_dict()
    if exclude_frozen:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not engine.adapter.is_trained(engine.adapter.names[parameter]):
                state.pop(name, None)
    return state


def load_whole_state_dict(engine: TorchEngine, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """See `TorchEngine.load_module_state_dict`."""
    module = engine.module
    module.load_state_dict(state_dict, strict=strict)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state_dict:
            engine.adapter.write(engine.adapter.names[parameter], state_dict[name])
    engine.adapter.on_update()
