"""Keys whose every value is answered here, before polyaccel reads the config: without effect, or refused for good.

A key without effect chooses how the same numbers are computed, or describes what polyaccel finds by itself. Its values
are still checked, as DeepSpeed does. A refused key would change numbers, or promises what is never done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from polyaccel.config.keys import parent_of, value_of
from polyaccel.errors import Problem
from polyaccel_deepspeed.change import Change, Tree

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Name = Annotated[str, Field(min_length=1)] | None
_Attribute = Annotated[str, Field(pattern=r"^[^.]+$")] | None
_Table = dict[str, Any] | None


def _importable(name: str) -> str:
    """A class by its dotted name. Raises ValueError where there is none, as for DeepSpeed."""
    module, _, last = name.rpartition(".")
    try:
        getattr(import_module(module), last)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} cannot be imported: {error}") from error
    return name


_Class = Annotated[str, AfterValidator(_importable)]
_Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
Preset = Literal["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "qwen3_5_moe", "minimax_m3"]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Keys without effect in the table `section`: by name DeepSpeed's default, and the type of its values."""

    section: str
    why: str
    keys: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Never:
    """Keys in the table `section` that are refused for good, except for the value that asks for nothing.

    With a `switch` only that key asks, and the others are options of it.
    """

    section: str
    why: str
    hint: str
    keys: Mapping[str, Any]
    switch: str | None = None


IGNORED: tuple[Ignored, ...] = (
    Ignored("optimizer", "both of DeepSpeed's fused forms compute the same update", {"legacy_fusion": (False, bool)}),
    Ignored(
        "bf16",
        "each gradient joins its float32 bucket when it arrives",
        {"immediate_grad_update": (False, bool)},
    ),
    Ignored(
        "torch_autocast",
        "gradients of every module travel in communication_data_type, by default in float32",
        {"lower_precision_safe_modules": (None, list[_Class] | None)},
    ),
    Ignored(
        "autotuning",
        "the tuner reads shapes from the model, and writes no files about them",
        {
            "metric_path": (None, str | None),
            "model_info": (None, _Table),
            "model_info_path": (None, str | None),
        },
    ),
    Ignored(
        "pipeline",
        "messages between stages are whole, and seeds are an argument of PipelineModule",
        {
            "grad_partitioned": (True, bool),
            "pipe_partitioned": (True, bool),
            "seed_layers": (False, bool),
        },
    ),
    Ignored(
        "pipeline",
        "both ways of torch's checkpoint compute the same gradients, and layers are computed again by the newer one",
        {"use_reentrant": (True, bool)},
    ),
    Ignored(
        "tensor_parallel",
        "fp16, bf16 and torch_autocast choose types",
        {"dtype": ("fp16", Any)},
    ),
    Ignored(
        "tensor_parallel",
        "the same numbers are computed in polyaccel's own way",
        {
            "keep_module_on_host": (False, bool),
            "tp_overlap_comm": (False, bool),
            "vocab_parallel_ce_backend": ("torch", Literal["torch", "liger"]),
        },
    ),
    Ignored(
        "tensor_parallel.tp",
        "heads and features are cut where the structure of the model allows it",
        {"tp_grain_size": (1, _Positive)},
    ),
    Ignored(
        "tensor_parallel.partition_config",
        "the model names its output layer, and `autotp_size` is the number of ranks",
        {
            "embedding_partition_dim": (1, int),
            "lm_head_patterns": (["lm_head", "embed_out"], list[str]),
            "tp_size": (1, _Positive),
        },
    ),
    Ignored(
        "expert_parallel",
        "experts are found by their own attributes, and compute as the model defines them",
        {
            "expert_pattern": (None, _Attribute),
            "expert_w1": (None, _Attribute),
            "expert_w2": (None, _Attribute),
            "expert_w3": (None, _Attribute),
            "has_shared_experts": (None, bool | None),
            "moe_layer_pattern": (None, _Name),
            "num_experts_attr": (None, _Attribute),
            "preset_model": (None, Preset | None),
            "router_pattern": (None, _Attribute),
            "shared_experts_gate_pattern": (None, _Attribute),
            "shared_experts_pattern": (None, _Attribute),
            "top_k_attr": (None, _Attribute),
            "validate_folding_routing": (False, bool),
        },
    ),
    Ignored(
        "expert_parallel",
        "tokens are exchanged, multiplied and combined in polyaccel's own way",
        {
            "async_split_plan": (False, bool),
            "combine_impl": ("auto", Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"]),
            "comm_backend": ("comm", Literal["comm", "deepep"]),
            "comm_max_tokens_per_rank": (0, _Count),
            "comm_num_sm": (12, _Positive),
            "comm_qp_margin": (4, _Count),
            "disable_triton_grouped_mm": (False, bool),
            "gate_up_impl": ("separate", Literal["separate", "fused"]),
            "row_weighting_impl": ("auto", Literal["auto", "eager", "fused"]),
            "use_grouped_mm": (True, bool),
        },
    ),
    Ignored(
        "expert_parallel",
        "tensor ranks cut every expert where there are any",
        {"expert_tensor_parallel_size": (1, _Positive)},
    ),
)
"""All keys without effect that polyaccel itself does not list."""

NEVER: tuple[Never, ...] = (
    Never(
        "zero_optimization",
        "DeepSpeed itself has none since 0.5.9",
        'use "stage": 1',
        {"legacy_stage1": False},
    ),
    Never(
        "zero_optimization",
        "master weights are loaded as they were saved",
        "use load_checkpoint(load_optimizer_states=False)",
        {"load_from_fp32_weights": True},
    ),
    Never("aio", "states pass through host memory", "leave it out", {"use_gds": False}),
    Never(
        "autotuning",
        "the tuner keeps the global batch size",
        "set train_batch_size",
        {"max_train_batch_size": None},
        switch="autotuning.enabled",
    ),
    Never(
        "compile",
        "there are no graph passes as in DeepCompile",
        "use engine.compile(), which is torch.compile",
        {
            "autoep_non_moe": False,
            "debug_log": False,
            "deepcompile": False,
            "double_buffer": False,
            "free_activation": False,
            "free_activation_threshold": 10_485_760,
            "keep_all_input_tensors": False,
            "keep_int_input_tensors": True,
            "offload_activation": False,
            "offload_activation_pin_memory": True,
            "offload_opt_states": False,
            "offload_parameters": False,
            "passes": None,
            "symmetric_memory": False,
            "sync_after_allgather": False,
            "sync_after_reduce": False,
            "sync_before_allgather": False,
            "sync_before_reduce": False,
        },
        switch="compile.deepcompile",
    ),
    Never(
        "tensor_parallel",
        "a model's own layers are cut and stay",
        "name layers in tensor_parallel.partition_config",
        {"injection_policy_tuple": None, "kernel_inject": False, "replace_with_kernel_inject": False},
    ),
    Never(
        "tensor_parallel.tp",
        "groups of ranks are the mesh's",
        "pass mpu= to deepspeed.initialize",
        {"mpu": None, "tp_group": None},
    ),
    Never(
        "expert_parallel",
        "a routing bias without a loss is none of the model's, and DeepSpeed refuses it too",
        "leave it out",
        {"load_balance_coeff": None},
    ),
    Never(
        "expert_parallel",
        "experts compute before their outputs are weighted, as the model defines them",
        'leave it at "auto"',
        {"score_apply": ("auto", "post")},
    ),
)
"""All keys that are refused for good; a tuple lists several values that ask for nothing."""

SWITCHES = tuple(dict.fromkeys(one.switch for one in NEVER if one.switch is not None))


WRITER: Mapping[str, Any] = {
    "data_parallel": Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], _Upper] | None,
    "decoupled": bool | None,
    "io_buffer_double": bool | None,
    "io_buffer_size": _Positive | None,
    "io_multiplier": _Positive | None,
    "show_statistics": bool | None,
    "type": Annotated[Literal["MOCK", "PYTHON", "FAST"], _Upper] | None,
}
"""Types of the values of `checkpoint.writer`."""


