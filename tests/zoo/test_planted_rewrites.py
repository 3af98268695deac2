"""Wrong rewrites, planted one at a time: a shadow run finds each, and blames the rewrite and no other.

`TESTS_PLANTS=full` plants all; otherwise every sixth. Right programs under the same rewrites give no alarm.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, tiny
from torch import Tensor, nn
from torch.nn import functional

import polyaccel
from polyaccel.torch.rewrites.base import Rewrite
from polyaccel.torch.rewrites.cuts import ExpertParallel, TensorParallel
from polyaccel.torch.rewrites.engine import ActivationCheckpointing, ZeroShards
from polyaccel.torch.rewrites.forwards import SequenceParallel, TiledCompute
from polyaccel.torch.rewrites.stages import PipelineBlocks
from polyaccel.verify.prove import Proof, prove, threads_run

IS_FULL = os.environ.get("TESTS_PLANTS") == "full"
_LOCK = threading.Lock()
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
}
"""Without clipping, by which one wrong gradient would change all updates."""


class Normed(nn.Module):
    """Blocks with statistics of a batch, in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """A loss."""
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def program(kind: str, config: dict[str, Any]) -> Callable[[], None]:
    """Two steps on batches that all ranks share."""

    def run() -> None:
        with _LOCK:
            torch.manual_seed(0)
            model = Normed().train() if kind == "normed" else tiny(kind, dtype=torch.float32).train()
        engine, *_ = polyaccel.initialize(model=model, config=copy.deepcopy({**BASE, **config}))
        draw = torch.Generator().manual_seed(1)
        for _ in range(2):
            batches = []
            for length in (12, 12 if kind == "normed" else 8):
                words = torch.randint(3, VOCABULARY, (2, length), generator=draw)
                batch = {"input_ids": words, "labels": words.clone()}
                if length == 8:
                    batch["attention_mask"] = torch.ones_like(words)
                    batch["attention_mask"][1, -2:] = 0
                    batch["labels"][1, -2:] = -100
                batches.append(batch)
            if "pipeline" in config:
                engine.train_batch(iter(batches))
                continue
            for batch in batches:
                engine.backward(engine(**batch)["loss"])
                engine.step()
        raise AssertionError("the program ran on after its last step")

    return run


