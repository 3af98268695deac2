"""Rewrites of a user's JAX function and its parameters: one object for each, in the order in which they are applied.

A function is not changed in place: a rewrite leaves in `RewriteContext` what the engine's program is traced from. The
layers of other stages go first. What the program computes with follows, then the optimizer. ZeRO is last, because it
lays out the parameters that are left. `REWRITES` is the list, and `polyaccel.torch.rewrites` its counterpart for torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

import jax
import jax.numpy as jnp

from polyaccel.core.types import DType
from polyaccel.engine.policies.engines import native_optimizer_of, require_wide_states
from polyaccel.engine.policies.modules import RecomputePolicy, recompute_policy_of
from polyaccel.engine.policies.muon import MUON
from polyaccel.engine.rank_consistency import require_same_training
from polyaccel.engine.rewrites import AppliedRewrite, BaseContext, BaseRewrite
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.jax.carried_state import Reduction
from polyaccel.jax.modules import as_function
from polyaccel.jax.muon import MUON_RATES, transformation_of
from polyaccel.jax.native_keys import native_problems
from polyaccel.jax.optax_on_tree import optax_optimizer
from polyaccel.jax.owners.exchange import Owners
from polyaccel.jax.pipeline import LayerList
from polyaccel.jax.pipeline_stages import StageCut, cut_of_stages, owners_of
from polyaccel.jax.program.units import UnitRecomputation
from polyaccel.jax.pytree import dtype_of, named_leaves
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.pipeline.csv_schedule import write_table
from polyaccel.pipeline.table import PipelineError
from polyaccel.zero.plan.policy import Placement
from polyaccel.zero.update.optimizers import SliceOptimizer

_RECOMPUTATION = frozenset({"enabled", "keep"})
"""The keys of `activation_checkpointing` that mean something for JAX."""


class RewritableEngine(Protocol):
    """An engine under construction, as `ZeroShards` sees it."""

    def shard_parameters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Lay parameters out in buckets; return units gathered apart, and all names. Collective."""


@dataclass(kw_only=True)
class RewriteContext(BaseContext):
    """What rewrites read, and what they leave for the engine."""

    model: Any
    """The user's model; after `FunctionOfModel`, a function of parameters, batch and key."""
    params: Any
    """The tree of its parameters; after `PipelineLayers`, with None for layers of other stages."""
    runtime: EngineBuilder
    state: Any = None
    """The state that the function carries from micro-batch to micro-batch; None without one."""
    state_reduction: Reduction = "mean"
    """How ranks agree on the state."""
    client: Any = None
    """The optimizer that the script gave."""
    seed: int = 0
    stacked: Sequence[str] = ()
    """Names of subtrees of `params` with a leading axis over layers."""
    own_devices: int = 1
    """Parts of this process's batch in native mode: one a device, or one for a mesh of the script's own."""
    partition: Any = None
    """The mesh of the script's own, a `polyaccel.jax.partitioned.places.Partition`; None without one."""
    param_dtype: DType | None = None
    """The type in which floating parameters are held; None: as they are."""
    cast_inputs: Any = None
    """The type to which floating arrays of a batch are converted; None: as they are."""
    recomputation: UnitRecomputation | None = None
    slice_optimizer: SliceOptimizer | None = None
    groups: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """Hyperparameters of the config's optimizer. A group with a `name` has the hyperparameter `lr` of that name."""
    cut: StageCut | None = None
    """The layers of this rank's stage; None without a pipeline."""
    with_units: bool = True
    """Whether repeated blocks of a module are units; a run of a verification may switch it off."""
    on_slices: bool = True
    """Whether a transformation of optax may run on slices; a run of a verification may switch it off."""
    engine: RewritableEngine | None = None
    """The engine, for the rewrites that come after it was made."""

    @property
    def is_native(self) -> bool:
        """Whether JAX exchanges and updates."""
        return self.runtime.config.jax.execution == "native"

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters rest cut over ranks."""
        return self.runtime.policy.params is Placement.SHARDED

    @property
    def offloads_states(self) -> bool:
        """Whether optimizer states rest in host memory, or in files."""
        return self.runtime.config.zero_optimization.offload_optimizer.device != "none"

    @property
    def averages_aux(self) -> bool:
        """Whether auxiliary outputs are averaged over the micro-batches and ranks of a step."""
        return self.runtime.config.jax.aux == "mean"

    @property
    def has_whole_parameters(self) -> bool:
        """Whether this rank has all parameters and optimizer states, as the caller's arrays."""
        runtime = self.runtime
        is_replicated = runtime.policy.optim is not Placement.SHARDED or runtime.communicator.world_size == 1
        return is_replicated and not self.is_native and not self.stacked and self.stages == 1

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.runtime.mesh.size_of(("pipe",))

    @property
    def has_stages(self) -> bool:
        """Whether the layers of a list lie on several pipeline stages."""
        return self.stages > 1 and not self.is_native

    def stage_cut(self) -> StageCut:
        """Return the layers over stages, before and after this rank's are left alone."""
        if self.cut is None:
            self.cut = cut_of_stages(self.runtime, self.model, self.params)
        return self.cut

    def release(self) -> None:
        """Drop the caller's arrays, after the engine has read them."""
        self.params = self.state = self.client = self.engine = None


