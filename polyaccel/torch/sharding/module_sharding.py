"""The sharded parameters of a module: unsharded around the modules that use them, saved and loaded whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.core.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.compiled_units import suits_units
from polyaccel.torch.sharding.hooks import UnshardHooks
from polyaccel.torch.sharding.sharded import takes_hooks
from polyaccel.torch.sharding.state_dicts import StateDicts
from polyaccel.torch.sharding.units import external_parameters
from polyaccel.zero.engine import ZeroEngine


class ModuleSharding:
    """Unshard hooks and state-dict hooks of `module`, whose parameters have `names`; none before `attach`."""

    def __init__(self, module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        self._module = module
        self._names = names
        self.bucket_of: dict[str, int] = {}
        """The bucket of each parameter, by name."""
        self._sharded: Collection[int] = ()
        self._hooks: UnshardHooks | None = None
        self._state_dicts: StateDicts | None = None
        self._step: ZeroEngine | None = None

    def attach(self, step: ZeroEngine, units: Collection[str], begin: Callable[[], None]) -> None:
        """Gather `step`'s parameters around their modules; `begin` runs before a module's backward."""
        self.bucket_of = {fqn: step.layout.locate(fqn)[0].index for fqn in self._names.values()}
        self._sharded = [param.bucket.index for param in step.params if param.is_sharded]
        self._step = step
        buckets_of: dict[str, list[int]] = {}
        for parameter, fqn in self._names.items():
            index = self.bucket_of[fqn]
            if index in self._sharded:
                unit = step.layout.buckets[index].kind.unit
                for name in [unit] if unit in units else self.modules_with(parameter):  # "" is one if it is a leaf
                    if index not in buckets_of.setdefault(name, []):
                        buckets_of[name].append(index)
        if buckets_of:
            self._require_hooks()
            self._hooks = UnshardHooks(self._module, step, buckets_of, begin)
            self._state_dicts = StateDicts(self._module, step)
            for module in self._module.modules():
                for parameter in external_parameters(module):
                    self.register_external(module, parameter)

    def _require_hooks(self) -> None:
        for name, module in self._module.named_modules():
            if takes_hooks(module):
                continue
            if any(self._is_sharded(parameter) for parameter in module.parameters()):
                raise ShardingError(
                    f"{name or 'the model'!r} is a TorchScript module, on which no hooks can be put, so that stage 3 "
                    "cannot gather its parameters when it runs",
                    hint="use torch.compile in place of torch.jit.script, or stage 2",
                    value=name,
                )

    def _is_sharded(self, parameter: nn.Parameter) -> bool:
        return self.bucket_of[self._names[parameter]] in self._sharded

    def modules_with(self, parameter: nn.Parameter) -> list[str]:
        """Return the modules that have `parameter` themselves, by full name."""
        return [
            name
            for name, module in self._module.named_modules()
            if any(own is parameter for own in module._parameters.values())
        ]

    def units_to_compile(self) -> list[nn.Module]:
        """The modules to compile one by one, because parameters are gathered around them; none where none are."""
        return [] if self._hooks is None else [one for one in self._hooks.innermost() if suits_units(one)]

    def release(self) -> None:
        """Take all hooks off."""
        for hooks in (self._hooks, self._state_dicts):
            if hooks is not None:
                hooks.release()
        self._hooks = self._state_dicts = self._step = None

    @property
    def _is_suspended(self) -> bool:
        return self._step is not None and self._step.params.gathered.is_suspended

    # What the adapter reports.

    def on_bound(self, fqn: str, view: Buffer) -> None:
        """A parameter was given values in `view`."""
        if self._hooks is not None:
            self._hooks.on_bound(self.bucket_of[fqn], view)

    def on_freed(self, fqn: str) -> None:
        """A parameter is sharded again."""
        if self._hooks is not None:
            self._hooks.on_freed(self.bucket_of[fqn])

    def end_backward(self, is_whole: bool) -> None:
        """The backward pass is over (`is_whole`), or given up."""
        if self._hooks is not None:
            self._hooks.end_backward(is_whole)

    def before_update(self) -> None:
        """Parameters are about to change: nothing stays gathered for graphs of the old values."""
        if self._hooks is not None:
            self._hooks.before_update()

    def on_update(self) -> None:
        """Parameters have changed: graphs built on the old values are of no use."""
        if self._hooks is not None:
            self._hooks.on_update()

    # What users do (`ShardedUse`).

    def try_unshard(self, parameters: Iterable[nn.Parameter]) -> bool:
        if self._hooks is None or self._is_suspended:
            return False
        return self._hooks.try_unshard({self.bucket_of[self._names[parameter]] for parameter in parameters})

    def handle_state_dict_op(self, func: Callable[..., Any], *args: Any) -> Any:
        if self._state_dicts is None or self._is_suspended:
            return None
        return self._state_dicts.handle(func, *args)

    def saved_tensor_hooks(self) -> saved_tensors_hooks | None:
        return None if self._hooks is None else self._hooks.saved_tensor_hooks()

    def one_pass(self) -> AbstractContextManager[None]:
        """Let all forward passes inside be one pass of the ranks together. Collective with sharded parameters."""
        return nullcontext() if self._hooks is None else self._hooks.one_pass()

    def register_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        if self._hooks is not None and self._is_sharded(parameter):
            self._hooks.add_buckets(module, [self.bucket_of[self._names[parameter]]])

    def unregister_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        if self._hooks is not None:
            self._hooks.remove_buckets(module, [self.bucket_of[self._names[parameter]]])
