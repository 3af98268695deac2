"""Configs that trainers write for DeepSpeed: what comes out is polyaccel's, and each change has its line."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from polyaccel_deepspeed.config import DeepSpeedConfig, normalise

from polyaccel import ConfigError
from polyaccel.config import load_resolved

BASE = {"train_batch_size": 4, "gradient_clipping": 0.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "accelerate": ({"steps_per_print": math.inf}, {}, ["steps_per_print"]),
    "trl": (
        {"zero_optimization.reduce_bucket_size": 64, "zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 3}},
        ["zero_optimization.reduce_bucket_size"],
    ),
    "null sections": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": None}, "bf16": None},
        {"zero_optimization": {"stage": 2}},
        ["zero_optimization.offload_optimizer", "bf16"],
    ),
    "null where null is meant": ({"steps_per_print": None, "communication_data_type": None}, {}, []),
    "auto beside a number": (
        {"zero_optimization": {"reduce_bucket_size": "auto", "allgather_bucket_size": 2e8}},
        {"zero_optimization": {"allgather_bucket_size": 2e8}},
        ["zero_optimization.reduce_bucket_size"],
    ),
    "monitors": ({"tensorboard": {"enabled": True, "output_path": "x"}, "wandb": {"enabled": False}},
                 {"tensorboard": {"output_path": "x", "job_name": "DeepSpeedJobName", "enabled": True},
                  "wandb": {"enabled": False}}, []),
    "removed and off": ({"amp": {"enabled": False}, "graph_harvesting": False}, {}, ["amp", "graph_harvesting"]),
    "parameters at stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2}},
        ["zero_optimization.offload_param"],
    ),
}  # fmt: skip
LIGHTNING = {
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "thread_count": 1,
    },
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200000000,
        "reduce_bucket_size": 200000000,
        "sub_group_size": 1000000000000,
    },
    "gradient_clipping": 0.0,
    "train_micro_batch_size_per_gpu": 1,
}
"""As its strategy writes it by default."""
TUNED = {
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 2, "single_submit": False, "overlap_events": True},
    "zero_optimization": {"contiguous_gradients": False, "round_robin_gradients": True, "sub_group_size": 1e12},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.1}},
}
"""Tuning keys that polyaccel itself accepts: they change no number."""


@pytest.mark.parametrize("name", CASES)
def test_what_trainers_write_is_let_in(name: str) -> None:
    foreign, ours, keys = CASES[name]
    before = copy.deepcopy({**BASE, **foreign})
    tree, changes = normalise({**BASE, **foreign})
    assert tree == {**BASE, **ours}
    assert [change.key for change in changes] == keys
    assert all(str(change).startswith(f"config: {change.key} ") for change in changes)
    assert {**BASE, **foreign} == before
    load_resolved(tree, world_size=2)


@pytest.mark.parametrize("foreign", [LIGHTNING, {**BASE, **TUNED}])
def test_tuning_goes_through(foreign: dict[str, Any]) -> None:
    tree, changes = normalise(foreign)
    assert changes == ()
    assert load_resolved(tree, world_size=2).without_effect


def test_clipping_that_is_left_out_is_deepspeeds_and_null_is_none() -> None:
    tree, (change,) = normalise({"train_batch_size": 4})
    assert tree["gradient_clipping"] == 1.0
    assert change.is_warning
    tree, (change,) = normalise({"train_batch_size": 4, "gradient_clipping": None})
    assert tree["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("foreign", "key"),
    [
        ({"tensor_parallel": {"kernel_inject": True}}, "tensor_parallel.kernel_inject"),
        ({"amp": {"enabled": True, "opt_level": "O3"}}, "amp"),
        ({"aio": {"use_gds": True}}, "aio.use_gds"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        (
            {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
            "hybrid_engine.inference_tp_size",
        ),
    ],
)
def test_what_would_change_results_is_refused_with_a_cure(foreign: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_resolved(normalise({**BASE, **foreign})[0], world_size=2)
    assert all(problem.hint for problem in caught.value.problems)


def test_a_file_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({**BASE, "steps_per_print": math.inf}), encoding="utf-8")
    config = DeepSpeedConfig(str(file), world_size=2)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (4, 2)
    assert config.get("steps_per_print", "none") == "none"
