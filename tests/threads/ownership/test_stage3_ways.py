"""Ranks that take different ways through a model at stage 3: layer drop, early exit."""

from __future__ import annotations

import pytest
import torch
from parity_models import assert_close, make_config, on_threads, snapshot
from stage3_models import WIDTH, seeded
from torch import Tensor, nn

import polyaccel
from polyaccel import zero
from polyaccel.errors import CommError

ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}


class Dropping(nn.Module):
    """Leaves out the layers `skipped`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, hidden: Tensor, skipped: int | None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                hidden = layer(hidden)
        return hidden.square().mean()


class Exiting(Dropping):
    """Ends after the layer `skipped`."""

    def forward(self, hidden: Tensor, skipped: int | None) -> Tensor:
        for layer in self.layers if skipped is None else self.layers[: skipped + 1]:
            hidden = layer(hidden)
        return hidden.square().mean()


class Around(nn.Module):
    """The part that chooses inside of one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.encoder = nn.Linear(WIDTH, WIDTH), Dropping()

    def forward(self, hidden: Tensor, skipped: int | None) -> Tensor:
        return self.encoder(self.first(hidden), skipped)


def trained(build, world, stage, chooser, ways):
    """Parameters after four steps; `ways` gives the layer that a rank skips in a step."""

    def work(communicator, model):
        if chooser is not None:
            zero.set_leaf_modules(model, [chooser])
        engine = polyaccel.initialize(model=model, config=make_config(stage, zero=ZERO))[0]
        for step in range(4):
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + communicator.rank))
            engine.backward(engine(inputs, ways(step, communicator.rank)))
            engine.step()
        engine.destroy()
        return snapshot(model)

    return on_threads(world, work, seeded(build))[0]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("build", "chooser"), [(Dropping, Dropping), (Exiting, Exiting), (Around, Dropping)])
def test_a_leaf_that_chooses_lets_ranks_differ(build, chooser, world):
    """The class whose forward chooses is made a leaf, the model itself perhaps."""
    ways = lambda step, rank: (step + rank) % 3 if rank and step else None  # noqa: E731
    assert_close(trained(build, world, 3, chooser, ways), trained(build, world, 0, None, ways))


@pytest.mark.parametrize("build", [Dropping, Exiting, Around])
@pytest.mark.parametrize("ways", [lambda step, rank: rank, lambda step, rank: 1 if rank and step else None])
def test_without_a_leaf_the_first_gather_of_different_layers_is_an_error(build, ways):
    """Also where the layers are equally large and equally many."""
    with pytest.raises(CommError, match="ranks disagree about collective"):
        trained(build, 2, 3, None, ways)
