"""Layers that give each other every kind of value, for pipelines: structures, classes, flags, shapes that change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

WIDTH = 6


class Kind(Enum):
    DOUBLED = 2


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class State:
    hidden: Tensor
    steps: int
    notes: dict[str, Any] = field(default_factory=dict)


Given = Callable[[Tensor, int], Any]
Taken = Callable[[Any], Tensor]

VALUES: dict[str, tuple[Given, Taken]] = {
    "list": (lambda h, _: [h, 2 * h], lambda x: x[0] + x[1]),
    "one": (lambda h, _: [h], lambda x: x[0] + x[-1]),
    "empty_beside": (lambda h, _: [[], h, (), {}], lambda x: x[1] * (len(x) + len(x[0]) + len(x[2]))),
    "dict": (lambda h, _: {"h": h, 3: (h, None)}, lambda x: x["h"] + x[3][0]),
    "ordered": (lambda h, _: OrderedDict(b=h, a=2 * h), lambda x: list(x.values())[1] - x["b"] * len(x)),
    "flag": (lambda h, _: [h, True, 3, 0.1, "tanh", b"x"], lambda x: getattr(torch, x[4])(x[0]) * x[2] * x[3]),
    "nested": (lambda h, _: [(h, [h, (h, 1.5)])], lambda x: x[0][0] + x[0][1][0] * x[0][1][1][1]),
    "object": (
        lambda h, number: State(h, number, {"kind": Kind.DOUBLED, "mask": h.detach() > 0}),
        lambda x: x.hidden * x.steps + torch.where(x.notes["mask"], x.hidden, 0) * x.notes["kind"].value,
    ),
    "output": (
        lambda h, _: BaseModelOutput(last_hidden_state=h, hidden_states=(h, h * 3)),
        lambda x: x.last_hidden_state + x["hidden_states"][1] + x[1][0],
    ),
    "shared": (lambda h, _: [h, h, h.detach()], lambda x: x[0] * x[1] + x[2]),
    "integers": (
        lambda h, _: [h, torch.arange(len(h))[:, None], torch.tensor(2, dtype=torch.int8), h > 0, h.half()],
        lambda x: x[0] * x[1] / x[2] + x[3] * x[4].float(),
    ),
    "frozen": (lambda h, _: {"h": h, "fixed": h.detach().clone()}, lambda x: x["h"] * x["fixed"]),
    "shapes": (lambda h, number: [h[: 1 + number % 3], h[:0]], lambda x: x[0].sum(0, keepdim=True) + x[1].sum()),
    "complex": (lambda h, _: [torch.fft.fft(h).conj()], lambda x: torch.fft.ifft(x[0]).real + x[0].abs()),
    "turned": (lambda h, _: [h.t(), h[:, ::2], h[:1].expand(4, WIDTH)], lambda x: x[0].t() + x[1].mean() + x[2][0]),
    "dtypes": (
        lambda h, _: [h, torch.float64, h.shape, range(2), h.device, 2j],
        lambda x: (x[0].to(x[1]) * x[2].numel() / 24 * len(x[3]) + x[5].imag).float(),
    ),
}


class Gives(nn.Module):
    """A layer that gives a kind of value. It counts its forward passes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._give = VALUES[kind][0]
        self._passes = 0

    def forward(self, x: Tensor) -> Any:
        self._passes += self.training
        return self._give(self.layer(x), self._passes)


class Takes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._take = VALUES[kind][1]

    def forward(self, x: Any) -> Tensor:
        return self.layer(self._take(x))


def value_layers(kind: str) -> list[nn.Module]:
    """Two pairs of layers between which the value passes, for up to four chunks."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return [Gives(kind), Takes(kind), Gives(kind), Takes(kind)]


class ChangesInPlace(nn.Module):
    """Writes into what it is given, a tensor or the first of a list."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        self._change(x)
        return x


def in_place_layers() -> list[nn.Module]:
    """Four layers of which each but the first begins by a change in place."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return [
        linears[0],
        nn.Sequential(nn.ReLU(inplace=True), linears[1]),
        nn.Sequential(ChangesInPlace(lambda x: x.mul_(2)), linears[2]),
        nn.Sequential(nn.Dropout(0.0, inplace=True), nn.Hardtanh(inplace=True), linears[3]),
    ]
