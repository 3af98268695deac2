"""DeepSpeed's names around Muon: the marks of its matrices, and its optimizer as an object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from polyaccel.engine.policies.muon import MUON
from polyaccel.errors import PolyaccelError
from polyaccel.torch.muon.groups import MuonGroups
from polyaccel.torch.muon.plain import Muon

_OF_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5, "ns_method": "gram"}
_OF_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_NOT_MUONS = ("embed", "lm_head")


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Mark which parameters Muon updates, where the config asks for it: `initialize` reads these marks.

    Args:
        config_class: A `DeepSpeedConfig`.
        model: Its parameters get an attribute `use_muon`.
    """
    if str(config_class.optimizer_name).lower() != MUON.lower():
        return
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() >= 2 and not any(part in name.lower() for part in _NOT_MUONS)
        parameter.use_muon = is_matrix  # type: ignore[attr-defined]


def resolve_per_head_muon_after_sharding(model: nn.Module) -> None:
    """Change nothing: no parameter has heads to count, for a config with `per_head_muon` is refused."""


class MuonWithAuxAdam(Muon):
    """Muon for groups with `use_muon`, AdamW for the others. `adam_optimizer` and its kind have no effect.

    What it makes is a config's plain `Muon`, whose type an engine gives whole matrices.
    """

    def __new__(  # type: ignore[misc]  # the type of a config's own
        cls,
        param_groups: Iterable[Mapping[str, Any]],
        adam_optimizer: Any = None,
        adam_optimizer_kwargs: Mapping[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
    ) -> Muon:
        groups = [dict(group) for group in param_groups]
        if not adam_w_mode:
            raise PolyaccelError(
                "adam_w_mode is False with Muon", hint="leave it out: decay is AdamW's", value=adam_w_mode
            )
        for group in groups:
            if "use_muon" not in group:
                raise PolyaccelError(
                    "a group of parameters of Muon has no use_muon",
                    hint="set it to True for matrices, and to False for all else",
                    value=sorted(group),
                )
        return Muon(MuonGroups([{**(_OF_MUON if group["use_muon"] else _OF_ADAM), **group} for group in groups]))
