"""Muon for matrices, with AdamW for all else: which parameters and settings each group has.

DeepSpeed's keys and its rule for what is a matrix of Muon's are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from polyaccel.engine.policies.muon import MUON, is_matrix
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.muon.heads import head_rows_of

_MUON_KEYS = (
    "lr",
    "momentum",
    "weight_decay",
    "nesterov",
    "ns_steps",
    "ns_method",
    "ns_dtype",
    "adjust_lr_fn",
    "normuon_beta",
)
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")


@dataclass
class MuonGroups:
    """The groups of an optimizer, with `use_muon` in each. `heads` has the rows of an attention head by parameter, for
    those whose heads are orthogonalised one by one."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    heads: dict[nn.Parameter, int] = field(default_factory=dict)


def muon_groups(
    params: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], model: nn.Module, *, keeps_empty: bool = False
) -> MuonGroups:
    """Return the groups of the config's Muon over `groups` of the parameters of `model`.

    A parameter's attribute `use_muon` decides, and so does a group's key of that name. Else Muon gets
    what has two dimensions or more, unless its name has "embed" or "lm_head". A group is cut in two where it has both
    kinds, and with `keeps_empty` always, so that the stages of a pipeline have equal groups. Settings of a group go
    before those of the config. Raises ConfigError for a vector of Muon's.
    """
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    rates = {True: params["muon_lr"], False: params["adam_lr"]}
    defaults = {True: 0.02, False: 3e-4}
    found = MuonGroups()
    for group in groups:
        for use_muon, keys in ((True, _MUON_KEYS), (False, _ADAM_KEYS)):
            members = [each for each in group["params"] if _is_muons(each, names.get(each, ""), group) is use_muon]
            if not members and not keeps_empty:
                continue
            settings = {key: params[key] for key in keys}
            rate = rates[use_muon] if rates[use_muon] is not None else params["lr"]
            settings["lr"] = defaults[use_muon] if rate is None else rate
            settings |= {key: value for key, value in group.items() if key != "params"}
            found.groups.append({**settings, "params": members, "use_muon": use_muon})
            if use_muon:
                _check_matrices(members, names)
    matrices = [each for group in found.groups if group["use_muon"] for each in group["params"]]
    found.heads = head_rows_of(model, {each: names[each] for each in matrices if each in names}, params)
    return found


def _is_muons(parameter: nn.Parameter, fqn: str, group: Mapping[str, Any]) -> bool:
    chosen = group.get("use_muon", getattr(parameter, "use_muon", None))
    if chosen is not None:
        return bool(chosen)
    return is_matrix(fqn, parameter.dim())


def _check_matrices(members: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    for each in members:
        if each.dim() < 2:
            fqn = names.get(each, "a parameter")
            expected = f"{fqn} has use_muon and {each.dim()} dimensions, and Muon updates matrices"
            raise ConfigError([Problem("optimizer.type", MUON, expected, "set use_muon = False on it")])
