"""`engine.compile`: no graph ends at a hook of the engine, and none of the compiler's limits is reached."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polyaccel

PATIENCE_S = 240.0
BLOCKS, STEPS, WIDTH, WORDS = 10, 3, 8, 11


class NumberedBlock(nn.Module):
    """A block that computes with its number, so that no two of them share a graph."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.narrow(torch.tanh(self.wide(self.norm(hidden)))) / (1 + self.number)


class Tied(nn.Module):
    """Tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(NumberedBlock(number) for number in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].wide.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


def compiled(communicator: Any, stage: int, accumulation: int) -> tuple[list[float], int, dict[str, int], list[str]]:
    """One rank's losses, the graphs, the reasons for which graphs ended, and what copies and pickles of a block say."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    config = {
        "verify": "off",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500},
    }
    model = Tied()
    engine, *_ = polyaccel.initialize(model=model, config=config)
    counters.clear()
    engine.compile(backend=count)
    draws, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS * accumulation):
        words = torch.randint(0, WORDS, (2, 5), generator=draws)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns itself, of attributes that it looks at
            loss = engine(words)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    breaks = dict(counters["graph_break"])
    engine.destroy()
    copies = [copy.deepcopy(model.blocks[0]), pickle.loads(pickle.dumps(model.blocks[0]))]
    torch.compiler.reset()
    return losses, len(graphs), breaks, [type(one.forward).__name__ for one in (*copies, model.blocks[0])]


def plain(accumulation: int) -> list[float]:
    torch.manual_seed(0)
    model = Tied()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    draws, losses = torch.Generator().manual_seed(1), []
    for step in range(STEPS * accumulation):
        loss = model(torch.randint(0, WORDS, (2, 5), generator=draws))
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(("stage", "accumulation", "graphs"), [(0, 1, 1), (2, 2, 1), (3, 2, BLOCKS)])
def test_no_graph_ends_at_a_hook(rank_pool, stage, accumulation, graphs):
    ((losses, found, breaks, kinds),) = rank_pool(1).run(compiled, stage, accumulation, timeout_s=PATIENCE_S)
    assert losses == pytest.approx(plain(accumulation), abs=2e-5)
    assert breaks == {}
    assert found == graphs
    assert kinds == ["method"] * 3
