"""No bad config is accepted, and every problem names its key, says what was expected, and how to hint it."""

from __future__ import annotations

from typing import Any

import pytest

from polyaccel.config import Config, load_config, load_resolved, resolve_config
from polyaccel.config.section import Listed, Section
from polyaccel.config.validation import validate_tree
from polyaccel.errors import ConfigError

OK = {"train_micro_batch_size_per_gpu": 1}
ADAM = {"type": "Adam"}
BF16 = {"bf16": {"enabled": True}}


def _zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


def _params(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def _schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    # unknown keys, at every depth
    ({"zero_optimisation": {}}, "zero_optimisation", "did you mean 'zero_optimization'?"),
    ({"gradient_cliping": 1.0}, "gradient_cliping", "did you mean 'gradient_clipping'?"),
    ({"loss_scale": 0}, "loss_scale", "did you mean 'fp16.loss_scale'?"),
    ({"qwertz": 1}, "qwertz", "is not a known key"),
    # keys that the drop-in refuses are not taken for a similar one
    ({"graph_harvesting": True}, "graph_harvesting", "polyaccel config check --deepspeed"),
    (_zero(mics_shard_size=2), "zero_optimization.mics_shard_size", "polyaccel config check --deepspeed"),
    ({"fp16": {"loss_scal": 1}}, "fp16.loss_scal", "did you mean 'fp16.loss_scale'?"),
    (_zero(stge=1), "zero_optimization.stge", "did you mean 'zero_optimization.stage'?"),
    (
        _zero(offload_optimizer={"devise": "none"}),
        "zero_optimization.offload_optimizer.devise",
        "did you mean 'zero_optimization.offload_optimizer.device'?",
    ),
    ({"timers": {"throughput": {"enable": True}}}, "timers.throughput.enable", "'timers.throughput.enabled'?"),
    (_params("Adam", beta=[0.9, 0.9]), "optimizer.params.beta", "did you mean 'optimizer.params.betas'?"),
    (_schedule("WarmupLR", warmup_steps=3), "scheduler.params.warmup_steps", "is not a known key"),
    # wrong types
    ({"train_batch_size": "8"}, "train_batch_size", "write 8 without quotes"),
    ({"train_batch_size": True}, "train_batch_size", "should be an integer, not true or false"),
    ({"train_batch_size": 2.5}, "train_batch_size", "should be a valid integer"),
    ({"train_batch_size": 0}, "train_batch_size", "should be greater than 0"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping", "write 1.0 without quotes"),
    ({"gradient_clipping": True}, "gradient_clipping", "should be a valid number"),
    ({"gradient_clipping": -1}, "gradient_clipping", "should be greater than or equal to 0"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping", "should be a finite number"),
    ({"steps_per_print": "auto"}, "steps_per_print", '"auto" is not available for this key'),
    ({"bf16": {"enabled": 1}}, "bf16.enabled", "write true or false"),
    ({"bf16": {"enabled": "True"}}, "bf16.enabled", "write true without quotes"),
    ({"bf16": True}, "bf16", "should be an object"),
    (_zero(stage=True), "zero_optimization.stage", "should be an integer, not true or false"),
    (_zero(stage=4), "zero_optimization.stage", "should be 0, 1, 2 or 3"),
    (_zero(stage="2"), "zero_optimization.stage", "should be 0, 1, 2 or 3"),
    ({"communication_data_type": "fp61"}, "communication_data_type", "did you mean 'fp16'?"),
    ({"gradient_allreduce_op": "avg"}, "gradient_allreduce_op", "should be 'mean' or 'sum'"),
    ({"comm": {"timeout_s": 0}}, "comm.timeout_s", "should be greater than 0"),
    ({"comms_logger": {"prof_ops": ["all_reduced"]}}, "comms_logger.prof_ops[0]", "did you mean 'all_reduce'?"),
    ({"checkpoint": {"tag_validation": "Wrn"}}, "checkpoint.tag_validation", "did you mean 'Warn'?"),
    (
        {"data_types": {"keep_in_fp32_modules": "al"}},
        "data_types.keep_in_fp32_modules",
        "should be a valid list, or should be 'auto'",
    ),
    # features that do not exist
    ({"pipeline": {"seed_layers": True}}, "pipeline.seed_layers", "which polyaccel does not have"),
    ({"pipline": {"stages": 2}}, "pipline", "did you mean 'pipeline'?"),
    ({"wandb": {"porject": "mine"}}, "wandb.porject", "did you mean 'wandb.project'?"),
    ({"wandb": True}, "wandb", "should be an object"),
    ({"managed_gradient_accumulation": 0}, "managed_gradient_accumulation", "belongs to gradient accumulation"),
    ({"autotp_size": 2}, "autotp_size", "did you mean 'tensor_parallel.autotp_size'?"),
    (_zero(zenflo={}), "zero_optimization.zenflo", "did you mean 'zero_optimization.zenflow'?"),
    ({"optimizer": {"params": {}}}, "optimizer.type", "is required and missing"),
    ({"optimizer": ADAM | {"params": [1]}}, "optimizer.params", "should be an object"),
    # arguments of named optimizers and schedules
    (_params("Adam", lr="1e-3"), "optimizer.params.lr", "write 1e-3 without quotes"),
    (_params("adamw", betas=[0.9]), "optimizer.params.betas[1]", "is required and missing"),
    (_params("Lion", betas=[0.9, 1.0]), "optimizer.params.betas[1]", "should be less than 1"),
    (_params("Adam", amsgrad=True), "optimizer.params.amsgrad", "AMSGrad is not available"),
    (_params("AdamW", adam_w_mode=False), "optimizer.params.adam_w_mode", "coupled decay is 'Adam'"),
    (_params("Lamb", max_grad_norm=1.5), "optimizer.params.max_grad_norm", '"gradient_clipping": 1.5'),
    (_params("RMSprop", max_grad_norm=1.5), "optimizer.params.max_grad_norm", '"gradient_clipping": 1.5'),
    (_params("RMSprop", alpha="auto"), "optimizer.params.alpha", '"auto" is not available for this key'),
    (_params("SGD", nesterov=True), "optimizer.params.nesterov", "needs momentum above 0"),
    (_schedule("warmupLR"), "scheduler.type", "did you mean 'WarmupLR'?"),
    (_schedule("WarmupDecayLR"), "scheduler.params.total_num_steps", "is required and missing"),
    (_schedule("WarmupLR", warmup_type="cubic"), "scheduler.params.warmup_type", "should be 'log' or 'linear'"),
    (_schedule("OneCycle", cycle_max_lr=1), "scheduler.params.cycle_min_lr", "is required and missing"),
    # "auto" that nothing decides
    ({"gradient_clipping": "auto"}, "gradient_clipping", "give max_grad_norm"),
    ({"fp16": {"enabled": "auto"}}, "fp16.enabled", "give fp16"),
    (_params("Adam", betas="auto"), "optimizer.params.betas", "give adam_beta1 and adam_beta2"),
    (_zero(reduce_bucket_size="auto"), "zero_optimization.reduce_bucket_size", "give hidden_size"),
    # contradictions
    ({"fp16": {"enabled": True}} | BF16, "bf16.enabled", "excludes fp16.enabled"),
    (
        {"torch_autocast": {"enabled": True}} | BF16,
        "torch_autocast.enabled",
        "excludes bf16.enabled",
    ),
    (BF16 | {"data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype", "should be 'bf16'"),
    ({"data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype", "should be 'fp32'"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 3, "min_loss_scale": 16}},
        "fp16.min_loss_scale",
        "is above the initial scale 2 ** 3",
    ),
    (
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor",
        "has no effect when prescale_gradients",
    ),
    ({"gradient_allreduce_op": "sum", "prescale_gradients": True}, "gradient_allreduce_op", "divides nothing"),
    (
        {"gradient_clipping": 1.0, **_zero(compute_grad_norm=False)},
        "zero_optimization.compute_grad_norm",
        "is needed for gradient_clipping = 1.0",
    ),
    ({"data_parallel_size": 3}, "data_parallel_size", "should be the world size, 2"),
    # the batch triad
    ({"train_batch_size": 7}, "train_batch_size", "multiple of the world size = 2"),
    (
        {"train_batch_size": 8, "gradient_accumulation_steps": 3},
        "train_batch_size",
        "gradient_accumulation_steps * world size = 6 (train_batch_size = 8, gradient_accumulation_steps = 3, world",
    ),
    (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3},
        "train_batch_size",
        "= 6 (train_batch_size = 8, train_micro_batch_size_per_gpu = 1, gradient_accumulation_steps = 3, world size 2)",
    ),
    ({"gradient_accumulation_steps": 3}, "train_batch_size", "(gradient_accumulation_steps = 3, world size 2)"),
    (
        {"train_batch_size": "auto"},
        "train_batch_size",
        "give train_batch_size (a hint of this name",
    ),
    # deprecated, and removed by DeepSpeed
    ({"bfloat16": {}, "bf16": {}}, "bfloat16", "is another name of bf16"),
    (
        _zero(prefetch_bucket_size=50_000_000, stage3_prefetch_bucket_size=50_000_000),
        "zero_optimization.prefetch_bucket_size",
        "is another name of zero_optimization.stage3_prefetch_bucket_size",
    ),
    (
        _zero(stage=1, offload_optimizer={"device": "nvme"}),
        "zero_optimization.offload_optimizer.nvme_path",
        'is needed for offload_optimizer.device = "nvme"',
    ),
    (
        _zero(cpu_offload=True, offload_optimizer={"device": "none"}),
        "zero_optimization.cpu_offload",
        "contradicts zero_optimization.offload_optimizer.device",
    ),
    ({"amp": {}}, "amp", "is not a known key"),
    (
        {"elasticity": {"enabled": True, "max_train_batch_size": 8}} | {"gradient_accumulation_steps": 3},
        "gradient_accumulation_steps",
        "is decided by elasticity: 1 on 2 ranks",
    ),
    ({"elasticity": {"enabled": True}}, "elasticity", "needs max_train_batch_size"),
    ({"elasticity": {"version": 0.3}}, "elasticity.version", "should be 0.1 or 0.2"),
    ({"elasticity": {"micro_batch_sizes": []}}, "elasticity.micro_batch_sizes", "names no micro-batch"),
]


TRIAD = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


def _report(config: dict[str, Any], world_size: int = 2) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_resolved(config, world_size=world_size)
    return caught.value


@pytest.mark.parametrize(("config", "key", "part"), BAD, ids=[f"{number}-{row[1]}" for number, row in enumerate(BAD)])
def test_a_bad_config_is_refused_with_its_key_and_cure(config: dict[str, Any], key: str, part: str) -> None:
    error = _report(config if TRIAD & set(config) else OK | config)
    assert [problem.key for problem in error.problems] == [key]
    assert part in str(error)
    assert error.problems[0].hint


class Layer(Section):
    shape: int = 1
    """Of the layer."""


class Layers(Section):
    layers: Listed[tuple[Layer, ...]] = ()
    """A list of sections, which no key of ours is at present."""


def test_a_misspelt_key_in_a_list_is_named_with_its_index() -> None:
    _, problems = validate_tree(Layers, {"layers": [{"shape": 2}, {"shap": 1}]})
    assert problems[0].key == "layers[1].shap"
    assert problems[0].hint == "did you mean 'layers[1].shape'?"


def test_an_empty_config_lacks_only_the_batch_size() -> None:
    error = _report({})
    assert [problem.key for problem in error.problems] == ["train_batch_size"]
    assert "none of the three is given, world size 2" in str(error)


def test_all_problems_come_at_once() -> None:
    """Of every kind: types, absent features, contradictions, arguments, the world size."""
    config = {
        "train_batch_size": 7,
        "gradient_clipping": "1",
        "zero_optimization": {"zenflow": {}, "stagee": 1},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "epss": 1}},
        "scheduler": {"type": "OneCycle"},
        "amp": {},
        "data_parallel_size": 5,
    }
    error = _report(config)
    assert sorted(problem.key for problem in error.problems) == [
        "amp",
        "bf16.enabled",
        "data_parallel_size",
        "gradient_clipping",
        "optimizer.params.epss",
        "optimizer.params.lr",
        "scheduler.params.cycle_max_lr",
        "scheduler.params.cycle_min_lr",
        "train_batch_size",
        "zero_optimization.stagee",
        "zero_optimization.zenflow",
    ]
    assert str(error).startswith("config dict: 11 problems")


