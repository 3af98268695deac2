"""`state_dict` and `load_state_dict` of a module whose parameters are sharded: whole values in, whole values out.

[Note: State dicts of sharded modules]
While any part of the module makes its state dict, `detach` of a sharded parameter, which is how torch takes its values,
gathers the parameter's bucket and answers with a copy. One bucket is whole at a time. So every rank must ask for the
same state dicts, even if only one writes them. Loading needs no gathering: each rank keeps its slice of the given
values, master weights in full precision, and torch's own `copy_` into the placeholder is answered by doing nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.core.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.ownership import record_of
from polyaccel.torch.sharding.sharded import EngineHook, takes_hooks
from polyaccel.zero.engine import ZeroEngine


class StateDicts:
    """Hooks on all parts of `module` that let its sharded parameters be saved and loaded."""

    def __init__(self, module: nn.Module, step: ZeroEngine) -> None:
        self._params = step.params
        self._depth = 0
        self._copies: dict[str, Tensor] = {}
        """The entries that the state dict under construction has already, so that tied ones stay tied."""
        self._index: int | None = None
        self._whole: Buffer | None = None
        """Bucket `_index`, whole until `_look` is closed."""
        self._look = ExitStack()
        self._loading: dict[str, bool] = {}
        """Parameters whose module is loading, and whether their values were taken already."""
        self._handles = [handle for part in module.modules() if takes_hooks(part) for handle in self._hook(part)]

    def release(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def handle(self, func: Callable[..., Any], *args: Any) -> Any:
        """The result of `func` on a sharded parameter, if that is part of saving or loading; else None."""
        home = record_of(args[0]) if args and isinstance(args[0], nn.Parameter) else None
        if home is None:
            return None
        if func is Tensor.detach and self._depth:
            return self._copy_of(home.fqn)
        if func is Tensor.copy_ and home.fqn in self._loading:
            if not self._loading[home.fqn]:
                self._take(home.fqn, args[1])
            return args[0]
        return None

    def _hook(self, part: nn.Module) -> Iterator[Any]:
        def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            self._depth += 1

        def after_save(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                self._turn_to(None)
                self._copies.clear()

        def before_load(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *_: Any) -> None:
            self._before_load(module, state_dict, prefix, assign=local_metadata.get("assign_to_params_buffers", False))

        def after_load(module: nn.Module, incompatible_keys: Any) -> None:
            for parameter in module.parameters(recurse=False):
                home = record_of(parameter)
                if home is not None:
                    self._loading.pop(home.fqn, None)

        yield part.register_state_dict_pre_hook(EngineHook(before_save))  # type: ignore[no-untyped-call]
        yield part.register_state_dict_post_hook(EngineHook(after_save))  # type: ignore[no-untyped-call]
        yield part.register_load_state_dict_pre_hook(EngineHook(before_load))  # type: ignore[no-untyped-call]
        yield part.register_load_state_dict_post_hook(EngineHook(after_load))  # type: ignore[no-untyped-call]

    def _copy_of(self, fqn: str) -> Tensor:
        if fqn not in self._copies:
            place, slot = self._params.locate(fqn)
            whole = self._turn_to(place.bucket.index)
            assert whole is not None  # for a bucket
            self._copies[fqn] = whole.view(slot.offset, slot.param.numel).raw.clone().view(slot.param.shape)
        return self._copies[fqn]

    def _turn_to(self, index: int | None) -> Buffer | None:
        """Make that bucket whole, and no other."""
        if index != self._index:
            self._look.close()
            self._index = index
            self._whole = None if index is None else self._look.enter_context(self._params.unsharded_view(index))
        return self._whole

    def _before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *, assign: bool) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            home = record_of(parameter)
            if home is None:
                continue
            if assign:
                raise ShardingError(
                    f"load_state_dict(assign=True) would cut parameter {home.fqn!r} off from its engine",
                    hint="use assign=False",
                    value=home.fqn,
                )
            value = state_dict.get(prefix + name)
            self._loading[home.fqn] = False
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                self._take(home.fqn, value)

    @torch.no_grad()
    def _take(self, fqn: str, value: Tensor) -> None:
        _, slot = self._params.locate(fqn)
        flat = value.detach().expand(slot.param.shape).contiguous()
        self._params.write(fqn, wrap_torch(flat))
        self._loading[fqn] = True