def wrong_writer(tree: Tree) -> list[Problem]:
    """The values in `checkpoint.writer` that DeepSpeed refuses."""
    writer = value_of(tree, "checkpoint.writer")
    found = writer if isinstance(writer, Mapping) else {}
    return [
        Problem(f"checkpoint.writer.{name}", found[name], "is not a value of this key", _choices(kind))
        for name, kind in WRITER.items()
        if name in found and not _is_one(found[name], kind)
    ]


def _choices(kind: Any) -> str:
    """What a key takes, for a hint."""
    names = [one for part in get_args(kind) for choice in get_args(part)[:1] for one in get_args(choice)]
    return f"use one of {', '.join(names)}" if names else "leave it out: it has no effect"


def settle(tree: Tree) -> tuple[list[Change], list[Problem]]:
    """Remove the keys of both tables from `tree`. Return what was dropped, and what is refused."""
    switched = {switch: value_of(tree, switch) is True for switch in SWITCHES}
    changes, problems = list[Change](), list[Problem]()
    for ignored in IGNORED:
        for key, value, (default, kind) in _written(tree, ignored.section, ignored.keys):
            if not _is_one(value, kind):
                problems.append(Problem(key, value, "is not a value of this key", "leave it out: it has no effect"))
            elif value not in (default, None):
                changes.append(Change(key, f"= {value!r} has no effect: {ignored.why}"))
    for never in NEVER:
        for key, value, harmless in _written(tree, never.section, never.keys):
            asks = value not in (harmless if isinstance(harmless, tuple) else (harmless, None))
            if asks and (never.switch in (None, key) or switched[never.switch or ""]):
                problems.append(Problem(key, value, f"is refused for good: {never.why}", never.hint))
    return changes, problems


def _written(tree: Tree, section: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Pop the keys that `tree` has: the dotted name, the value, and what the table has of it."""
    for name, entry in keys.items():
        key = f"{section}.{name}".removeprefix(".")
        table, last = parent_of(tree, key)
        if last in table:
            yield key, table.pop(last), entry


def _is_one(value: Any, kind: Any) -> bool:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        adapter.validate_python(value, strict=isinstance(value, bool))
    except ValidationError:
        return False
    return True
