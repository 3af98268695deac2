"""Where the values of a model are: in separate memory, on this rank's device."""

from __future__ import annotations

import torch
from torch import nn

from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.torch.deferred_init.values import is_deferred, prepare
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.sharding.specs import require_own_memory


class ReadyModel(Rewrite):
    """A model of which nothing is on the meta device, and nothing deferred but parameters."""

    name = "deferred_init"

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises PolyaccelError inside zero.Init, and ShardingError for parameters that share memory."""
        waiting = tuple(name for name, one in context.model.named_parameters() if one.is_meta and not is_deferred(one))
        prepare(context.model)
        require_own_memory({name: one for name, one in context.model.named_parameters() if not is_deferred(one)})
        return AppliedRewrite(name=self.name, parameters=waiting) if waiting else None


class DevicePlacement(Rewrite):
    """Parameters and buffers on this rank's device."""

    name = "device"

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        device = torch_device_of(context.runtime.accelerator)
        moved = tuple(name for name, one in context.model.named_parameters() if one.device != device)
        _move(context.model, device)
        return AppliedRewrite(name=self.name, parameters=moved) if moved else None


def _move(model: nn.Module, device: torch.device) -> None:
    """Move `model` to `device`, keeping parameter objects; torch may exchange their contents."""
    future = torch.__future__
    as_before = future.get_swap_module_params_on_conversion()
    is_same_kind = torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))
    future.set_swap_module_params_on_conversion(as_before or not is_same_kind)
    try:
        model.to(device)
    finally:
        future.set_swap_module_params_on_conversion(as_before)
