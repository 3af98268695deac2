"""A torch module as the ZeRO step sees it: names, views into buckets, and hooks that hand over gradients.

[Note: Passes]
A backward pass begins with `begin_pass` and ends with `end_pass`. `TorchEngine.backward` calls both. When a user calls
`loss.backward()` itself, the first sign of it (the gradient of an output of the engine, or of a parameter) begins the
pass, and a callback that autograd runs when the whole backward is done ends it. Begun at an output, that callback
belongs to the outermost backward, so reentrant checkpointing, which runs backwards inside the backward, ends nothing
early. Should a pass end early all the same, what comes after is late or a pass of its own: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_memory import torch_dtype, wrap_torch
from polyaccel.buffer import Buffer
from polyaccel.comm.base import CallInfo, Communicator
from polyaccel.engine.base import ModelAdapter
from polyaccel.errors import ShardingError
from polyaccel.torch.batch import device_of
from polyaccel.torch.deferred import value_of
from polyaccel.torch.external import external_parameters
from polyaccel.torch.homes import Home, leave, settle
from polyaccel.torch.leaf_modules import set_configured_leaves
from polyaccel.torch.outline import Outline
from polyaccel.torch.published import expect
from polyaccel.torch.sharded import ShardedParameter, hide, show
from polyaccel.torch.sites import Sites
from polyaccel.torch.specs import in_gradient_order, parameter_specs
from polyaccel.torch.state_dicts import StateDicts
from polyaccel.torch.units import find_units, units_of_parameters
from polyaccel.types import DType, ParamSpec
from polyaccel.zero.step import ZeroStep


class TorchAdapter(ModelAdapter):
    """Parameters of `module`, those of `groups` trained, all floating ones held as `param_dtype` (None: as they are).

    `groups` are the optimizer's groups, each a sequence of parameters of the module. `begin` is called when a backward
    pass begins that the engine did not begin itself, `end` when it is over.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Sequence[nn.Parameter]],
        accelerator: Accelerator,
        param_dtype: DType | None,
        begin: Callable[[], None],
        end: Callable[[], None],
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.module = module
        self.loss_scale = loss_scale
        """What the gradients that the step holds were multiplied with."""
        self.checks_contents = False
        """Look for changes of gathered parameters at their values, not only at their version counters."""
        self.away = ""
        """Names of what was offloaded by `torch.moving`."""
        self._accelerator = accelerator
        self._begin, self._end = begin, end
        self._params = dict(module.named_parameters())  # tied parameters appear once, under their first name
        self._names = {parameter: fqn for fqn, parameter in self._params.items()}
        self._outline = Outline(module)
        self._specs = parameter_specs(module, groups, param_dtype)
        self._frozen = {fqn: parameter for fqn, parameter in self._params.items() if not parameter.requires_grad}
        self._bucket_of: dict[str, int] = {}
        self._step: ZeroStep | None = None
        self._sites: Sites | None = None
        self._state_dicts: StateDicts | None = None
        self._changed_in_passing: list[str] = []
        self._is_ending = False
        self._handles: list[Any] = []
        self._homes = {fqn: settle(parameter, fqn, self) for fqn, parameter in self._params.items()}
        self.gradient_factor = 1.0
        """What gradients of the present pass are multiplied with before they enter their bucket."""

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """Each parameter's fully qualified name."""
        return self._names

    # What the step asks.

    def param_specs(self) -> Sequence[ParamSpec]:
        return in_gradient_order(self._specs)

    def read_param(self, fqn: str) -> Buffer:
        return self._accelerator.wrap(value_of(self._params[fqn]).contiguous())

    def on_bound(self, fqn: str, view: Buffer) -> None:
        show(self._params[fqn], self._homes[fqn], view.raw)
        if self._sites is not None:
            self._sites.on_bound(self._bucket_of[fqn], view)

    def on_freed(self, fqn: str) -> None:
        parameter = self._params[fqn]
        if type(parameter) is not ShardedParameter and self._homes[fqn].version != parameter._version:
            self._changed_in_passing.append(fqn)
        self._hide(fqn)
        if self._sites is not None:
            self._sites.on_freed(self._bucket_of[fqn])

    def release(self) -> None:
        self._give_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for hooks in (self._sites, self._state_dicts):
            if hooks is not None:
                hooks.release()
        self._step = self._sites = self._state_dicts = None
        leave(self._names)
        set_configured_leaves(self.module, ())

    def _give_back(self) -> None:
        """Let each parameter have its values in memory of its own. Collective where they are sharded."""
        if self._step is None:
            return
        self._step.params.gathering.close()
        for place in self._step.params:
            with self._step.params.peek(place.bucket.index) as full:
                for slot in place.bucket.slots:
                    values = full.view(slot.offset, slot.param.numel).raw.clone()
                    fqn = slot.param.fqn
                    show(self._params[fqn], self._homes[fqn], values)

    # Sharded parameters.

    @cached_property
    def units(self) -> dict[str, nn.Module]:
        """The modules whose parameters are unsharded together, by full name."""
        return find_units(self.module)

    def unit_names(self) -> dict[str, str]:
        """The unit of each parameter, "" for the root unit."""
        return units_of_parameters(self.module, self.units)

    def _gather_at_use(self, step: ZeroStep) -> None:
        """Gather sharded parameters around the modules that use them."""
        buckets_of: dict[str, list[int]] = {}
        for fqn, index in self._bucket_of.items():
            if index in step.params.gathering:
                unit = step.layout.buckets[index].kind.unit
                owners = [unit] if unit else self._owners(self._params[fqn])
                for owner in owners:
                    if index not in buckets_of.setdefault(owner, []):
                        buckets_of[owner].append(index)
        if buckets_of:
            self._sites = Sites(self.module, step, buckets_of, self._on_backward)
            self._state_dicts = StateDicts(self.module, step)
            for module in self.module.modules():
                for parameter in external_parameters(module):
                    self.register_external(module, parameter)

    def _owners(self, parameter: nn.Parameter) -> list[str]:
        """The modules that have `parameter` themselves, by full name."""
        return [
            name
            for name, module in self.module.named_modules()
            if any(own is parameter for own in module._parameters.values())
        ]

    @property
    def step(self) -> ZeroStep:
        """The step that is followed, with all its states. Raises ShardingError once the engine is closed, or while
        states are offloaded."""
        if self._step is None:
            raise ShardingError("the engine of this parameter is closed", cure="use it before engine.destroy()")
        self.require_nothing_away()
        return self._step

    def require_nothing_away(self) -> None:
        """Raise ShardingError while states are offloaded."""
        if self.away:
            raise ShardingError(f"{self.away} are offloaded", cure="call engine.reload_states() first", value=self.away)

    @property
    def whereabouts(self) -> tuple[str, str]:
        """Where a parameter without values is, and what its user can do."""
        if self._is_suspended:
            return "is offloaded", "call engine.reload_states() first"
        return (
            "is sharded over the ranks now",
            "read or change it inside `with polyaccel.zero.GatheredParameters([...])`, on all ranks",
        )

    def parameter(self, fqn: str) -> nn.Parameter:
        return self._params[fqn]

    def demand(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Make `parameters` whole if that is safe now; False if it is not."""
        if self._sites is None or self._is_suspended:
            return False
        return self._sites.demand({self._bucket_of[self._names[parameter]] for parameter in parameters})

    def answer(self, func: Callable[..., Any], *args: Any) -> Any:
        """The result of an operation on a sharded parameter as part of saving or loading a module; None if it is
        not."""
        if self._state_dicts is None or self._is_suspended:
            return None
        return self._state_dicts.answer(func, *args)

    @property
    def _is_suspended(self) -> bool:
        return self._step is not None and self._step.params.gathering.is_suspended

    @torch.no_grad()
    def write(self, fqn: str, value: Tensor) -> None:
        """Give a parameter, and its master weights in full precision, a value of its shape, equal on all ranks."""
        parameter = self._params[fqn]
        self.step.params.write(fqn, wrap_torch(value.detach().expand(parameter.shape).contiguous()))
        if type(parameter) is not ShardedParameter:
            self._homes[fqn].version = parameter._version

    def is_trained(self, fqn: str) -> bool:
        return self._specs[fqn].trainable

    def is_sharded(self, fqn: str) -> bool:
        """Whether a parameter is whole only while it is gathered."""
        return self._bucket_of[fqn] in self.step.params.gathering

    def register_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather `parameter` around `module` too, if it is sharded."""
        fqn = self._names[parameter]
        if self._sites is not None and self.is_sharded(fqn):
            self._sites.add_buckets(module, [self._bucket_of[fqn]])

    def unregister_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Undo `register_external`."""
        if self._sites is not None:
            self._sites.remove_buckets(module, [self._bucket_of[self._names[parameter]]])

    def suspend(self) -> None:
        """Parameters are about to be offloaded: whoever needs one is told."""
        self.step.params.gathering.suspend()
        for fqn in self._params:
            self._hide(fqn)

    def resume(self) -> None:
        """Parameters are back; the sharded ones are sharded still."""
        params = self.step.params
        params.gathering.is_suspended = False
        for fqn, parameter in self._params.items():
            place, slot = params.locate(fqn)
            if place.full is not None:
                show(parameter, self._homes[fqn], place.full.view(slot.offset, slot.param.numel).raw)

    def _hide(self, fqn: str) -> None:
        hide(self._params[fqn], self._homes[fqn], torch_dtype(self._specs[fqn].dtype), self._device)

    @cached_property
    def _device(self) -> torch.device:
        return device_of(self._accelerator)

    def broadcast_buffers(self, communicator: Communicator) -> None:
        """Begin with rank 0's buffers (running statistics and the like) on every rank."""
        if communicator.world_size == 1:
            return
        for buffer in self.module.buffers():
            flat = self._accelerator.wrap(buffer.detach().contiguous())
            communicator.broadcast(flat, 0, info=CallInfo("initial buffers"))
            buffer.copy_(flat.raw.view(buffer.shape))

    # Gradients.

    def attach(self, step: ZeroStep) -> None:
        """Follow `step` from now on: its parameters are seen, and gradients handed over if it has an optimizer."""
        self._step = step
        self._bucket_of = {fqn: step.layout.locate(fqn)[0].index for fqn in self._params}
        self._gather_at_use(step)
        for fqn, parameter in self._params.items():
            parameter.grad = None
            if self._specs[fqn].trainable and step.optimizer is not None:
                hook = self._make_hook(fqn)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def watch_outputs(self, outputs: Any) -> None:
        """Begin a pass when the gradient of any of `outputs` appears. See [Note: Passes]."""
        for leaf in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]

    def end_pass(self) -> None:
        """The backward pass is over, whether it succeeded or not."""
        self._is_ending = False
        if self._sites is not None:
            self._sites.end_pass()

    def on_update(self) -> None:
        """The parameters have new values: graphs built on the old ones must not be used any more."""
        whole = self._whole()
        known = [(parameter, home) for parameter, home in whole if parameter._version == home.version]
        torch.autograd.graph.increment_version([parameter for parameter, _ in whole])
        for parameter, home in known:
            home.version = parameter._version
        if self._sites is not None:
            self._sites.on_update()
        if self._step is not None and (arriving := self._step.params.arriving):
            for fqn, index in self._bucket_of.items():
                if index in arriving:
                    expect(self._params[fqn], partial(self._step.params.wait_published, index))

    def adopt_changes(self) -> None:
        """Take over what the user wrote into parameters since the last update, as `load_state_dict` does.

        Raises ShardingError if a forward or backward pass changed a sharded one, for that is lost.
        """
        lost, self._changed_in_passing = self._changed_in_passing, []
        if lost:
            raise ShardingError(
                f"parameter {lost[0]!r} was changed while it was gathered for a forward or backward pass",
                cure="change it between passes, inside polyaccel.zero.GatheredParameters([...], modifier_rank=0)",
                value=lost,
            )
        for parameter, home in self._whole():
            if parameter._version != home.version:
                self.step.params.note_change(home.fqn)
                self.step.params.adopt(home.fqn)
                home.version = parameter._version

    def _whole(self) -> list[tuple[nn.Parameter, Home]]:
        """The parameters that have their values now."""
        return [
            (parameter, self._homes[fqn])
            for fqn, parameter in self._params.items()
            if type(parameter) is not ShardedParameter
        ]

    def check_trained(self) -> None:
        """Raise ShardingError if a parameter that was frozen when the engine was built, or did not exist, is trained
        now."""
        for fqn, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ShardingError(
                    f"parameter {fqn!r} was frozen when the engine was built and requires a gradient now",
                    cure="call polyaccel.initialize again after changing requires_grad",
                    value=fqn,
                )
        for fqn, parameter in self._outline.added(self._names):
            if parameter.grad is not None:
                raise ShardingError(
                    f"parameter {fqn!r} has a gradient, but the engine was built without it and does not update it",
                    cure="add modules before polyaccel.initialize, or engine.destroy(), add them and initialize again",
                    value=fqn,
                )

    def _on_output_gradient(self, gradient: Tensor) -> None:
        self._ensure_pass()

    def _make_hook(self, fqn: str) -> Callable[[nn.Parameter], None]:
        adapter = ref(self)  # Python's garbage collector does not see the references of a parameter's hooks

        def take(parameter: nn.Parameter) -> None:
            self = adapter()
            gradient = parameter.grad
            if gradient is None or self is None or self._step is None:
                return
            parameter.grad = None
            if gradient.is_sparse:
                raise ShardingError(
                    f"the gradient of {fqn!r} is sparse", cure="build the layer with sparse=False", value=fqn
                )
            self._ensure_pass()
            if self.gradient_factor != 1.0:
                gradient.mul_(self.gradient_factor)
            self._step.add_gradient(fqn, self._accelerator.wrap(gradient.contiguous()))

        return take

    def _on_backward(self) -> None:
        """The backward of a module with sharded parameters begins; without an optimizer it is nobody's pass."""
        if self._step is not None and self._step.optimizer is not None:
            self._ensure_pass()
        elif not self._is_ending:
            self._is_ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def _ensure_pass(self) -> None:
        if self._step is not None and not self._step.in_pass:
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