class Rewrite(BaseRewrite[RewriteContext]):
    """One kind of change to a function of JAX and its parameters."""


class FunctionOfModel(Rewrite):
    """A module, or a list of layers, as a function of its parameters."""

    name = "model"

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises PolyaccelError for what is not a model with parameters, see `as_function`."""
        before = context.model
        if isinstance(before, (list, tuple)):
            layers = LayerList.from_model(before, context.params, context.state)
            context.model, context.params = layers, list(context.params)
            context.state = None if context.state is None else list(context.state)
            return AppliedRewrite(name=self.name, modules=tuple(map(str, range(len(layers.layers)))))
        found = as_function(before, context.params, context.state, with_units=context.with_units)
        context.model, context.params, context.state = found
        return None if context.model is before else AppliedRewrite(name=self.name, modules=("",))


class OptimizerShards(Rewrite):
    """An optimizer that updates flat shards of the parameters in place of whole ones."""

    name = "optimizer"

    def is_on(self, context: RewriteContext) -> bool:
        return context.client is not None or context.runtime.config.optimizer is not None

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises PolyaccelError, ConfigError or ShardingError for an optimizer that cannot be run on shards."""
        _make_optimizer(context)
        leaves = named_leaves(context.params)[0]
        trained = tuple(fqn for fqn, leaf in leaves.items() if dtype_of(fqn, leaf).is_floating)
        return AppliedRewrite(name=self.name, parameters=trained)


class PipelineLayers(Rewrite):
    """A list of layers, of which this rank has those of its stage."""

    name = "pipeline"

    def is_on(self, context: RewriteContext) -> bool:
        return context.has_stages

    def check(self, context: RewriteContext) -> None:
        if problems := list(_pipeline_problems(context)):
            raise ConfigError(problems)

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        """Raises PipelineError for a stage without parameters, ShardingError where ranks have other layers."""
        runtime, layers, params, cut = context.runtime, context.model, context.params, context.stage_cut()
        own, table, stage = cut.layers_of(cut.stage), cut.table, cut.stage
        mine = [tree if index in own else None for index, tree in enumerate(params)]
        if not jax.tree.leaves(mine):
            raise PipelineError(
                f"stage {stage} has the layers {sorted(own)}, none of which has parameters",
                hint='use fewer stages, or another "pipeline": {"partition": ...}',
                value=stage,
            )
        described = f"the schedule {table.name}, whose table has the sum {crc32(write_table(table).encode()):08x}"
        names = layers.names()
        placed = [
            f"chunk {chunk} on stage {at} with layers {[(index, names[index]) for index in part]}"
            for chunk, (at, part) in enumerate(zip(table.placement, cut.parts, strict=True))
        ]
        require_same_training(runtime.communicator, [described, *placed])
        context.params = mine
        if context.state is not None:
            context.state = [tree if index in own else None for index, tree in enumerate(context.state)]
        gone = [fqn for fqn in named_leaves(params)[0] if int(fqn.partition(".")[0]) not in own]
        others = tuple(str(index) for index in range(len(params)) if index not in own)
        return AppliedRewrite(name=self.name, modules=others, parameters=tuple(gone))


class Precision(Rewrite):
    """Floating parameters, and with fp16 those of batches, in a type of 16 bits."""

    name = "precision"

    def is_on(self, context: RewriteContext) -> bool:
        return context.runtime.param_dtype is not None

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        context.param_dtype = context.runtime.param_dtype
        context.cast_inputs = jnp.float16 if context.runtime.casts_inputs else None
        dtypes = {fqn: dtype_of(fqn, leaf) for fqn, leaf in named_leaves(context.params)[0].items()}
        converted = [fqn for fqn, own in dtypes.items() if own.is_floating and own is not context.param_dtype]
        return AppliedRewrite(name=self.name, parameters=tuple(converted))


class ActivationCheckpointing(Rewrite):
    """Units of the function whose activations are computed again in the backward pass."""

    name = "activation_checkpointing"

    def is_on(self, context: RewriteContext) -> bool:
        return recompute_policy_of(context.runtime.config) != RecomputePolicy()

    def check(self, context: RewriteContext) -> None:
        section, key = context.runtime.config.activation_checkpointing, "activation_checkpointing"
        problems = [
            Problem(f"{key}.{name}", value, "not available for JAX", "use jax.checkpoint in the function")
            for name, value in section.model_dump().items()
            if value and name not in _RECOMPUTATION
        ]
        if others := [name for name in section.keep if name != "matmul"]:
            problems.append(Problem(f"{key}.keep", others, "not available for JAX", 'keep "matmul"'))
        if problems:
            raise ConfigError(problems)

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        """A function without units is refused when it is traced."""
        policy = recompute_policy_of(context.runtime.config)
        if policy.recomputes_blocks:
            context.recomputation = UnitRecomputation(keeps_products="matmul" in policy.keep)
        return AppliedRewrite(name=self.name)