def test_a_refused_batch_size_is_not_reported_again_as_missing() -> None:
    assert [problem.expected for problem in _report({"train_batch_size": "8"}).problems] == [
        "should be a valid integer"
    ]


def test_loading_alone_reports_what_needs_no_world_size() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"stage": 7}})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("zero_optimization.stage", 7)]


def test_a_config_made_by_hand_is_checked_too() -> None:
    config = Config(train_batch_size=4, gradient_allreduce_op="sum", prescale_gradients=True)
    with pytest.raises(ConfigError) as caught:
        resolve_config(config, world_size=2)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("gradient_allreduce_op", "sum")]


def test_a_hint_is_checked_like_a_written_value() -> None:
    config = load_config({"train_batch_size": 2, "gradient_clipping": "auto", "fp16": {"enabled": "auto"}} | BF16)
    with pytest.raises(ConfigError) as caught:
        resolve_config(config, world_size=2, hints={"max_grad_norm": "1", "fp16": True})
    assert {problem.key for problem in caught.value.problems} == {"gradient_clipping", "bf16.enabled"}


def test_a_world_without_ranks_is_refused() -> None:
    assert "world_size = 0: should be at least 1" in str(_report({"train_batch_size": 4}, world_size=0))


def test_suggestions_are_made_for_the_first_fifty_unknown_keys() -> None:
    """Each takes a look at all keys; there may be megabytes of unknown ones."""
    tree = {**OK, **{f"gradient_cliping{number}": 1 for number in range(1000)}}
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    assert len(caught.value.problems) == 1000
    suggested = [problem for problem in caught.value.problems if "did you mean" in problem.hint]
    assert len(suggested) == 50
    assert "gradient_cliping99" in str(caught.value)
    assert str(caught.value).endswith("and 900 more")


