"""The section `data_efficiency`: curricula, dynamic batches, dropped tokens. None of it exists yet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from polyaccel.config.section import CountInt, Int, Listed, Params, PositiveInt, Section


class CurriculumConfig(Section):
    """Samples in order of difficulty."""

    enabled: bool = False
    """Use it."""
    data_cluster_path: str | None = None
    """Directory of the sample index."""
    curriculum_metrics: Params = Field(default_factory=dict, validate_default=True)
    """Measures of difficulty by name."""


class DynamicBatchingConfig(Section):
    """Micro-batches of equal token counts."""

    enabled: bool = False
    """Use it."""
    max_tokens: PositiveInt | None = None
    """Tokens of one micro-batch."""
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate follows the batch size."""
    metrics_path: str | None = None
    """Directory of the sample lengths."""
    min_batch_size: PositiveInt = 1
    """The fewest samples of a micro-batch."""
    max_batch_size: PositiveInt | None = None
    """The most samples of a micro-batch."""
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """Order in which samples fill micro-batches."""
    verbose: bool = False
    """Print the batches."""


class DataSamplingConfig(Section):
    """Which samples come when."""

    enabled: bool = False
    """Use it."""
    num_epochs: PositiveInt = 1000
    """The most epochs."""
    num_workers: CountInt = 0
    """Loader processes."""
    pin_memory: bool = False
    """Use page-locked memory."""
    curriculum_learning: CurriculumConfig = CurriculumConfig()
    """Samples in order of difficulty."""
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Micro-batches of equal token counts."""


class RandomLtdConfig(Section):
    """Layers that see a random part of the tokens (random-LTD)."""

    enabled: bool = False
    """Use it."""
    total_layer_num: CountInt | None = None
    """Layers of the model."""
    random_ltd_layer_num: CountInt | None = None
    """Layers that drop tokens."""
    random_ltd_layer_id: Listed[tuple[Int, ...]] | None = None
    """Their indices."""
    model_mask_name: str | None = None
    """The argument that carries the attention mask."""
    model_type: Literal["decoder", "encoder"] | None = None
    """Kind of the model."""
    hidden_state_order: str | None = None
    """Order of the hidden state's dims."""
    random_ltd_schedule: Params | None = None
    """How many tokens are kept at each step."""


class DataRoutingConfig(Section):
    """Which tokens pass which layers."""

    enabled: bool = False
    """Use it."""
    random_ltd: RandomLtdConfig = RandomLtdConfig()
    """Layers that see a random part of the tokens."""


class DataEfficiencyConfig(Section):
    """DeepSpeed's data efficiency library."""

    enabled: bool = False
    """Use it."""
    seed: CountInt = 1234
    """Seed of its sampling."""
    data_sampling: DataSamplingConfig = DataSamplingConfig()
    """Which samples come when."""
    data_routing: DataRoutingConfig = DataRoutingConfig()
    """Which tokens pass which layers."""
