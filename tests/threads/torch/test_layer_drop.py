"""Blocks that the engine skips, compared with plain torch in float64: stages, worlds, recomputation, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import drawn_from, make_config, on_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyaccel
from polyaccel.engine.policies.step_inputs import LayerDrop
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.torch.layer_drop import DroppedBlocks, drops_itself

BLOCKS, WIDTH, STEPS, MICRO = 4, 6, 8, 2
DROP = {"enabled": True, "theta": 0.4, "gamma": 0.3, "seed": 11}
SAMPLES = 4


class Block(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 9).double(), nn.Linear(9, WIDTH).double()
        self.kind, self.runs = kind, 0

    def forward(self, hidden: Tensor) -> Any:
        self.runs += 1
        out = hidden + self.second(torch.tanh(self.first(hidden)))
        return out if self.kind is Tensor else self.kind([out])


class Net(nn.Module):
    def __init__(self, kind: type = Tensor, reentrant: bool | None = None) -> None:
        super().__init__()
        with drawn_from(0):
            self.enter = nn.Linear(3, WIDTH).double()
            self.blocks = nn.ModuleList(Block(kind) for _ in range(BLOCKS))
            self.leave = nn.Linear(WIDTH, 1).double()
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            if self.reentrant is not None and torch.is_grad_enabled():
                output = checkpoint(block, hidden, use_reentrant=self.reentrant)
            else:
                output = block(hidden)
            hidden = output if isinstance(output, Tensor) else output[0]
        loss: Tensor = (self.leave(hidden) - inputs.sum(1, keepdim=True)).square().mean()
        return loss


def inputs(step: int, micro: int) -> Tensor:
    return torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(10 * step + micro)).double()


def kept(number: int, micro_batch: int) -> bool:
    """Bernoulli(p) by the note on draws."""
    seed = (11 * 1_000_003 + micro_batch) * 1_000_003 + number
    drawn = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return bool(drawn < probability(number, micro_batch // MICRO))


def probability(number: int, step: int) -> float:
    theta = (1 - 0.4) * math.exp(-0.3 * step) + 0.4
    return 1 - (1 - theta) * (number + 1) / BLOCKS


def in_plain_torch() -> tuple[list[Tensor], list[float]]:
    model, losses = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            hidden = model.enter(inputs(step, micro))
            for number, block in enumerate(model.blocks):
                if kept(number, MICRO * step + micro):
                    hidden = hidden + (block(hidden) - hidden) / probability(number, step)
            loss = (model.leave(hidden) - inputs(step, micro).sum(1, keepdim=True)).square().mean()
            (loss / MICRO).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return [one.detach() for one in model.parameters()], losses


def train(communicator: Any, model: Any, config: Any, begin: int, end: int, path: str) -> tuple[Any, Any]:
    engine = polyaccel.initialize(model=model, config=config)[0]
    if begin:
        engine.load_checkpoint(path)
    world, rank, losses = communicator.world_size, communicator.rank, []
    for step in range(begin, end):
        for micro in range(MICRO):
            loss = engine(inputs(step, micro)[rank::world])
            engine.backward(loss)
            losses.append(float(loss.detach()))
            engine.step()
    if path and not begin:
        engine.save_checkpoint(path)
    engine.eval()
    before = [block.runs for block in model.blocks]
    with torch.no_grad():
        engine(inputs(0, 0))
    assert [block.runs for block in model.blocks] == [one + 1 for one in before]
    engine.destroy()
    assert all("forward" not in block.__dict__ for block in model.blocks)
    return [one.detach().clone() for one in model.parameters()], losses


def config(stage: int, **changes: Any) -> dict[str, Any]:
    return make_config(stage, accumulation=MICRO, progressive_layer_drop=DROP, **changes)


RECOMPUTED: dict[str, Any] = {"activation_checkpointing": {"enabled": True}}


@pytest.mark.parametrize(
    ("stage", "world", "kind", "reentrant", "changes"),
    [
        (0, 1, Tensor, None, {}),
        (1, 2, tuple, None, {}),
        (2, 4, Tensor, True, {}),
        (3, 2, list, None, {}),
        (3, 2, Tensor, None, {"recomputed": True}),
        (0, 2, tuple, False, {}),
    ],
)
def test_training_equals_plain_torch(
    stage: int, world: int, kind: type, reentrant: bool | None, changes: dict[str, Any]
) -> None:
    wanted, losses = in_plain_torch()
    options = config(stage, **(RECOMPUTED if changes else {}))
    results = on_threads(world, train, lambda: Net(kind, reentrant), options, 0, STEPS, "")
    for params, seen in results:
        for found, one in zip(params, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-11)
        assert world > 1 or seen == pytest.approx(losses)


@pytest.mark.parametrize("kind", [Tensor, tuple])
def test_a_checkpoint_continues_with_the_draws(tmp_path: Path, kind: type) -> None:
    wanted, _ = in_plain_torch()
    on_threads(2, train, lambda: Net(kind), config(2), 0, 4, str(tmp_path))
    for params, _ in on_threads(1, train, lambda: Net(kind), config(3), 4, STEPS, str(tmp_path)):
        for found, one in zip(params, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-11)


def test_blocks_are_kept_as_often_as_the_formula_says() -> None:
    at = [0, 0]
    drop = DroppedBlocks(Net(), LayerDrop(theta=0.4, gamma=0.3, seed=5), lambda: (at[0], at[1]))
    for steps in (0, 2, 1000):
        at[0] = steps
        for number, name in enumerate(drop.names):
            counts = 0
            for at[1] in range(2000):
                is_kept, share = drop.keeps(name)
                counts += is_kept
            assert share == pytest.approx(probability(number, steps))
            assert counts / 2000 == pytest.approx(share, abs=0.05)
    drop.release()


class Gated(Net):
    def forward(self, inputs: Tensor, pld_theta: float = 1.0, progressive_layer_drop: bool = False) -> Tensor:
        self.theta = pld_theta
        return super().forward(inputs)


def test_a_model_that_skips_layers_itself_does() -> None:
    assert drops_itself(Gated())
    assert not drops_itself(Net())
    model = Gated()
    train_one = polyaccel.initialize(model=model, config=config(0))[0]
    train_one(inputs(0, 0))
    assert model.theta == 1.0
    assert "forward" not in model.blocks[0].__dict__
    train_one.destroy()


class Extra(Block):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), hidden.mean()


def test_what_cannot_be_skipped_is_refused() -> None:
    with pytest.raises(ConfigError):
        polyaccel.initialize(model=nn.Linear(2, 2), config=config(0))
    model = Net()
    model.blocks = nn.ModuleList(Extra(Tensor) for _ in range(2))
    engine = polyaccel.initialize(model=model, config=config(0))[0]
    with pytest.raises(PolyaccelError):
        engine(inputs(0, 0))
    engine.destroy()


class InPlace(Block):
    def forward(self, hidden: Tensor) -> Any:
        hidden += self.second(torch.tanh(self.first(hidden.clone())))
        return hidden


def test_a_block_that_writes_to_its_input_is_refused() -> None:
    model = Net()
    model.blocks = nn.ModuleList(InPlace(Tensor) for _ in range(BLOCKS))
    engine = polyaccel.initialize(model=model, config=config(0))[0]
    for micro in range(MICRO):  # in the first step no block is skipped
        engine.backward(engine(inputs(0, micro)))
        engine.step()
    with pytest.raises(PolyaccelError) as caught:
        engine(inputs(1, 0))
    assert (caught.value.value, engine.global_steps) == ("blocks.0", 1)
    engine.destroy()
