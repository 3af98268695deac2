"""Compressed layers in plain torch, for comparison: each rule written with `detach`, without anything of ours."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

OFFSET, INPUTS_FROM, PRUNED_FROM = 1, 1, 2
RATIO = 0.4
CONFIG: dict[str, Any] = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_groups": 3, "schedule_offset": OFFSET},
        "different_groups": {
            "a": {
                "params": {"start_bits": 8, "target_bits": 4, "quantization_period": 1},
                "modules": ["wide", "narrow", "embed", "head"],
            },
            "b": {"params": {"start_bits": 2, "target_bits": 2, "quantization_period": 0}, "modules": ["twice"]},
        },
    },
    "activation_quantization": {
        "shared_parameters": {
            "enabled": True,
            "schedule_offset": INPUTS_FROM,
            "quantization_type": "asymmetric",
            "range_calibration": "static",
        },
        "different_groups": {"a": {"params": {"bits": 8}, "modules": ["wide", "twice"]}},
    },
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": PRUNED_FROM},
        "different_groups": {"a": {"params": {"dense_ratio": RATIO}, "modules": ["twice"]}},
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": PRUNED_FROM},
        "different_groups": {
            "a": {"params": {"dense_ratio": RATIO}, "modules": ["wide"], "related_modules": [["narrow"]]}
        },
    },
}
"""Every rule on the parity model, with masks of magnitudes."""


def ste(values: Tensor, others: Tensor) -> Tensor:
    return values + (others - values).detach()


def symmetric(weight: Tensor, bits: int, groups: int) -> Tensor:
    rows = weight.reshape(groups, -1)
    scale = rows.abs().max(1, keepdim=True).values / (2 ** (bits - 1) - 1)
    return (torch.round(rows / scale) * scale).view_as(weight)


def ternary(weight: Tensor, groups: int) -> Tensor:
    rows = weight.reshape(groups, -1)
    kept = rows.abs() > 0.7 * rows.abs().mean(1, keepdim=True)
    scale = (rows.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    return (rows.sign() * kept * scale).view_as(weight)


@dataclass
class PlainCompression:
    """The same rules on a plain model; `end_step` is called after each optimizer step."""

    model: nn.Module
    step: int = 0
    masks: dict[str, Tensor] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    seen: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("embed", "wide", "narrow", "twice", "head"):
            layer = getattr(self.model, name)
            layer.forward = types.MethodType(lambda module, x, name=name: self.forward(name, module, x), layer)

    def forward(self, name: str, layer: Any, x: Tensor) -> Tensor:
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if self.step >= PRUNED_FROM:
            self.begin_pruning()
            if name == "twice":
                weight = weight * self.masks["twice"]
            elif name == "wide":
                weight, bias = weight * self.masks["wide"][:, None], bias * self.masks["wide"]
            elif name == "narrow":
                weight = weight * self.masks["wide"][None]
        if self.step >= OFFSET:
            bits = max(4, 8 - (self.step - OFFSET))
            weight = ste(weight, ternary(weight, 3) if name == "twice" else symmetric(weight, bits, 3))
        if name == "embed":
            return functional.embedding(x, weight)
        if name in ("wide", "twice"):
            low, high = self.seen.get(name, (float("inf"), float("-inf")))
            self.seen[name] = (min(low, float(x.detach().min())), max(high, float(x.detach().max())))
            if self.step >= INPUTS_FROM:
                low, high = self.ranges[name]
                scale = (high - low) / 255
                x = ste(x, torch.round((x - low) / scale).clamp(0, 255) * scale + low)
        return functional.linear(x, weight, bias)

    @torch.no_grad()
    def begin_pruning(self) -> None:
        if self.masks:
            return
        for name, scores in (
            ("twice", self.model.twice.weight.abs()),  # type: ignore[union-attr, operator]
            ("wide", self.model.wide.weight.abs().sum(1)),  # type: ignore[union-attr, operator]
        ):
            kept = round(RATIO * scores.numel())
            mask = torch.zeros(scores.numel())
            mask[scores.flatten().argsort(descending=True)[:kept]] = 1.0
            self.masks[name] = mask.view_as(scores)

    def end_step(self) -> None:
        self.step += 1
        for name, (low, high) in self.seen.items():
            if name in self.ranges:
                before = self.ranges[name]
                low, high = 0.95 * before[0] + 0.05 * low, 0.95 * before[1] + 0.05 * high
            self.ranges[name] = (low, high)
        self.seen.clear()