def test_a_value_too_long_to_print_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**OK, "comm": {"backend": 1, "dump_dir": ["x" * 10_000]}})
    assert len(str(caught.value)) < 1000
    assert "(10004 characters)" in str(caught.value)


DEEP: dict[str, Any] = {}
for _ in range(5000):
    DEEP = {"zero_optimization": DEEP}
CYCLE: dict[str, Any] = {}
CYCLE["fp16"] = CYCLE


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (DEEP, "zero_optimization.zero_optimization.zero_optimization.zero_o..."),
        (CYCLE, "fp16.fp16.fp16.fp16.fp16.fp16.fp16.fp16.fp16.fp16.fp16.fp16...."),
        ({"train_batch_size": 10**40}, "train_batch_size"),
        ({"train_batch_size": 10**9999}, "train_batch_size"),
        ({"fp16": {"initial_scale_power": 1000}}, "fp16.initial_scale_power"),
        ({"comm": {"timeout_s": 1e308}}, "comm.timeout_s"),
        ({"comm": {"dump_dir": "a\0b"}}, "comm.dump_dir"),
    ],
    ids=["deep", "cycle", "large", "thousands of digits", "scale", "timeout", "null"],
)
def test_extremes_are_refused_by_name(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**OK, **tree})
    assert caught.value.problems[0].key == key