class NativeMesh(Rewrite):
    """The function in one program over all devices, and a batch over those of this process."""

    name = "jax"

    def is_on(self, context: RewriteContext) -> bool:
        return context.is_native

    def check(self, context: RewriteContext) -> None:
        if problems := list(native_problems(context.runtime.config)):
            raise ConfigError(problems)

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        return AppliedRewrite(name=self.name, batch_parts=context.own_devices)


class Accumulation(Rewrite):
    """A batch in micro-batches, whose gradients are added up."""

    name = "gradient_accumulation_steps"

    def is_on(self, context: RewriteContext) -> bool:
        return context.runtime.config.gradient_accumulation_steps > 1

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        return AppliedRewrite(name=self.name, batch_parts=context.runtime.config.gradient_accumulation_steps)


class ZeroShards(Rewrite):
    """Parameters in flat buckets, sharded over the data ranks as the stage says."""

    name = "zero_optimization"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        assert context.engine is not None  # the engine applies the rewrites that need one
        units, names = context.engine.shard_parameters()
        return AppliedRewrite(name=self.name, modules=units, parameters=names)


REWRITES: tuple[Rewrite, ...] = (
    FunctionOfModel(),
    OptimizerShards(),
    PipelineLayers(),
    Precision(),
    ActivationCheckpointing(),
    NativeMesh(),
    Accumulation(),
    ZeroShards(),
)
"""Every rewrite, in the order in which they are applied."""


def _pipeline_problems(context: RewriteContext) -> Iterator[Problem]:
    """Settings of the config that stages of JAX do not have."""
    config, runtime = context.runtime.config, context.runtime
    section = config.pipeline
    if not isinstance(context.model, (list, tuple)):
        expected = "cuts a model that is a list of layers, and this is one function"
        hint = "give initialize a list of functions layer(params, value, rng), and params as a list of as many"
        yield Problem(config.mesh_key("pipe"), context.stages, expected, hint)
    if runtime.policy.params is Placement.SHARDED:
        zero, expected = config.zero_optimization.stage, "stages of JAX have their parameters whole"
        yield Problem("zero_optimization.stage", zero, expected, "use stage 0 to 2")
    if section.partition.lower() == "profiled":
        expected, hint = "functions of JAX are not tried", 'use "parameters", "uniform" or "type:REGEX"'
        yield Problem("pipeline.partition", section.partition, expected, hint)
    if interval := section.activation_checkpoint_interval:
        hint = "use jax.checkpoint in the layers"
        yield Problem("pipeline.activation_checkpoint_interval", interval, "not available for JAX", hint)
    if config.activation_checkpointing.enabled:
        key, expected = "activation_checkpointing.enabled", "not available for stages of JAX"
        yield Problem(key, True, expected, "use jax.checkpoint in the layers")


def _make_optimizer(context: RewriteContext) -> None:
    """Set the optimizer on shards and its hyperparameters: the caller's, else the config's."""
    runtime, client = context.runtime, context.client
    section = runtime.config.optimizer
    if client is None and (client := transformation_of(section)) is not None:
        context.groups = [{"lr": client.rates[name], "name": name} for name in MUON_RATES]
    if client is not None:
        if not (callable(getattr(client, "init", None)) and callable(getattr(client, "update", None))):
            kind = type(client).__name__
            has_one = callable(getattr(getattr(client, "tx", None), "update", None))
            hint = "pass an optax transformation, or name the optimizer in the config"
            hint = "pass its transformation, optimizer.tx; the engine makes the states" if has_one else hint
            raise PolyaccelError(f"a {kind} is not an optax transformation", hint=hint, value=kind)
        dtype = runtime.param_dtype

        def owners() -> Owners:
            return owners_of(runtime, context.params, context.stage_cut() if context.has_stages else None)

        require_wide_states(runtime.config)
        context.slice_optimizer = optax_optimizer(
            client,
            context.params,
            dtype,
            may_be_whole=context.has_whole_parameters,
            on_slices=context.on_slices,
            owners=None if context.is_native else owners,
        )
        return
    native = native_optimizer_of(runtime.config)
    if native is None:
        assert section is not None  # else the rewrite is off
        hint = f"use one of {', '.join((*OPTIMIZERS, MUON))}, or pass an optax transformation as optimizer="
        raise ConfigError([Problem("optimizer.type", section.type, "is not available for JAX", hint)])
    context.slice_optimizer, hyperparameters = native
    context.groups = [hyperparameters]
    precision = runtime.step_policy.precision
    for key in ("ema", "gradient_noise_scale"):
        if context.is_native and getattr(runtime.config, key) is not None:
            expected = 'is not available with "jax.execution": "native"'
            raise ConfigError([Problem(key, True, expected, 'use "views", or optax.ema')])
    if context.is_native and (context.slice_optimizer.state_types or precision.keeps_16_bits):
        expected = "has states and master weights of 32 bits"
        raise ConfigError([Problem("jax.execution", "native", expected, 'use "views" with narrow ones')])
