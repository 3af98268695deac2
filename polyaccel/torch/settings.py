"""The config's settings of how an engine runs its module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from polyaccel.engine.policies.data_sampling import SamplingPolicy
from polyaccel.engine.policies.generation import GenerationPolicy
from polyaccel.engine.policies.modules import RecomputePolicy
from polyaccel.observability.profiles import ProfileSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSettings:
    """How the engine runs its module.

    `autocast_dtype` is what the forward pass computes in under torch's autocast; None is none. `recompute` selects
    which activations are computed again; None leaves that to the model. `checks_contents` lets `GatheredParameters`
    compare values when it is left. `matrix_kernels` chooses linear layers' products, see `torch.linears`. `drop_last`
    leaves out an epoch's last samples that fill no batch. `sparse_gradients` exchanges gradients of all embeddings as
    rows.
    """

    autocast_dtype: torch.dtype | None
    recompute: RecomputePolicy | None
    checks_contents: bool
    matrix_kernels: Literal["auto", "off"]
    drop_last: bool
    sparse_gradients: bool = False
    profile: ProfileSettings | None = None
    """The step whose operations and times are reported."""
    sampling: SamplingPolicy | None = None
    """How `training_data` is loaded; None is in a shuffled order, by this process."""
    generation: GenerationPolicy = field(default_factory=GenerationPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSettings:
    """What a model computes in tiles of tokens. None for numbers of tokens leaves them to the sizes of the model;
    `mlps` names the feed-forward layers, by class or full name, where they are not found by structure."""

    loss: bool = True
    mlp: bool = True
    loss_tokens: int | None = None
    mlp_tokens: int | None = None
    mlps: tuple[str, ...] = ()
    in_evaluation: bool = False
