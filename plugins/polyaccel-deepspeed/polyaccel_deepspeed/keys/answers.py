"""What becomes of every config key of DeepSpeed: it works, has no effect, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from polyaccel.config import Config
from polyaccel.config.keys import json_name, walk_keys
from polyaccel.config.sections.zero import ZeroConfig
from polyaccel.config.unsupported_keys import ABSENT, BELOW
from polyaccel_deepspeed import to_come
from polyaccel_deepspeed.keys.experts import ROUTING
from polyaccel_deepspeed.keys.settled import IGNORED, NEVER
from polyaccel_deepspeed.refused_keys import REMOVED


class Outcome(Enum):
    """What becomes of a key."""

    WORKS = "yes"
    NO_EFFECT = "accepted"
    NO = "no"


class Answer(NamedTuple):
    """The outcome of a key, and why."""

    outcome: Outcome
    why: str


TRANSLATED = {
    "allgather_size": "= zero_optimization.allgather_bucket_size, where zero_optimization is true or false",
    "amp": "O1 = torch_autocast in float16, O2 = fp16; O0 is dropped, O3 refused",
    "checkpoint.use_node_local_storage": '= checkpoint.storage "node_local"',
    "checkpoint.writer": "decoupled = checkpoint.async; the rest is speed",
    "datastates_ckpt": "= checkpoint.async",
    "managed_gradient_accumulation": "false: each engine.step() updates",
    "nebula": "= checkpoint.async, and checkpoint.keep_last for its retention",
    "quantize_training": "= compression_training.weight_quantization, doubled periods; eigenvalue = eigenvalue",
    "seq_parallel_communication_data_type": "= communication_data_type, where ranks share sequences",
    "sparse_attention": "checked; the model's layers read it, as in DeepSpeed",
    "tensor_parallel.partition_config.layer_specs[].model_types": "specs of other types of models are left out",
    "zero_optimization.mics_hierarchical_params_gather": "no effect: gathers are by host",
    "zero_optimization.mics_shard_size": "= zero_optimization.zero_hpz_partition_size; all ranks share states",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "false too: save_model and save_16bit_model write the whole model, which rank 0 gathers in host memory"
    ),
    "zero_optimization.sub_group_size": "= reduce_bucket_size where the host updates; no effect elsewhere",
    "tensor_parallel.partition_config.strict_mode": "true: a linear layer without a spec is an error",
    "tensor_parallel.tensor_parallel": "= tensor_parallel.tp",
}
"""Keys that polyaccel has under another name, with what is below them."""
ABSENT_FEATURES: dict[str, str] = {
    "weight_quantization": 'init_inference(dtype="int8") holds weights in few bits',
    "zero_optimization.zenflow": to_come.ZENFLOW,
}
"""Keys whose feature is not here, with what is below them, and why they are refused. This list only shrinks."""
_TABLES = {"bfloat16.": "bf16.", "tensor_parallel.tensor_parallel.": "tensor_parallel.tp."}
_ALIASES = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.{json_name(name, field)}"
        for name, field in ZeroConfig.model_fields.items()
        if json_name(name, field) != name
    },
}


def answers() -> dict[str, Answer]:
    """Return the answers to all keys and tables that the drop-in knows, by dotted key."""
    found = {key.dotted: Answer(Outcome.WORKS, "") for key in walk_keys(Config)}
    for entry in ABSENT:
        outcome = Outcome.NO_EFFECT if entry.is_tuning else Outcome.NO
        hint = "" if entry.is_tuning or entry.hint == "leave the key out" else f"; {entry.hint}"
        found |= {key.removesuffix(BELOW): Answer(outcome, f"{entry.feature}{hint}") for key in entry.keys}
    found |= {key: Answer(Outcome.NO, f"{feature}, which DeepSpeed has removed") for key, feature in REMOVED.items()}
    found |= {alias: Answer(Outcome.WORKS, f"= {key}") for alias, key in _ALIASES.items()}
    found |= {key: Answer(Outcome.WORKS, why) for key, why in TRANSLATED.items()}
    for name in ROUTING:
        found[f"expert_parallel.{name}"] = Answer(Outcome.WORKS, "the model routes, so it must be the model's value")
    for ignored in IGNORED:
        found |= {f"{ignored.section}.{name}": Answer(Outcome.NO_EFFECT, ignored.why) for name in ignored.keys}
    for never in NEVER:
        why = f"{never.why}; {never.hint}"
        found |= {f"{never.section}.{name}": Answer(Outcome.NO, why) for name in never.keys}
    absent = {key: Answer(Outcome.NO, why) for key, why in ABSENT_FEATURES.items()}
    return {key: _covering(key, absent) or one for key, one in found.items()} | absent


def answer_to(key: str, known: Mapping[str, Answer]) -> Answer | None:
    """Return the answer to a key of DeepSpeed, or to a table above it; None for an unknown key."""
    for spelling, other in _TABLES.items():
        if key.startswith(spelling):
            key = key.replace(spelling, other, 1)
    return next((known[one] for one in (key, *_tables(key)) if one in known and (one == key or known[one].why)), None)


def _tables(key: str) -> Iterator[str]:
    """The tables above a key, the nearest first."""
    parts = key.split(".")
    yield from (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))


def _covering(key: str, absent: Mapping[str, Answer]) -> Answer | None:
    return next((one for table, one in absent.items() if key == table or key.startswith(f"{table}.")), None)
