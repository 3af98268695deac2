"""Where a step's tokens went: `engine.metrics.experts`, for layers of one's own and models of transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import make_config
from torch import Tensor, nn
from transformer_models import transformer_batch, transformer_model

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.experts import Mixture

WIDTH = 8
EXPERTS = 4


class Model(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))  # noqa: E731
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(WIDTH, make, EXPERTS, **settings)
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        found = self.mixture(x)
        return self.after(x + found.output).square().mean() + found.loss


def batch(micro: int, rank: int) -> Tensor:
    return torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(10 * micro + rank))


def figures_of(model: nn.Module, ranks: int, config: dict[str, Any], steps: int = 1, **blocks: Any) -> list[Any]:
    """Of each rank its metrics after each step, of two micro-batches."""
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def train(communicator: Communicator) -> list[Any]:
        mine = copies[communicator.rank]
        engine, *_ = polyaccel.initialize(model=mine, config=config)
        found = []
        for step in range(steps):
            for micro in (2 * step, 2 * step + 1):
                engine.backward(engine(batch(micro, communicator.rank)))
                engine.step()
            engine.eval()
            with torch.no_grad():
                engine(batch(0, 0))
            engine.train()
            found.append(engine.metrics)
        engine.destroy()
        assert not any(module._forward_pre_hooks for module in mine.modules())
        return found

    return run_threads(ranks, train)


def config_of(stage: int, ranks: int, *, watch: bool = True, **changes: Any) -> dict[str, Any]:
    shared = {"enabled": ranks > 1, "autoep_size": ranks, "log_load": watch}
    return make_config(stage, accumulation=2, expert_parallel=shared, **changes)


@pytest.mark.parametrize(("ranks", "recomputes"), [(1, False), (2, False), (2, True)])
def test_tokens_and_bytes_are_counted_over_all_ranks(ranks: int, recomputes: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(k=2, capacity_factor=0.8, min_capacity=1)
    tokens, dropped, sent = torch.zeros(EXPERTS, dtype=torch.int64), 0, [0] * ranks
    for rank in range(ranks):
        for micro in range(2):
            found = model.mixture(model.before(batch(micro, rank)))
            kept = found.tokens.clamp(max=4)  # 0.8 of an even share of 20 choices over 4 experts
            tokens += kept
            dropped += int(found.dropped)
            sent[rank] += int(kept.view(ranks, -1).sum(1).sum() - kept.view(ranks, -1).sum(1)[rank])
    changes: dict[str, Any] = {"monitors": {"jsonl": {}}, "run_dir": str(tmp_path)}
    if recomputes:
        changes["activation_checkpointing"] = {"enabled": True, "blocks": ["Mixture"]}
    of_ranks = figures_of(model, ranks, config_of(2, ranks, **changes))
    for (metrics,) in of_ranks:
        assert list(metrics.experts) == ["mixture.experts"]
        layer = metrics.experts["mixture.experts"]
        assert layer.tokens == tuple(tokens.tolist())
        assert layer.dropped_share == pytest.approx(dropped / (20 * 2 * ranks)) != 0
        assert layer.balance == pytest.approx(max(layer.tokens) * EXPERTS / sum(layer.tokens))
        assert (layer.exchange_s > 0) == (layer.exchanged_nbytes > 0) == (ranks > 1)
    if ranks == 2 and not recomputes:
        came = [sum(sent) - one for one in sent]  # what others' tokens have made this rank compute goes back
        counts = 2 * (EXPERTS // 2) * 8
        for rank, (metrics,) in enumerate(of_ranks):
            rows = 2 * (sent[rank] + came[rank])  # there and back, in forward and in backward
            assert metrics.experts["mixture.experts"].exchanged_nbytes == rows * WIDTH * 4 + counts
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert line["experts"]["mixture.experts"]["tokens"] == tokens.tolist()


def test_tokens_without_an_expert_are_not_dropped_where_experts_choose() -> None:
    torch.manual_seed(0)
    model = Model(gate="expert choice", capacity_factor=1.0)
    ((metrics,),) = figures_of(model, 1, config_of(0, 1))
    layer = metrics.experts["mixture.experts"]
    assert (layer.dropped_share, layer.balance) == (0.0, 1.0)


def test_each_step_has_its_own_and_nothing_is_there_unasked() -> None:
    torch.manual_seed(0)
    model = Model(k=1)
    ((first, second),) = figures_of(model, 1, config_of(1, 1), steps=2)
    assert sum(first.experts["mixture.experts"].tokens) == sum(second.experts["mixture.experts"].tokens) == 20
    ((unasked,),) = figures_of(model, 1, config_of(1, 1, watch=False))
    assert unasked.experts == {}


def test_layers_of_transformers_are_watched_shared_or_not() -> None:
    model = transformer_model("mixtral")
    copies = [copy.deepcopy(model) for _ in range(4)]
    tokens = [transformer_batch("mixtral", seed=rank)["input_ids"].numel() for rank in range(2)]

    def train(communicator: Communicator) -> Any:
        config = {**config_of(3, communicator.world_size), "gradient_accumulation_steps": 1}
        engine, *_ = polyaccel.initialize(model=copies.pop(), config=config)
        engine.backward(engine(**transformer_batch("mixtral", seed=communicator.rank)).loss)
        engine.step()
        metrics = engine.metrics
        engine.destroy()
        return metrics.experts

    shared, _ = run_threads(2, train)
    (alone,) = run_threads(1, train)
    assert set(shared) == set(alone) != set()
    k = model.config.num_experts_per_tok
    for name in shared:
        assert sum(shared[name].tokens) == k * sum(tokens)
        assert sum(alone[name].tokens) == k * tokens[0]
        assert shared[name].exchanged_nbytes > alone[name].exchanged_nbytes == 0
