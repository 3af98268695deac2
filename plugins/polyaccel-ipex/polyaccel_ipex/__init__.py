"""The Intel extension for PyTorch under polyaccel. Importing this imports neither it nor torch."""

from __future__ import annotations

from typing import Any

from polyaccel.errors import ShardingError


def optimize(model: Any, **options: Any) -> Any:
    """`ipex.optimize(model, **options)` in place, for a model that `polyaccel.initialize` gets afterwards.

    Weights keep their layout and no optimizer is taken, for the engine has both. Raises ShardingError for options that
    would change that.
    """
    for name in ("optimizer", "weights_prepack"):
        if options.get(name):
            raise ShardingError(
                f"{name}={options[name]!r} cannot be combined with an engine that holds the weights",
                hint=f"leave {name} out; the fused optimizer steps are in the accelerator's kernel table",
                value=options[name],
            )
    import intel_extension_for_pytorch as ipex
    import torch

    options = {**options, "weights_prepack": False, "inplace": True}
    if not model.training:
        return ipex.optimize(model, **options)
    # It insists on an optimizer to train with; this one never steps.
    unused = torch.optim.SGD(model.parameters(), lr=0.0)
    return ipex.optimize(model, optimizer=unused, fuse_update_step=False, **options)[0]
