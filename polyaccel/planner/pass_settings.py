"""`PassSettings`: what a config decides about one rank's share of a model and about a pass of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyaccel.config import ResolvedConfig
from polyaccel.core.mesh import Mesh
from polyaccel.engine.policies.modules import (
    CutRules,
    ModuleRules,
    RecomputePolicy,
    cut_rules_of,
    module_rules_of,
    recompute_policy_of,
)
from polyaccel.errors import PolyaccelError


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """The values from which a frontend estimates its model. `tensor_ranks` share layers by `cuts`, `expert_ranks`
    experts, and `sequence_ranks` sequences by `sequence_method` (manual: the model
    does so itself) and `core_attention`. `tiles` are the settings of tiled
    layers (None: there are none), and `autocast` names a type (None: off)."""

    rules: ModuleRules
    recompute: RecomputePolicy
    autocast: str | None
    micro_batch: int
    tensor_ranks: int
    expert_ranks: int
    sequence_ranks: int
    cuts: CutRules
    sequence_method: Literal["manual", "ulysses", "ring", "tokenwise"]
    core_attention: str
    tiles: Mapping[str, Any] | None
    partition: str
    """How the layers of a pipeline are dealt, as in the config's section `pipeline`."""

    @classmethod
    def from_config(cls, config: ResolvedConfig, mesh: Mesh) -> PassSettings:
        """Read the settings of `config` for the ranks of `mesh`."""
        sequence, tiles = config.sequence_parallel, config.tiled_compute
        return cls(
            rules=module_rules_of(config),
            recompute=recompute_policy_of(config),
            autocast=config.torch_autocast.dtype if config.torch_autocast.enabled else None,
            micro_batch=config.train_micro_batch_size_per_gpu,
            tensor_ranks=mesh.size_of(("tensor",)),
            expert_ranks=mesh.size_of(("expert",)),
            sequence_ranks=mesh.size_of(("sequence",)),
            cuts=cut_rules_of(config),
            sequence_method=sequence.method,
            core_attention=sequence.core_attention,
            tiles=tiles.model_dump(exclude={"enabled"}) if tiles.enabled else None,
            partition=config.pipeline.partition,
        )


def check_activation_mesh(mesh: Mesh) -> None:
    """Raise PolyaccelError for a mesh on which the activations of a whole model cannot be estimated."""
    others = [axis.name for axis in mesh.axes if axis.name not in ("data", "tensor", "sequence") and axis.size > 1]
    if others:
        raise PolyaccelError(
            f"activations are not estimated for ranks along {' and '.join(others)}",
            hint="leave --sequence-length out, or plan for ranks along data, tensor and sequence alone",
            value=tuple(others),
        )


def check_stage_settings(settings: PassSettings, *, with_activations: bool) -> None:
    """Raise PolyaccelError for settings with which the stages of a pipeline cannot be estimated."""
    if settings.partition == "profiled":
        raise PolyaccelError(
            "layers that are dealt by their time cannot be dealt before they run", hint='say "partition": "parameters"'
        )
    if settings.expert_ranks > 1 and with_activations:
        raise PolyaccelError(
            f"the activations of stages are not estimated for {settings.expert_ranks} expert ranks: the tokens per "
            "expert are not known",
            hint="leave --sequence-length out",
            value=settings.expert_ranks,
        )
