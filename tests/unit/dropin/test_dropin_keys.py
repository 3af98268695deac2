"""Keys of DeepSpeed that the drop-in has by another name, has no use for, or refuses for good."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from polyaccel_deepspeed.config import normalise, read_config
from polyaccel_deepspeed.engine.tensors import with_layer_specs
from polyaccel_deepspeed.keys.experts import ROUTING, require_routing
from polyaccel_deepspeed.keys.settled import IGNORED, NEVER
from torch import nn

from polyaccel.config import load_resolved
from polyaccel.errors import ConfigError

BASE = {"train_batch_size": 4, "gradient_clipping": 0.0}
OTHER_VALUES = {
    "lower_precision_safe_modules": ["torch.nn.Linear"],
    "model_info": {"num_params": 1},
    "dtype": "bf16",
    "lm_head_patterns": ["head"],
    "preset_model": "mixtral",
    "vocab_parallel_ce_backend": "liger",
    "combine_impl": "legacy_bmm",
    "comm_backend": "deepep",
    "gate_up_impl": "fused",
    "row_weighting_impl": "eager",
    "has_shared_experts": True,
}
"""Values that DeepSpeed takes, of keys without effect whose type does not show one."""
IGNORED_KEYS = [(one.section, name, default) for one in IGNORED for name, (default, _) in one.keys.items()]
REFUSED_KEYS = [(one, name, harmless) for one in NEVER for name, harmless in one.keys.items()]


def tree_of(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return {**BASE, **value}


def problems(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    with pytest.raises(ConfigError) as caught:
        normalise(config)
    return [(problem.key, problem.value) for problem in caught.value.problems]


def model_like(**config: Any) -> Any:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(("section", "name", "default"), IGNORED_KEYS)
def test_a_key_without_effect_is_checked_and_logged(section: str, name: str, default: Any) -> None:
    key = f"{section}.{name}"
    base = {"type": "Adam"} if section == "optimizer" else {}
    plain = load_resolved(normalise(tree_of(section, base))[0], world_size=1)
    if default is not None:
        assert key not in [change.key for change in normalise(tree_of(section, {**base, name: default}))[1]]
    other = OTHER_VALUES.get(name, (not default) if isinstance(default, bool) else 3 if default is not None else "x")
    tree, changes = normalise(tree_of(section, {**base, name: other}))
    assert [change.key for change in changes].count(key) == 1
    assert load_resolved(tree, world_size=1) == plain
    if name != "dtype":  # anything may be one
        assert problems(tree_of(section, {**base, name: 2.5})) == [(key, 2.5)]


@pytest.mark.parametrize(("never", "name", "harmless"), REFUSED_KEYS)
def test_a_key_that_asks_for_nothing_is_dropped_and_another_value_refused(never: Any, name: str, harmless: Any) -> None:
    key = f"{never.section}.{name}"
    for value in harmless if isinstance(harmless, tuple) else (harmless,):
        tree, _ = normalise(tree_of(key, value))
        load_resolved(tree, world_size=1)
    asking = True if harmless is False or harmless is None else False if harmless is True else 7
    tree = tree_of(key, asking)
    if never.switch is not None and never.switch != key:
        load_resolved(normalise(tree)[0], world_size=1)  # an option of what is off
        tree[never.section][never.switch.rpartition(".")[2]] = True
    assert (key, asking) in problems(tree)


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ({"tensor_parallel": {"tensor_parallel": {"tp_size": 2}}}, "tensor_parallel", {"tp": {"tp_size": 2}}),
        (
            {"zero_optimization": True, "allgather_size": 7},
            "zero_optimization",
            {"stage": 1, "allgather_bucket_size": 7},
        ),
        (
            {"sequence_parallel_size": 2, "seq_parallel_communication_data_type": "bf16"},
            "communication_data_type",
            "bf16",
        ),
        (
            {"sequence_parallel_size": 2, "communication_data_type": "fp16"},
            "communication_data_type",
            "fp32",
        ),
        ({"communication_data_type": "fp16"}, "communication_data_type", "fp16"),
        ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint", {"storage": "node_local", "async": False}),
        ({"checkpoint": {"writer": {"type": "fast", "decoupled": True}}}, "checkpoint", {"async": True}),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint", {"async": False}),
        ({"datastates_ckpt": {"host_cache_size": 1}}, "checkpoint", {"async": True}),
        (
            {"nebula": {"enabled": True, "num_of_version_in_retention": 3, "persistent_storage_path": "/x"}},
            "checkpoint",
            {"async": True, "keep_last": 3},
        ),
        (
            {"zero_optimization": {"stage": 2, "sub_group_size": 1e4, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization",
            {"stage": 2, "reduce_bucket_size": 10_000, "offload_optimizer": {"device": "cpu"}},
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
            "zero_optimization",
            {"stage": 3, "zero_hpz_partition_size": 2},
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_hierarchical_params_gather": True}},
            "zero_optimization",
            {"stage": 3},
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, "zero_optimization", {"stage": 3}),
        ({"amp": {"enabled": True}}, "torch_autocast", {"enabled": True, "dtype": "float16"}),
        ({"amp": {"enabled": True, "opt_level": "O2", "loss_scale": 8}}, "fp16", {"enabled": True, "loss_scale": 8.0}),
        ({"amp": {"enabled": True, "opt_level": "O0"}}, "torch_autocast", None),
        ({"managed_gradient_accumulation": False}, "data_types", {"grad_accum_dtype": "fp32"}),
    ],
)
def test_a_key_is_read_as_another_one_with_one_line(written: dict[str, Any], key: str, value: Any) -> None:
    tree, changes = read_config({**BASE, **written})
    assert tree.get(key) == value
    if written != {"communication_data_type": "fp16"}:
        assert len(changes) == 1
    load_resolved(tree, world_size=2)


def peak_of_update(section: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes of memory that an update on the host borrows at once, and the parameters after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, **section}
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, config={**config, "zero_optimization": zero})
    for step in range(3):
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
        engine.backward(engine(inputs.bfloat16()).float().square().mean())
        engine.step()
    nbytes = max(shard.master.nbytes for shard in engine.zero.shards)
    found = {name: one.detach().clone() for name, one in model.named_parameters()}
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    return nbytes, found


def test_sub_groups_bound_what_the_host_updates_at_once() -> None:
    whole, params = peak_of_update({})
    tiles, same = peak_of_update({"sub_group_size": 5_000})
    assert (whole, tiles) == (133_120, 16_896)  # bytes of master weights
    assert all(torch.equal(one, same[name]) for name, one in params.items())


def test_unknown_options_of_a_writer_are_refused() -> None:
    tree, _ = normalise({**BASE, "checkpoint": {"writer": {"typ": "fast"}}})
    with pytest.raises(ConfigError):
        load_resolved(tree, world_size=1)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("checkpoint.writer", "type", "fsat"),
        ("checkpoint.writer", "data_parallel", "node"),
        ("checkpoint.writer", "io_buffer_size", "64M"),
        ("torch_autocast", "lower_precision_safe_modules", ["torch.nn.Linaer"]),
        ("torch_autocast", "lower_precision_safe_modules", ["Linear"]),
    ],
)
def test_a_value_that_deepspeed_refuses_is_refused(section: str, name: str, value: Any) -> None:
    assert problems(tree_of(section, {name: value})) == [(f"{section}.{name}", value)]


def test_values_that_deepspeed_takes_are_taken() -> None:
    writer = {"type": "fast", "data_parallel": "Socket", "io_buffer_size": 1024, "decoupled": True}
    normalise(tree_of("checkpoint", {"writer": writer}))
    normalise(tree_of("torch_autocast", {"lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"]}))


MIXTRAL = {"model_type": "mixtral", "num_experts_per_tok": 2, "hidden_act": "silu"}
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_experts_per_tok": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        (MIXTRAL, {"top_k": 2, "score_func": "softmax", "route_norm": True, "expert_activation": "swiglu"}),
        (DEEPSEEK, {"top_k": 8, "num_expert_groups": 4, "num_limited_groups": 2, "route_norm": True}),
        (DEEPSEEK, {"score_func": "sigmoid", "route_scale": 2.5, "routed_scaling_factor": 2.5}),
        ({}, {name: default for name, (default, _) in ROUTING.items()}),
    ],
)
def test_the_models_own_routing_may_be_stated(config: dict[str, Any], stated: dict[str, Any]) -> None:
    section = {"enabled": True, "autoep_size": 2, **stated}
    require_routing({"expert_parallel": section}, model_like(**config))
    load_resolved(normalise({**BASE, "expert_parallel": section})[0], world_size=2)


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        (MIXTRAL, {"top_k": 1}),
        (MIXTRAL, {"route_norm": False}),
        (MIXTRAL, {"expert_activation": "swiglu_oai"}),
        (MIXTRAL, {"num_expert_groups": 2}),
        (DEEPSEEK, {"routed_scaling_factor": 1.0}),
        ({}, {"score_func": "softmax"}),
    ],
)
def test_another_routing_than_the_models_is_refused(config: dict[str, Any], stated: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        require_routing({"expert_parallel": {"enabled": True, **stated}}, model_like(**config))
    ((name, value),) = stated.items()
    assert [(one.key, one.value) for one in caught.value.problems] == [(f"expert_parallel.{name}", value)]
    require_routing({"expert_parallel": {"enabled": False, **stated}}, model_like(**config))


def _specs(*specs: dict[str, Any], **partition: Any) -> dict[str, Any]:
    return {**BASE, "tensor_parallel": {"partition_config": {"layer_specs": list(specs), **partition}}}


def test_layer_specs_of_other_types_of_models_do_not_count() -> None:
    raw = _specs({"patterns": ["a"], "model_types": ["Llama"]}, {"patterns": ["b"], "model_types": ["bloom"]})
    tree, changes = normalise(raw)
    assert len(changes) == 2
    found = with_layer_specs(tree, raw, model_like(model_type="llama"))
    assert found["tensor_parallel"]["partition_config"] == {"layer_specs": [{"patterns": ["a"]}]}
    load_resolved(found, world_size=1)


def test_a_strict_config_names_the_first_layer_without_a_spec() -> None:
    raw = _specs({"patterns": [r"0\.weight"]}, strict_mode=True)
    tree, _ = normalise(raw)
    with pytest.raises(ConfigError) as caught:
        with_layer_specs(tree, raw, model_like())
    assert [problem.key for problem in caught.value.problems] == ["tensor_parallel.partition_config.strict_mode"]
    whole = _specs({"patterns": [r"\d\.weight"]}, strict_mode=True)
    with_layer_specs(normalise(whole)[0], whole, model_like())