MESHES: dict[type[Rewrite], tuple[str, int, dict[str, Any]]] = {
    TensorParallel: ("llama", 2, {"tensor_parallel": {"autotp_size": 2}}),
    SequenceParallel: ("llama", 2, {"sequence_parallel_size": 2}),
    PipelineBlocks: ("llama", 2, {"pipeline": {"stages": 2}}),
    ExpertParallel: ("mixtral", 2, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    TiledCompute: ("llama", 1, {"tiled_compute": {"enabled": True}}),
    ActivationCheckpointing: ("normed", 1, {"activation_checkpointing": {"enabled": True}}),
    ZeroShards: ("llama", 2, {"zero_optimization": {"stage": 2}}),
}
MIXED = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


def proof_of(rewrite: type[Rewrite], **more: Any) -> Proof:
    kind, ranks, config = MESHES[rewrite]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prove(threads_run(ranks, program(kind, {**config, **more})))


Change = Callable[[nn.Module, int], None]
"""Spoils a model on a rank."""


def gradient(name: str, factor: float, rank: int | None = None) -> Change:
    """The gradient of a parameter with a factor, on one rank or all."""

    def change(model: nn.Module, own: int) -> None:
        parameter = dict(model.named_parameters()).get(name)
        if parameter is not None and rank in (None, own):
            parameter.register_hook(lambda one: factor * one)

    return change


def output(name: str, function: Callable[[Tensor], Tensor], rank: int | None = None) -> Change:
    """The first output of a module as `function` of it."""

    def hook(module: nn.Module, inputs: Any, found: Any) -> Any:
        return (function(found[0]), *found[1:]) if isinstance(found, tuple) else function(found)

    def change(model: nn.Module, own: int) -> None:
        module = dict(model.named_modules()).get(name)
        if module is not None and rank in (None, own):
            module.register_forward_hook(hook)

    return change


def values(name: str, function: Callable[[Tensor], Tensor], rank: int | None = None) -> Change:
    """Other values of a parameter."""

    def change(model: nn.Module, own: int) -> None:
        parameter = dict(model.named_parameters()).get(name)
        if parameter is not None and rank in (None, own):
            with torch.no_grad():
                parameter.copy_(function(parameter.detach().clone()))

    return change


def without_exchange(name: str) -> Change:
    """A linear layer that computes with its own block, and exchanges nothing."""

    def change(model: nn.Module, own: int) -> None:
        module: Any = model.get_submodule(name)
        module.forward = lambda x: functional.linear(x, module.weight, module.bias)

    return change


def arguments(name: str, key: str, function: Callable[[Any], Any]) -> Change:
    """Another value of a named argument of a module."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, key: function(kwargs[key])} if kwargs.get(key) is not None else kwargs

    def change(model: nn.Module, own: int) -> None:
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    return change


def counted_twice(name: str) -> Change:
    """A buffer that a recomputation updates once more."""

    def hook(module: Any, inputs: Any, found: Any) -> None:
        module.num_batches_tracked += 1

    return lambda model, own: model.get_submodule(name).register_forward_hook(hook) and None


@dataclass(frozen=True)
class Plant:
    """A wrong rewrite, and the parameter, buffer or module that a finding has to name; "" for all of the model."""

    rewrite: type[Rewrite]
    change: Change
    named: str
    alone: bool = False
    """Whether nothing else may be found in the first step, except the norm."""


def halves(one: Tensor) -> Tensor:
    return one.roll(one.shape[0] // 2, 0)


T, S, P, E, C, R, Z = (*MESHES,)
M = "model.layers.1"
PLANTS = {
    "tensor: two blocks swapped": Plant(T, values(f"{M}.mlp.gate_proj.weight", halves), f"{M}.mlp.gate_proj"),
    "tensor: heads swapped": Plant(T, values(f"{M}.self_attn.q_proj.weight", halves), f"{M}.self_attn.q_proj"),
    "tensor: a block turned": Plant(
        T, values(f"{M}.self_attn.o_proj.weight", lambda one: one.flip(1)), f"{M}.self_attn.o_proj"
    ),
    "tensor: the sum forgotten": Plant(T, without_exchange(f"{M}.mlp.down_proj"), f"{M}.mlp.down_proj"),
    "tensor: the sum of attention forgotten": Plant(
        T, without_exchange("model.layers.0.self_attn.o_proj"), "model.layers.0.self_attn.o_proj"
    ),
    "tensor: the sum backward forgotten": Plant(
        T, without_exchange(f"{M}.mlp.up_proj"), f"{M}.post_attention_layernorm"
    ),
    "tensor: a gradient doubled": Plant(
        T, gradient(f"{M}.self_attn.k_proj.weight", 2.0), f"{M}.self_attn.k_proj.weight", alone=True
    ),
    "tensor: half of a shared gradient": Plant(
        T, gradient(f"{M}.input_layernorm.weight", 0.5), f"{M}.input_layernorm.weight", alone=True
    ),
    "tensor: one rank's gradient lost": Plant(
        T, gradient(f"{M}.mlp.up_proj.weight", 0.0, rank=1), f"{M}.mlp.up_proj.weight", alone=True
    ),
    "tensor: a factor too many": Plant(T, output(f"{M}.mlp.down_proj", lambda one: 2 * one), f"{M}.mlp.down_proj"),
    "tensor: a small factor": Plant(T, output(f"{M}.mlp.act_fn", lambda one: 1.0001 * one), f"{M}.mlp.down_proj"),
    "tensor: words of another rank": Plant(
        T, values("model.embed_tokens.weight", lambda one: one.roll(1, 0), rank=1), "model.embed_tokens.weight"
    ),
    "sequence: a factor in the gradients": Plant(
        S, gradient(f"{M}.mlp.up_proj.weight", 2.0), f"{M}.mlp.up_proj.weight", alone=True
    ),
    "sequence: one rank's tokens lost": Plant(
        S, gradient("model.norm.weight", 0.0, rank=0), "model.norm.weight", alone=True
    ),
    "sequence: positions start again": Plant(
        S, arguments("model.rotary_emb", "position_ids", lambda one: one - one.min()), f"{M}.self_attn.q_proj"
    ),
    "sequence: a head swapped": Plant(
        S, output(f"{M}.self_attn.v_proj", lambda one: one.roll(8, -1)), f"{M}.self_attn.v_proj"
    ),
    "sequence: the last token shifted": Plant(
        S, output("model.norm", lambda one: one.roll(1, 1), rank=1), "model.norm"
    ),
    "pipeline: a value between stages off": Plant(P, output("model.layers.0", lambda one: 1.001 * one), M),
    "pipeline: the gradient between stages lost": Plant(
        P, output("model.layers.0", lambda one: one.detach().requires_grad_()), "model.layers.0"
    ),
    "pipeline: a micro-batch counted twice": Plant(
        P, gradient(f"{M}.mlp.up_proj.weight", 2.0), f"{M}.mlp.up_proj.weight", alone=True
    ),
    "experts: experts of other ranks": Plant(
        E, values(f"{M}.mlp.experts.down_proj", halves), f"{M}.mlp.experts.down_proj"
    ),
    "experts: a gradient doubled": Plant(
        E, gradient(f"{M}.mlp.experts.gate_up_proj", 2.0), f"{M}.mlp.experts.gate_up_proj", alone=True
    ),
    "experts: the router's gradient halved": Plant(
        E, gradient(f"{M}.mlp.gate.weight", 0.5), f"{M}.mlp.gate.weight", alone=True
    ),
    "tiles: a tile of the feed-forward lost": Plant(
        C,
        output(f"{M}.mlp.down_proj", lambda one: one * (torch.arange(one.shape[-2]) > 0)[:, None]),
        f"{M}.mlp.down_proj",
    ),
    "tiles: gradients of one tile too many": Plant(
        C, gradient("lm_head.weight", 1.25), "lm_head.weight", alone=True
    ),
    "recomputation: a buffer updated twice": Plant(
        R, counted_twice("layers.0.1"), "layers.0.1.num_batches_tracked", alone=True
    ),
    "recomputation: other random numbers": Plant(
        R, output("layers.1.3", lambda one: functional.dropout(one, 0.2)), "layers.1.0"
    ),
    "recomputation: an input without gradient": Plant(
        R, output("words", lambda one: one.detach().requires_grad_()), "words.weight"
    ),
    "ZeRO: a sum for a mean": Plant(Z, gradient("lm_head.weight", 2.0), "lm_head.weight", alone=True),
    "ZeRO: a shard that is not updated": Plant(
        Z, gradient(f"{M}.mlp.gate_proj.weight", 0.0, rank=1), f"{M}.mlp.gate_proj.weight", alone=True
    ),
    "ZeRO: a stale parameter": Plant(Z, values("model.norm.weight", lambda one: 1.001 * one), "model.norm.weight"),
}  # fmt: skip


def planted(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    """Let the change be made where the rewrite is applied; of ZeRO, where parameters are sharded."""
    apply = plant.rewrite.apply
    is_before = plant.rewrite is ZeroShards

    def apply_wrongly(self: Any, context: Any) -> Any:
        acts = not is_before or context.runtime.config.zero_optimization.stage > 0
        if is_before and acts:
            plant.change(context.model, context.rank)
        done = apply(self, context)
        if not is_before:
            plant.change(context.model, context.rank)
        return done

    monkeypatch.setattr(plant.rewrite, "apply", apply_wrongly)


@pytest.mark.parametrize("name", PLANTS if IS_FULL else list(PLANTS)[::6])
def test_a_wrong_rewrite_is_found_and_blamed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTS[name]
    planted(monkeypatch, plant)
    proof = proof_of(plant.rewrite)
    assert not proof.is_proven
    assert proof.blamed == (plant.rewrite.name,)
    found = [one.parameter for one in proof.findings if one.step == 0 and one.kind != "norm"]
    assert any(one.startswith(plant.named) for one in found), found
    if plant.alone:
        assert set(found) == {plant.named}


@pytest.mark.parametrize("precision", [0, 1, 2] if IS_FULL else [0])
@pytest.mark.parametrize("rewrite", MESHES)
def test_a_right_program_gives_no_alarm(rewrite: type[Rewrite], precision: int) -> None:
    proof = proof_of(rewrite, **({}, *MIXED)[precision])
    assert proof.is_proven, [str(one) for one in proof.findings]
    assert proof.acted[rewrite.name]
