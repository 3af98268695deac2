"""A torch module as the ZeRO step sees it: parameters by name, which become views into the step's buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import torch_dtype, wrap_torch
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ParamSpec
from polyaccel.engine.model_adapter import ModelAdapter
from polyaccel.errors import ShardingError
from polyaccel.torch.deferred_init.values import value_of
from polyaccel.torch.sharding.backward import BackwardRunner
from polyaccel.torch.sharding.buffers import broadcast_buffers
from polyaccel.torch.sharding.engine_registry import EngineParameters
from polyaccel.torch.sharding.gradients import AUTOGRAD_S, GradientAccess, install_grad_property, remove_grad_property
from polyaccel.torch.sharding.leaf_modules import set_configured_leaves
from polyaccel.torch.sharding.module_sharding import ModuleSharding
from polyaccel.torch.sharding.ownership import OwnedParameters, bind
from polyaccel.torch.sharding.pending import expect
from polyaccel.torch.sharding.residency import ParamResidency
from polyaccel.torch.sharding.specs import in_gradient_order, parameter_specs
from polyaccel.torch.sharding.tensor_shard import Blocks
from polyaccel.torch.sharding.units import find_units, parts_of_parameters, units_of_parameters
from polyaccel.zero.engine import ZeroEngine


class TorchAdapter(EngineParameters, ModelAdapter):
    """Parameters of `module`, those of `groups` trained, all floating ones held as `param_dtype` (None: as they are).

    `groups` are the optimizer's groups, each a sequence of parameters of the module. `passes` hands gradients to the
    step. `along` gives the ranks along axes of the mesh, where parameters are blocks. `checks_contents`: changes of
    gathered parameters are looked for at their values, not only at their version counters. `trained` names parameters
    that an earlier adapter of the engine trained, frozen now or not. With `sparse_gradients` those of all embedding
    layers travel as rows.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Sequence[nn.Parameter]],
        accelerator: Accelerator,
        param_dtype: DType | None,
        passes: BackwardRunner,
        *,
        along: Callable[[Collection[str]], Communicator] | None = None,
        checks_contents: bool = False,
        trained: Collection[str] = (),
        sparse_gradients: bool = False,
    ) -> None:
        self.module = module
        self.checks_contents = checks_contents
        self._accelerator = accelerator
        self._passes = passes
        self.engine_number = passes.number
        self._specs = parameter_specs(module, groups, param_dtype, trained, sparse_gradients=sparse_gradients)
        self.blocks = Blocks(self._specs, along)
        self._owned = OwnedParameters(module, self, {fqn for fqn, spec in self._specs.items() if spec.trainable})
        dtypes = {fqn: torch_dtype(spec.dtype) for fqn, spec in self._specs.items()}
        self.residency = ParamResidency(self._owned, dtypes, torch_device_of(accelerator))
        members = {member for group in groups for member in group}
        self.frozen_members = {fqn: member for fqn, member in self._owned.frozen.items() if member in members}
        """The members of the optimizer's groups that are laid out as frozen, by name."""
        self.sharding = ModuleSharding(module, self.names)
        self._step: ZeroEngine | None = None
        self._gradients: GradientAccess | None = None

    # What the step asks.

    def param_specs(self) -> Sequence[ParamSpec]:
        return in_gradient_order(self._specs)

    def read_param(self, fqn: str) -> Buffer:
        return self._accelerator.wrap(value_of(self.parameter(fqn)).contiguous())

    def on_bound(self, fqn: str, view: Buffer) -> None:
        self.residency.show(fqn, view.raw)
        self.sharding.on_bound(fqn, view)

    def on_freed(self, fqn: str) -> None:
        self._owned.before_freed(fqn, differs=partial(self._differs, fqn))
        self.residency.hide(fqn)
        self.sharding.on_freed(fqn)

    def unit_names(self) -> dict[str, str]:
        """The unit of each parameter, "" for the root unit."""
        return units_of_parameters(self.module, self.units)

    def part_names(self) -> dict[str, str]:
        return parts_of_parameters(self.module)

    @cached_property
    def units(self) -> dict[str, nn.Module]:
        """The modules whose parameters are unsharded together, by full name."""
        return find_units(self.module)

    # From the first step to the last.

    def attach(self, step: ZeroEngine) -> None:
        """Follow `step` from now on: its parameters are seen, and gradients handed over if it has an optimizer."""
        self._step = step
        self.sharding.attach(step, self.units, self._passes.on_user_backward)
        has_optimizer = step.optimizer is not None
        self._owned.begin(param.bucket.slots[0].param.fqn for param in step.params if param.shared is not None)
        trained = {fqn: self.parameter(fqn) for fqn, spec in self._specs.items() if spec.trainable and has_optimizer}
        self._gradients = GradientAccess(step, trained, self._passes)
        for parameter in self.names:
            AUTOGRAD_S.__set__(parameter, None)
            install_grad_property(parameter)
        self._passes.attach(step, trained, self.sharding.end_backward)

    def has_unfrozen(self) -> bool:
        """Whether a member of the optimizer's groups was frozen when it was laid out and requires a gradient now."""
        return any(member.requires_grad for member in self.frozen_members.values())

    def release(self, *, is_followed: bool = False) -> None:
        """`is_followed`: another adapter takes the module over, for the same engine."""
        self._give_back()
        self._passes.release()
        self.sharding.release()
        self._step = self._gradients = None
        for parameter in self.names:
            remove_grad_property(parameter)
        self._owned.leave()
        if not is_followed:
            set_configured_leaves(self.module, ())

    def _give_back(self) -> None:
        """Let each parameter have its values in separate memory. Collective where they are sharded."""
        if self._step is None:
            return
        self._step.params.gathered.close()
        for parameter, _ in self._owned.whole():  # with what users wrote there last
            bind(parameter, Tensor.data.__get__(parameter).clone())  # type: ignore[attr-defined]
        for param in self._step.params:
            if param.is_sharded:
                with self._step.params.unsharded_view(param.bucket.index) as full:
                    for slot in param.bucket.slots:
                        self.residency.show(slot.param.fqn, full.view(slot.offset, slot.param.numel).raw.clone())

    # What users ask of a parameter (`ParameterOwner`).

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """Each parameter's fully qualified name."""
        return self._owned.names

    def parameter(self, fqn: str) -> nn.Parameter:
        return self._owned.by_name[fqn]

    def is_trained(self, fqn: str) -> bool:
        return self._specs[fqn].trainable

    def is_sharded(self, fqn: str) -> bool:
        """Whether a parameter is whole only while it is gathered."""
        return self.sharding.bucket_of[fqn] in self.step.params.gathered

    @property
    def step(self) -> ZeroEngine:
        """Return the step with all states. Raises ShardingError when closed or offloaded."""
        self.require_nothing_away()
        if self._step is None:
            raise ShardingError("the engine of this parameter is closed", hint="use it before engine.destroy()")
        return self._step

    @property
    def gradient_scale(self) -> float:
        """The gradients that the step holds were multiplied with this."""
        return self._passes.loss_scale

    @property
    def unsharded_access_hint(self) -> tuple[str, str]:
        """Explain why a parameter is unavailable and how to access it."""
        if self._step is not None and self._step.params.gathered.is_suspended:
            return "is offloaded", "call engine.reload_states() first"
        hint = "read or change it inside `with polyaccel.zero.GatheredParameters([...])`, on all ranks"
        return "is sharded over the ranks now", hint

    # Values that shall not change meanwhile.

    def whole_values(self) -> dict[str, Tensor]:
        """The values of the parameters that this rank has whole now, by name; nothing is marked as handed out."""
        return {home.fqn: Tensor.data.__get__(parameter) for parameter, home in self._owned.whole()}  # type: ignore[attr-defined]

    def written(self) -> set[str]:
        """The whole parameters that users may have written to since the engine last had their values."""
        return {home.fqn for one, home in self._owned.whole() if home.is_handed_out or one._version != home.version}

    @property
    def lost_writes(self) -> list[str]:
        """The parameters that were changed while they were gathered for a pass, whose changes are lost."""
        return self._owned.lost_writes

    # Gradients, as users see them.

    def gradient(self, fqn: str) -> Tensor | None:
        return None if self._gradients is None or not self._gradients.trains(fqn) else self._gradients.read(fqn)

    def set_gradient(self, fqn: str, value: Tensor | None) -> bool:
        if self._gradients is None or not self._gradients.trains(fqn):
            return False
        self._gradients.write(fqn, value)
        return True

    def discard_gradients(self) -> None:
        """Forget all gradients: they were used, or their user does not want them."""
        self.step.discard_gradients()
        if self._gradients is not None:
            self._gradients.forget()

    # New values.

    @torch.no_grad()
    def write(self, fqn: str, value: Tensor) -> None:
        """Give a parameter, and its master weights in full precision, a value of its shape, equal on all ranks."""
        parameter, home = self.parameter(fqn), self._owned.homes[fqn]
        self.step.params.write(fqn, wrap_torch(value.detach().expand(parameter.shape).contiguous()))
        if home.is_whole:
            home.version = parameter._version

    def changed_params(self) -> Collection[str]:
        return self._owned.changed(self.step.user_writes.modified())

    def on_adopted(self, names: Collection[str]) -> None:
        self._owned.on_adopted(names)

    def divergence_hint(self, fqn: str) -> str:
        for module in self.sharding.modules_with(self.parameter(fqn)):
            if getattr(self.module.get_submodule(module), "max_norm", None) is not None:
                return (
                    f"each rank renormalises only the rows of {module!r} that its own batch has; build it with "
                    "max_norm=None and renormalise all rows on every rank after each step"
                )
        return super().divergence_hint(fqn)

    def adopt_changes(self) -> None:
        """Take over users' writes since the last update. Collective; raises ShardingError where they conflict."""
        self.step.adopt_changes()

    def adopt_here(self, fqn: str) -> None:
        """Take over this rank's writes to a parameter and its memory; the next update compares ranks."""
        step = self.step
        place, _ = step.params.locate(fqn)
        together = [slot.param.fqn for slot in place.bucket.slots if place.shared is not None] or [fqn]
        for name in together:
            if self._owned.homes[name].is_whole and step.user_writes.differs(name):
                step.user_writes.adopt(name)

    def forget_changes(self) -> None:
        """What the engine holds now counts, on all ranks, whatever users wrote into parameters before."""
        self.step.user_writes.forget()
        self._owned.on_adopted(home.fqn for _, home in self._owned.whole())

    def _differs(self, fqn: str) -> bool:
        """Whether a gathered parameter has other values than this rank's slice, as far as its gather is exact."""
        index = self.sharding.bucket_of.get(fqn)
        if self._step is None or index is None or not self._step.params.gathered.is_exact(index):
            return False
        return self._step.user_writes.differs(fqn)

    def before_update(self) -> None:
        """Note changed gradients before an update; drop gathered old values. Raises for unfrozen parameters."""
        self._owned.check_trained()
        self._passes.require_one_scale()
        if self._gradients is not None:
            self._gradients.note_writes()
        self.sharding.before_update()

    def on_update(self) -> None:
        """The parameters have new values: graphs built on the old ones must not be used any more."""
        self._owned.on_update()
        self.sharding.on_update()
        if self._step is not None and (arriving := self._step.params.arriving):
            for fqn, index in self.sharding.bucket_of.items():
                if index in arriving:
                    expect(self.parameter(fqn), partial(self._step.params.wait_all_gather, index))

    def broadcast_buffers(self, communicator: Communicator) -> None:
        """Begin with rank 0's buffers on every rank."""
        broadcast_buffers(self.module, self._accelerator, communicator)

    def require_nothing_away(self) -> None:
        """Raise ShardingError while states are offloaded, and where the parameters were handed over."""
        self.require_not_handed_over()
        self.residency.require()
