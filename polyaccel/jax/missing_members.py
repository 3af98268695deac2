"""What an engine of JAX lacks, because functions have no such thing, and what to call in its place."""

from __future__ import annotations

from typing import Any

from polyaccel.errors import PolyaccelError

_INSTEAD = {
    "module": "call the function or module that initialize got with engine.params",
    "forward": "call engine.eval_batch(batch), or the function that initialize got with engine.params",
    "backward": "call engine.train_batch(batch), or engine.grad_step(batch) and engine.step()",
    "parameters": "read engine.params, a tree of arrays",
    "named_parameters": "read jax.tree_util.tree_leaves_with_path(engine.params)",
    "train": "train_batch and eval_batch set flags such as train= and deterministic= by themselves",
    "eval": "train_batch and eval_batch set flags such as train= and deterministic= by themselves",
    "no_sync": "call engine.grad_step(batch) for each micro-batch; step() reduces the gradients",
    "set_lr": 'assign engine.optimizer.param_groups[0]["lr"]',
    "compile": "leave it out: every step is compiled by jax.jit",
    "generate": "call the model's own generation with engine.params",
    "save_16bit_model": "save engine.state_dict()['params'] by orbax or safetensors",
    "to": "name the devices by JAX_PLATFORMS",
    "half": 'set "fp16": {"enabled": true} or "bf16": {"enabled": true} in the config',
    "replace": "call engine.load_state_dict with a changed engine.state_dict()",
    "apply_fn": "call the function or module that initialize got with engine.params",
    "tx": "keep the transformation that initialize got",
    "opt_state": "read engine.state_dict()['optimizer']",
    "update": "call engine.apply_gradients(gradients)",
}
"""Members of torch's engines, `TrainState` and `nnx.Optimizer`, by name, with what to do."""


class MissingMemberError(PolyaccelError, AttributeError):
    """An engine of JAX was asked for a member of another library's."""


class MissingMembers:
    """The part of an engine that names what to call in place of members that it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise MissingMemberError(f"an engine of JAX has no member {name}", hint=_INSTEAD[name], value=name)
        # A property that raised AttributeError itself ends here too, and raises it again.
        return object.__getattribute__(self, name)


def assigned_params_error() -> PolyaccelError:
    """The error of `engine.params = ...`."""
    return PolyaccelError(
        "engine.params cannot be assigned: the engine holds parameters with their states",
        hint='change the "params" of engine.state_dict(), and call engine.load_state_dict with it',
        value="params",
    )
