"""Replica groups that train apart and meet every few steps (DiLoCo)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from polyaccel.config.section import Section


class OuterOptimizerConfig(Section):
    """SGD on the weights that replica groups share. A learning rate of 1 without momentum is local SGD."""

    lr: PositiveFloat = 0.7
    """Learning rate of the outer step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Its momentum. 0 is none."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's."""


class DiLoCoConfig(Section):
    """Replica groups of ranks that train apart, and exchange how far their weights have moved every few steps
    (Douillard et al. 2023; streaming: 2025). Inside a group everything is as without this section."""

    replica_groups: Annotated[int, Field(ge=2)] = 2
    """Groups of neighbouring ranks. `train_batch_size` and the mesh are those of one group."""
    sync_every: PositiveInt = 32
    """Steps between two outer steps."""
    outer_optimizer: OuterOptimizerConfig = OuterOptimizerConfig()
    """The optimizer of the shared weights, whose gradient is the mean of how far the groups have moved."""
    quantization_bits: Literal[4, 8, 32] = 32
    """Bits an element of what groups exchange. With 4 or 8, each group adds what was rounded off to its next
    exchange."""
    fragments: PositiveInt = 1
    """Parts of the model that are exchanged at different steps, one after the other (streaming DiLoCo)."""
    fragment_sync_delay: NonNegativeInt = 0
    """Steps that an exchange may take while training continues. 0 waits for it."""
    fragment_update_alpha: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of a group's own weights that stays in them at an outer step; the rest is the shared weights."""
