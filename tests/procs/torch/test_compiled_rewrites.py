"""`engine.compile` where blocks are recomputed or cut over ranks: the numbers of a run that compiles nothing."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polyaccel

os.environ["HF_HUB_OFFLINE"] = "1"
PATIENCE_S = 240.0
STEPS = 5
WORDS, WIDTH = 11, 8
RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}


class CountedBlock(nn.Module):
    """Attention and a wide part; the block counts its calls if it `counts`."""

    def __init__(self, drop: float, *, counts: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.counts = nn.Dropout(drop), counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        normed = self.norm(x)
        heads = (
            part(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.o_proj(mixed.transpose(1, 2).flatten(2)))
        return x + self.fc2(torch.relu(self.fc1(x)))


class Words(nn.Module):
    def __init__(self, drop: float, *, counts: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(CountedBlock(drop, counts=counts) for _ in range(2))

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def built(drop: float, *, counts: bool) -> nn.Module:
    torch.manual_seed(0)
    return Words(drop, counts=counts)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


class SeenGraphs:
    """A backend that counts graphs, and the recomputed regions in them."""

    def __init__(self) -> None:
        self.graphs = self.regions = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        self.regions += sum("checkpoint" in str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)


def losses(model: nn.Module, config: dict[str, Any], seen: SeenGraphs | None, how: str = "engine") -> list[float]:
    """Train, compiled by `seen` if it is not None, and return the losses and the sums of all buffers."""
    if seen is not None and how == "blocks":
        for layer in model.layers:
            layer.compile(backend=seen)
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {"verify": "off", "train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, **config}
    engine, *_ = polyaccel.initialize(model=model, config=config)
    if seen is not None and how == "engine":
        engine.compile(backend=seen)
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        words, targets = torch.randint(0, WORDS, (2, 4, 6), generator=draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns itself, of attributes that it looks at
            outputs = engine(input_ids=words, labels=targets) if hasattr(model, "config") else engine(words, targets)
        loss = outputs if isinstance(outputs, Tensor) else outputs.loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    found += [float(buffer.sum()) for buffer in model.buffers()]
    engine.destroy()
    torch.compiler.reset()
    return found


def recomputed(communicator: Any, stage: int, counts: bool, how: str) -> tuple[list[float], list[float], int, int]:
    config = {**RECOMPUTED, "zero_optimization": {"stage": stage}}
    seen = SeenGraphs()
    plain = losses(built(0.1, counts=counts), config, None)
    return plain, losses(built(0.1, counts=counts), config, seen, how), seen.graphs, seen.regions


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(("stage", "counts", "how"), [(0, False, "engine"), (3, False, "blocks"), (3, True, "engine")])
def test_recomputed_blocks_join_graphs_unless_they_change_something(rank_pool, stage, counts, how):
    ((plain, compiled, graphs, regions),) = rank_pool(1).run(recomputed, stage, counts, how, timeout_s=PATIENCE_S)
    assert compiled == pytest.approx(plain, abs=2e-5)
    assert graphs
    assert bool(regions) != counts


def cut(communicator: Any, build: str, config: dict[str, Any], stage: int) -> tuple[list[float], list[float], int]:
    def made() -> nn.Module:
        return llama() if build == "llama" else built(0.1, counts=False)

    config = {**config, "zero_optimization": {"stage": stage}}
    seen = SeenGraphs()
    return losses(made(), config, None), losses(made(), config, seen), seen.graphs


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    ("build", "config", "stage"),
    [
        ("words", TENSOR, 0),
        ("words", {**TENSOR, **RECOMPUTED}, 3),
        ("llama", {"mesh": {"sequence": 2}}, 0),
        ("llama", {"mesh": {"sequence": 2}, "sequence_parallel": {"method": "ring"}}, 3),
    ],
    ids=["tensor", "tensor recomputed", "ulysses", "ring"],
)
def test_cut_models_are_compiled_between_their_collectives(rank_pool, build, config, stage):
    for plain, compiled, graphs in rank_pool(2).run(cut, build, config, stage, timeout_s=PATIENCE_S):
        assert compiled == pytest.approx(plain, abs=2e-5)
        assert graphs
