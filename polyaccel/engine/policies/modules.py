"""What follows from a config for a module before an engine takes it: its types, leaves, recomputation and cuts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from polyaccel.config import Config, ResolvedConfig
from polyaccel.core.types import DType


def param_dtype_of(config: ResolvedConfig) -> DType | None:
    """The element type in which floating parameters are held; None: as the model has them."""
    if config.fp16.enabled:
        return DType.FLOAT16
    return DType.BFLOAT16 if config.bf16.enabled else None


@dataclass(frozen=True, slots=True)
class LeafRules:
    """Which modules are leaves: their parameters are gathered together.

    `classes`, `names` and `name_suffixes` choose modules; a choice whose kind is in `stated` must match one.
    `granularity` makes leaves of modules that are that fine or finer (elements a module); 0 is off.
    """

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()
    stated: frozenset[str] = frozenset()
    granularity: int = 0


@dataclass(frozen=True, slots=True)
class ModuleRules:
    """The changes to a module before an engine takes it.

    `param_dtype` and `buffer_dtype` are the types of floating parameters and buffers; None leaves them. Buffers of
    modules named in `keep_in_fp32` stay as they are; None asks the module. `sparse_gradients`: gradients of all
    embedding layers travel as rows.
    """

    param_dtype: DType | None = None
    buffer_dtype: DType | None = None
    keep_in_fp32: tuple[str, ...] | None = None
    leaves: LeafRules = LeafRules()
    sparse_gradients: bool = False


def module_rules_of(config: ResolvedConfig) -> ModuleRules:
    """The rules for the config's module."""
    zero, types = config.zero_optimization, config.data_types
    leaf = zero.leaf_module
    return ModuleRules(
        param_dtype=param_dtype_of(config),
        buffer_dtype=DType.parse(types.buffer_dtype) if types.buffer_dtype else None,
        keep_in_fp32=None if types.keep_in_fp32_modules == "auto" else types.keep_in_fp32_modules,
        leaves=LeafRules(
            leaf.classes,
            leaf.names,
            leaf.name_suffixes,
            frozenset(leaf.model_fields_set),
            zero.module_granularity_threshold,
        ),
        sparse_gradients=config.sparse_gradients,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """Which activations are computed again in backward, and where the inputs of what is computed again wait for it.

    `names` are classes or full names of the modules to recompute; empty means that they are found. `keep` names
    operations whose results are kept. `memory_limit` counts bytes. `number` is that of the regions whose inputs get
    contiguous memory; None gives each input its own.
    """

    recomputes_blocks: bool = False
    names: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    memory_limit: int | None = None
    reentrant: bool = False
    offload: bool = False
    partition: bool = False
    number: int | None = None
    synchronize: bool = False
    profile: bool = False


def recompute_policy_of(config: Config) -> RecomputePolicy:
    """The recomputation that the config asks for."""
    section = config.activation_checkpointing
    return RecomputePolicy(
        recomputes_blocks=section.recomputes_blocks,
        names=section.blocks,
        keep=section.keep,
        memory_limit=section.memory_limit,
        reentrant=section.use_reentrant,
        offload=section.cpu_checkpointing,
        partition=section.partition_activations,
        number=section.number_checkpoints if section.contiguous_memory_optimization else None,
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )


@dataclass(frozen=True, slots=True)
class LayerRule:
    """DeepSpeed's `layer_specs`: modules whose weights' names match one of `patterns`, cut by columns or rows or not at
    all. `shape` are the lengths of the weight's dimensions as a fused layer has them, for example (3, -1) or ((4096,
    1024, 1024), -1), and `partition_dim` the dimension that is cut. With `gather_output` every rank gets all outputs
    of columns. With `grad_allreduce` gradients of a weight that is not cut are summed over the ranks."""

    patterns: tuple[str, ...]
    partition_type: Literal["column", "row", "skip"] = "column"
    shape: tuple[int | tuple[int, ...], ...] | None = None
    partition_dim: int | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def matches(self, module: str) -> bool:
        return any(re.match(pattern, f"{module}.weight") or re.fullmatch(pattern, module) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class CutRules:
    """Which layers tensor ranks share. The first rule of `layers` that matches decides; with `use_defaults` follow the
    model's own plan, or its structure. `gather_logits`: every rank has all logits. `share_tokens`: between these layers
    each rank has some of the tokens."""

    layers: tuple[LayerRule, ...] = ()
    use_defaults: bool = True
    gather_logits: bool = True
    share_tokens: bool = False


def cut_rules_of(config: ResolvedConfig) -> CutRules:
    """The rules of `tensor_parallel`."""
    section = config.tensor_parallel
    partition = section.partition_config
    specs = partition.layer_specs if partition is not None else ()
    return CutRules(
        tuple(LayerRule(**dict(spec)) for spec in specs),
        partition is None or partition.use_default_specs,
        not section.vocab_parallel_lm_head,
        section.sequence_sharded,
    )
