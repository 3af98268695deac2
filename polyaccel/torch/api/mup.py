"""Optimizers of muP (Yang et al. 2022, https://arxiv.org/abs/2203.03466): learning rates that follow widths.

A model whose parameters have `infshape`, as `mup.set_base_shapes` gives them, keeps its best learning rate when it
becomes wider. Adam's rate of a matrix is divided by how much wider it is than in the base model, SGD's follows from
both of its sides. The names are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.api.optimizer import ParamGroups, make_groups

MUP = {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "SGD"}
"""The optimizer that each of these is, with scaled groups."""


def mup_groups(name: str, params: Mapping[str, Any], parameters: Iterable[Any] | None, model: nn.Module) -> ParamGroups:
    """Return groups of `parameters` (None: all of `model`) split by width, each with its rate and weight decay.

    `params` are the config's arguments of the optimizer `name`. With `decoupled_wd` the weight decay stays as it is.

    Raises:
        ConfigError: A parameter has no `infshape`, or three dimensions that grow.
    """
    defaults = {key: value for key, value in params.items() if key != "decoupled_wd"}
    if MUP[name] != "SGD":
        defaults["decoupled"] = name == "MuAdamW"
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    found: ParamGroups = []
    for group in make_groups(parameters, model, defaults):
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_scale.setdefault(_rate_scale(name, parameter, names.get(parameter, "a parameter")), []).append(parameter)
        for scale, members in by_scale.items():
            decay = group["weight_decay"] if params["decoupled_wd"] else group["weight_decay"] / scale
            found.append({**group, "params": members, "lr": group["lr"] * scale, "weight_decay": decay})
    return found


def _rate_scale(name: str, parameter: nn.Parameter, fqn: str) -> float:
    """The factor of a parameter's learning rate."""
    shape = getattr(parameter, "infshape", None)
    if shape is None or (count := shape.ninf()) > 2:
        what = f"{fqn} has no infshape" if shape is None else f"{fqn} has more than two dimensions that grow"
        hint = "call mup.set_base_shapes(model, base) before polyaccel.initialize"
        raise ConfigError([Problem("optimizer.type", name, what, hint)])
    if count == 2:
        return 1 / float(shape.fanin_fanout_mult_ratio() if name == "MuSGD" else shape.width_mult())
    return float(shape.width_mult()) if name == "MuSGD" and count == 1 else 1.0
