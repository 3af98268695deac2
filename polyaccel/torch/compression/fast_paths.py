"""Modules of torch that read the weights of their layers in inference, and do not call them."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyaccel.torch.compression.layers import CompressedLayer


def keep_calls(model: nn.Module) -> None:
    """Let transformer layers of torch call their compressed layers: no fused kernel serves a layer that has hooks."""
    for parent in model.modules():
        for part in parent.modules() if isinstance(parent, nn.TransformerEncoderLayer) else ():
            if isinstance(part, CompressedLayer) and _note_call not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(_note_call)


def release_calls(layer: nn.Module) -> None:
    """Take the hook of `keep_calls` away."""
    for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is _note_call]:
        del layer._forward_pre_hooks[key]


def _note_call(layer: Any, inputs: Any) -> None:
    """Do nothing: torch only sees that there is a hook."""
