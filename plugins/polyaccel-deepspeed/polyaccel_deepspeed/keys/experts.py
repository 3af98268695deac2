"""The routing that a config states for a mixture, compared with the model, whose own router computes.

DeepSpeed's AutoEP puts its router in place of the model's, so its config states how to route. Here the model
routes. A stated value must be the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from polyaccel.config.keys import parent_of
from polyaccel.errors import ConfigError, Problem
from polyaccel_deepspeed.change import Change, Tree

ROUTING: dict[str, tuple[Any, tuple[str, ...]]] = {
    "expert_activation": (None, ()),
    "num_expert_groups": (None, ("n_group",)),
    "num_limited_groups": (None, ("topk_group",)),
    "route_norm": (None, ("norm_topk_prob",)),
    "route_scale": (1.0, ("routed_scaling_factor",)),
    "routed_scaling_factor": ("auto", ("routed_scaling_factor",)),
    "score_func": ("auto", ("scoring_func",)),
    "top_k": ("auto", ("num_experts_per_tok", "moe_topk", "moe_k")),
}
"""Keys of `expert_parallel`: DeepSpeed's default, and attributes of a model's config with the same meaning."""
_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu_tanh": ("gelu_pytorch_tanh", "gelu_new")}
"""DeepSpeed's names of experts' activations, and `hidden_act` of a model's config."""
_OF_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"route_norm": True, "score_func": "softmax"},
    "qwen2_moe": {"score_func": "softmax"},
    "qwen3_moe": {"score_func": "softmax"},
    "deepseek_v2": {"score_func": "softmax"},
    "deepseek_v3": {"score_func": "sigmoid"},
}
"""What transformers' routers compute that their configs do not state, by `model_type`."""


def pop_routing(tree: Tree) -> list[Change]:
    """Remove the keys of `ROUTING`, which `require_routing` reads where the model is known."""
    changes = []
    for name, (default, _) in ROUTING.items():
        table, last = parent_of(tree, f"expert_parallel.{name}")
        if last in table and (value := table.pop(last)) not in (default, None):
            changes.append(Change(f"expert_parallel.{name}", f"= {value!r} is compared with the model, which routes"))
    return changes


def require_routing(written: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ConfigError where the section `expert_parallel` of a config states another routing than the model's, or one
    that the model's config does not tell."""
    section = written.get("expert_parallel")
    if not isinstance(section, Mapping) or section.get("enabled") is not True:
        return
    problems = []
    for name, (default, _) in ROUTING.items():
        value = section.get(name, default)
        if value in (default, None):
            continue
        found = _of_model(name, model)
        if found is None or value not in found:
            what = "is not known of the model" if found is None else f"is {found[0]!r} in the model"
            hint = "leave it out, for the model's own router computes; or change the model's config"
            problems.append(Problem(f"expert_parallel.{name}", value, what, hint))
    if problems:
        raise ConfigError(problems, source="initialize")


def _of_model(name: str, model: nn.Module) -> tuple[Any, ...] | None:
    """The values of a key that mean what the model does; None where that is not known."""
    config = getattr(model, "config", None)
    if name == "expert_activation":
        act = getattr(config, "hidden_act", None)
        return next(((ours,) for ours, names in _ACTIVATIONS.items() if act in names), None)
    family = _OF_FAMILIES.get(getattr(config, "model_type", ""), {})
    if name in family:
        return (family[name],)
    value = next((v for one in ROUTING[name][1] if (v := getattr(config, one, None)) is not None), None)
    return None if value is None else (value,)
