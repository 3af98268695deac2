"""DeepSpeed's keys that are accepted without effect: one table, from which errors and suggestions are made.

A key whose feature does not exist is accepted as long as its value asks for nothing. Any other value is an error, never
ignored. A tuning key chooses how the same numbers are computed: any value of the right type is accepted, and logged
once. A feature that comes takes its rows out of the table and brings its own section. Keys and optimizers that are
always refused stand in the drop-in (`docs/adr/028-refused-keys.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BELOW = ".**"
"""Ends a pattern that stands for a key and for everything below it."""
DROP_IN_KEYS = (
    *("amp", "graph_harvesting", "nebula"),
    "quantize_training",
    *("zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather"),
)
"""Keys that the drop-in refuses and the core does not know: their hint names the drop-in, not a key that is similar."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A feature that does not exist.

    `keys` maps the patterns of its keys to the value that asks for nothing (DeepSpeed's default). Where there is a
    `switch`, that key alone asks for the feature, and the others are options of it. `hint` names the nearest thing
    there is. `is_tuning`: the keys change no number, only how it is computed, so any value of the right type is
    accepted; `feature` then is a clause on why it has no effect.
    """

    feature: str
    keys: Mapping[str, Any]
    hint: str = "leave the key out"
    switch: str | None = None
    is_tuning: bool = False


def _under(section: str, **keys: Any) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in keys.items()}


def _tuning(why: str, **keys: Any) -> Absent:
    """Tuning keys with DeepSpeed's defaults; `__` stands for a dot."""
    return Absent(why, {name.replace("__", "."): value for name, value in keys.items()}, is_tuning=True)


def _alone(key: str, harmless: Any, feature: str, hint: str = "leave the key out") -> Absent:
    return Absent(feature, {key: harmless}, hint)


_ZERO = "zero_optimization"
_STORAGE = 'name a plugin in "checkpoint.storage"'

ABSENT: tuple[Absent, ...] = (
    # The step and its numbers.
    _alone("managed_gradient_accumulation", True, "gradient accumulation counted by the caller"),
    _alone("optimizer.legacy_fusion", False, "DeepSpeed's older fused Lamb"),
    _alone("bf16.immediate_grad_update", False, "immediate float32 accumulation"),
    _alone(
        "torch_autocast.lower_precision_safe_modules",
        None,
        "a choice of modules whose gradients travel in 16 bits",
        'set "communication_data_type"',
    ),
    # ZeRO.
    _alone(f"{_ZERO}.legacy_stage1", False, "the older stage 1", 'use "stage": 1'),
    _alone(f"{_ZERO}.load_from_fp32_weights", True, "loading master weights from 16-bit ones"),
    _alone(f"{_ZERO}.zenflow{BELOW}", None, "ZenFlow", "use offload_optimizer alone"),
    _tuning("Muon's states rest in memory", zero_optimization__save_muon_momentum_buffer_in_memory=False),
    # Ways to compute the same numbers.
    _tuning(
        "a bucket's gradients are one reduce-scatter and its parameters one all-gather, with equal slices on all ranks",
        zero_optimization__use_multi_rank_bucket_allreduce=True,
        zero_optimization__allgather_partitions=True,
        zero_optimization__contiguous_gradients=True,
        zero_optimization__reduce_scatter=True,
        zero_optimization__round_robin_gradients=False,
        disable_allgather=False,
    ),
    _tuning("updates go bucket by bucket", zero_optimization__sub_group_size=1_000_000_000),
    _tuning(
        "parameters are gathered bucket by bucket",
        zero_optimization__stage3_use_all_reduce_for_fetch_params=False,
        zero_optimization__use_all_reduce_for_fetch_params=False,
        zero_optimization__stage3_allgather_sequential=False,
        zero_optimization__allgather_sequential=False,
    ),
    _tuning("layers are gathered bucket by bucket", hybrid_engine__tp_gather_partition_size=8),
    _tuning("each token is one forward pass of the module as it is", hybrid_engine__enable_cuda_graph=False),
    _tuning(
        "every checkpoint can be loaded on any number of ranks, which all read their own parts at once",
        zero_optimization__elastic_checkpoint=False,
        zero_optimization__pipeline_loading_checkpoint=False,
        checkpoint__load_universal=False,
        checkpoint__parallel_write__pipeline_stage=False,
        checkpoint__checkpoint_serialization=True,
    ),
    _tuning(
        "the host updates a bucket as soon as its gradient is there and counts",
        zero_optimization__offload_optimizer__super_offload=False,
    ),
    _tuning(
        "the update on the host uses OMP_NUM_THREADS threads",
        zero_optimization__offload_optimizer__cpuadam_cores_perc=0.8,
    ),
    _tuning(
        "files are read and written in pieces and at depths of the tier's own choice",
        aio__block_size=1_048_576,
        aio__queue_depth=8,
        aio__intra_op_parallelism=1,
        aio__thread_count=1,
        aio__single_submit=False,
        aio__overlap_events=True,
    ),
    _alone("aio.use_gds", False, "file access from the device"),
    # Watching.
    _tuning(
        "trials are ordered by their estimated time, and the model is asked in the first of them",
        autotuning__fast=True,
        autotuning__mp_size=1,
        autotuning__num_tuning_micro_batch_sizes=3,
        autotuning__min_train_batch_size=1,
    ),
    Absent("a model that is described in the config", {f"autotuning.model_info{BELOW}": None}),
    _alone("autotuning.max_train_batch_size", None, "tuning of the global batch size", "set train_batch_size"),
    # Data.
    Absent(
        "a learning rate by the tokens of layers",
        _under(
            "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule",
            enabled=False,
            total_layer_tokens=None,
            warmup_type=None,
            warmup_layer_tokens=None,
        ),
        switch="data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled",
    ),
    # Checkpoints and activations.
    _alone(
        "checkpoint.use_node_local_storage",
        False,
        "DeepSpeed's checkpoints on each host's own disk",
        'set "checkpoint": {"storage": "node_local"}, which has a second copy too',
    ),
    _alone(
        f"checkpoint.writer{BELOW}",
        None,
        "DeepSpeed's fast checkpoint writer",
        _STORAGE,
    ),
    _alone(
        f"datastates_ckpt{BELOW}",
        None,
        "the DataStates checkpoint writer",
        _STORAGE,
    ),
    # Models cut over ranks, and rewritten ones.
    _alone(
        "seq_parallel_communication_data_type",
        "fp32",
        "another element type for what sequence-parallel ranks exchange",
        "leave it out: activations travel in their own type",
    ),
    Absent(
        "this setting of pipelines",
        _under(
            "pipeline",
            seed_layers=False,
            pipe_partitioned=True,
            grad_partitioned=True,
            use_reentrant=True,
        ),
        "leave it out; `seed_layers` is an argument of PipelineModule",
    ),
    Absent(
        "this setting of tensor parallelism",
        _under(
            "tensor_parallel",
            dtype="fp16",
            tp_overlap_comm=False,
            vocab_parallel_ce_backend="torch",
            keep_module_on_host=False,
            injection_policy_tuple=None,
            kernel_inject=False,
            replace_with_kernel_inject=False,
        )
        | _under("tensor_parallel.tp", tp_grain_size=1, mpu=None, tp_group=None)
        | _under("tensor_parallel.tensor_parallel", tp_size=1, tp_grain_size=1, mpu=None, tp_group=None),
        'leave it out: "tensor_parallel.autotp_size" cuts the weights',
    ),
    Absent(
        "this setting of expert parallelism",
        _under(
            "expert_parallel",
            expert_tensor_parallel_size=1,
            preset_model=None,
            use_grouped_mm=True,
            comm_backend="comm",
        ),
        "leave it out: experts are found by the model's own attributes",
    ),
    Absent(
        "DeepCompile",
        _under(
            "compile",
            deepcompile=False,
            free_activation=False,
            offload_activation=False,
            offload_opt_states=False,
            offload_parameters=False,
            double_buffer=False,
            symmetric_memory=False,
            debug_log=False,
            sync_before_reduce=False,
            sync_after_reduce=False,
            sync_before_allgather=False,
            sync_after_allgather=False,
            autoep_non_moe=False,
            free_activation_threshold=10_485_760,
            keep_all_input_tensors=False,
            keep_int_input_tensors=True,
            offload_activation_pin_memory=True,
            passes=None,
        ),
    ),
    Absent(
        "weight quantisation",
        {
            f"weight_quantization.quantized_initialization{BELOW}": {},
            f"weight_quantization.post_init_quant{BELOW}": {},
        },
    ),
)


def absent_keys() -> Iterator[str]:
    """The dotted names of all absent keys, without patterns: for suggestions."""
    yield from _ENTRIES


def entry_of(key: str) -> tuple[Absent, Any] | None:
    """The feature that the dotted `key` belongs to, and the key's harmless value; None for any other key."""
    return _ENTRIES.get(key)


def is_above(key: str) -> bool:
    """Whether absent keys stand below the dotted `key`."""
    return key in _ABOVE


_ENTRIES = {pattern.removesuffix(BELOW): (entry, value) for entry in ABSENT for pattern, value in entry.keys.items()}
_ABOVE = frozenset(
    ".".join(parts[:length]) for parts in (key.split(".") for key in _ENTRIES) for length in range(1, len(parts))
)
