"""Feed-forward layers of a rank's tokens alone, in models that mix tokens in any way, against one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mixing_models import ShiftedMlp
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration, XLNetConfig, XLNetLMHeadModel

from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import PolyaccelError
from polyaccel.torch.tiled.tokenwise import TokenwiseLayers

WORDS, LENGTH = 32, 7
IDS = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % (WORDS - 2) + 2


class Mixing(nn.Module):
    """A block with a convolution along the sequence, and layers between which nothing else mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.fc2(self.fc1(x).relu())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(Mixing() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": (x - self.words(labels)).square().mean()}


class Shifted(Mixing):
    """A block with a layer that adds each token's neighbour: of two linear layers and an activation, by its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.shifted = ShiftedMlp(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shifted(x)


class OwnShifted(Own):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(2))


def t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def xlnet() -> nn.Module:
    """Its layers compute in a method of a block that calls a layer which is found by itself: they are cut once."""
    sizes = {"vocab_size": WORDS, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12}
    return XLNetLMHeadModel(XLNetConfig(**sizes, dropout=0.0))


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    outputs: Any = model(input_ids=IDS, labels=IDS.roll(1, 1))
    outputs["loss"].backward()
    return outputs["loss"].detach(), {n: one.grad for n, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("make", "world", "names"),
    [
        (Own, 3, [f"blocks.{at}.fc{one}" for at in (0, 1) for one in (1, 2)]),
        (
            OwnShifted,
            2,
            [f"blocks.{at}.{one}" for at in (0, 1) for one in ("fc1", "fc2", "shifted.down", "shifted.up")],
        ),
        (xlnet, 2, [f"transformer.layer.{at}.ff" for at in (0, 1)]),
        (t5, 2, [f"{one}coder.block.{at}.layer.{n}" for one, n in (("en", 1), ("de", 2)) for at in (0, 1)]),
    ],
)
def test_gradients_are_those_of_one_rank(make, world, names):
    torch.manual_seed(3)
    model = make().double().train()
    expected_loss, expected = loss_and_gradients(copy.deepcopy(model))

    def run(communicator):
        own = copy.deepcopy(model)
        layers = TokenwiseLayers(own, communicator)
        assert sorted(layers.module_names) == sorted(names)
        inner, parts = own.get_submodule(names[0]), []
        inner.register_forward_hook(lambda *_: parts.append(layers.ranks.rank))
        found = loss_and_gradients(own)
        assert parts, "the layer was not called"
        layers.remove()
        assert not [one for one in own.modules() if "forward" in vars(one)]
        return found

    found = run_threads(world, run)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.items():
        mean = sum(own[name] for _, own in found) / world
        torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_each_rank_computes_its_own_tokens():
    seen: dict[int, list[tuple[int, ...]]] = {}

    def run(communicator):
        torch.manual_seed(3)
        own = Own().train()
        layers = TokenwiseLayers(own, communicator)
        rank, last = communicator.rank, own.blocks[1].fc2
        forward = last.__dict__["forward"]
        forward.before = lambda x: seen.setdefault(rank, []).append(tuple(x.shape)) or type(last).forward(last, x)
        loss_and_gradients(own)
        own.eval()
        own.blocks[0](torch.zeros(1, LENGTH, 8))
        layers.remove()

    run_threads(3, run)
    assert seen == {0: [(1, 5, 12)], 1: [(1, 5, 12)], 2: [(1, 4, 12)]}


def test_a_model_without_linear_layers_is_refused():
    def run(communicator):
        with pytest.raises(PolyaccelError):
            TokenwiseLayers(nn.Sequential(nn.Conv1d(2, 2, 1)), communicator)

    run_threads(2, run)
