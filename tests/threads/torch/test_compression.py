"""Compressed layers under engines: plain torch's numbers, at every stage, world and restart."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from compressed_models import CONFIG, PlainCompression
from pairwise import combinations
from parity_models import (
    assert_bitwise,
    assert_close,
    batch,
    drawn_from,
    make_config,
    on_threads,
    parity_model,
    train_on_threads,
    train_plainly,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.torch.compression.layers import CompressedLayer

STEPS = 5
SMALL = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}


def plainly(world: int, accumulation: int) -> Any:
    how: list[PlainCompression] = []

    def build() -> nn.Module:
        model = parity_model()
        how.append(PlainCompression(model))
        return model

    return train_plainly(
        world, STEPS, accumulation=accumulation, build=build, before_update=lambda _: how[-1].end_step()
    )


@combinations(stage=[0, 1, 2, 3], world=[1, 2, 3], accumulation=[1, 2])
def test_training_is_that_of_plain_torch(stage: int, world: int, accumulation: int) -> None:
    config = make_config(stage, accumulation=accumulation, compression_training=CONFIG, zero=SMALL if stage else {})
    run = train_on_threads(world, config, STEPS)
    plain = plainly(world, accumulation)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_close(run.params, plain.params, 2e-5)


def begin(stage: int, model: nn.Module, **keys: Any) -> Any:
    config = make_config(stage, compression_training=CONFIG, zero=SMALL if stage else {}, **keys)
    return polyaccel.initialize(model=model, config=config)[0]


def steps(engine: Any, first: int, last: int, rank: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(*batch(step, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masks(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in buffers.items() if name.endswith("_mask")}


@pytest.mark.parametrize(("stage", "world", "at"), [(3, 2, 3), (1, 2, 1)])
def test_a_checkpoint_has_masks_and_ranges(stage: int, world: int, at: int, tmp_path: Any) -> None:
    """Saved before and after pruning began, and loaded at another stage by the same ranks."""

    def straight(communicator: Any, model: nn.Module) -> Any:
        engine = begin(stage, model)
        losses = steps(engine, 0, at, communicator.rank)
        engine.save_checkpoint(str(tmp_path))
        return losses + steps(engine, at, STEPS + 2, communicator.rank), dict(model.named_buffers())

    def resumed(communicator: Any, model: nn.Module) -> Any:
        engine = begin(0 if stage else 3, model)
        engine.load_checkpoint(str(tmp_path))
        return steps(engine, at, STEPS + 2, communicator.rank), dict(model.named_buffers())

    wanted = on_threads(world, straight, parity_model)
    found = on_threads(world, resumed, parity_model)
    for (losses, buffers), (all_losses, all_buffers) in zip(found, wanted, strict=True):
        assert losses == pytest.approx(all_losses[at:], rel=1e-6)
        assert_bitwise(masks(buffers), masks(all_buffers))


LEARNED: dict[str, Any] = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, "method": "topk"},
        "different_groups": {"a": {"params": {"dense_ratio": 0.5}, "modules": ["twice"]}},
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, "method": "topk"},
        "different_groups": {
            "a": {"params": {"dense_ratio": 0.5}, "modules": ["wide"], "related_modules": [["narrow"]]}
        },
    },
}


class Binarised(torch.autograd.Function):
    """Movement pruning's mask: the gradient of a score is that of its mask."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        kept = round(0.5 * scores.numel())
        mask = torch.zeros(scores.numel())
        mask[scores.flatten().argsort(descending=True)[:kept]] = 1.0
        return mask.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def binarised(scores: Tensor) -> Tensor:
    return Binarised.apply(scores)  # type: ignore[no-untyped-call, no-any-return]


class LearnedReference(nn.Module):
    """The parity model with scores, in plain torch."""

    embed: Any
    wide: Any
    narrow: Any
    twice: Any
    head: Any
    scale: Any

    def __init__(self) -> None:
        super().__init__()
        inner = parity_model()
        for name, part in inner._modules.items():
            self.add_module(name, part)
        for name, parameter in inner._parameters.items():
            self.register_parameter(name, parameter)
        rows, single = self.wide.weight.detach().abs().sum(1), self.twice.weight.detach().abs()
        self.wide.row_scores = nn.Parameter(rows / rows.max())
        self.twice.sparse_scores = nn.Parameter(single / single.max())
        self.step = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        linear = nn.functional.linear
        hidden = self.embed(tokens) + self.frozen
        rows = binarised(self.wide.row_scores) if self.step >= 1 else torch.ones(33)
        wide = torch.tanh(linear(hidden, self.wide.weight * rows[:, None], self.wide.bias * rows))
        hidden = hidden + linear(wide, self.narrow.weight * rows[None], self.narrow.bias) * self.scale
        weight = self.twice.weight * binarised(self.twice.sparse_scores)
        inner = torch.tanh(linear(hidden, weight, self.twice.bias))
        hidden = hidden + torch.tanh(linear(inner, weight, self.twice.bias))
        return nn.functional.cross_entropy(self.head(hidden), targets)


def with_scores(model: nn.Module) -> nn.Module:
    return polyaccel.init_compression(model, make_config(0, compression_training=LEARNED))


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 2)])
def test_scores_are_trained_as_in_plain_torch(stage: int, world: int) -> None:
    references: list[LearnedReference] = []

    def build() -> nn.Module:
        references.append(LearnedReference())
        return references[-1]

    def end(_: nn.Module) -> None:
        references[-1].step += 1

    plain = train_plainly(world, STEPS, build=build, before_update=end)
    config = make_config(stage, compression_training=LEARNED, zero=SMALL if stage else {})
    run = train_on_threads(world, config, STEPS, build=lambda: with_scores(parity_model()))
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    names = {name.replace("module.", ""): one for name, one in plain.params.items()}
    assert_close(run.params, names, 2e-5)
    assert not torch.equal(run.params["wide.row_scores"], LearnedReference().wide.row_scores)


def test_scores_need_an_optimizer_that_has_them() -> None:
    model = parity_model()
    optimizer = torch.optim.AdamW(model.parameters())
    config = make_config(0, compression_training=LEARNED)
    config.pop("optimizer")
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.initialize(model=model, optimizer=optimizer, config=config)
    assert caught.value.value == "topk"
    assert not any(isinstance(part, CompressedLayer) for part in model.modules())


GOES_WITH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recomputation": ({}, {"activation_checkpointing": {"enabled": True}}),
    "bf16": ({}, {"bf16": {"enabled": True}}),
    "offload": ({"offload_param": {"device": "cpu"}}, {}),
    "second copies": ({"zero_hpz_partition_size": 2}, {}),
}


@pytest.mark.parametrize("how", GOES_WITH)
def test_it_goes_with(how: str) -> None:
    """Stage 3 with it gives the losses of stage 0 without it, in the same type."""
    zero, keys = GOES_WITH[how]

    def run(communicator: Any, model: nn.Module, stage: int, zero: dict[str, Any], keys: dict[str, Any]) -> list[float]:
        config = make_config(stage, compression_training=CONFIG, zero=zero, **keys)
        return steps(polyaccel.initialize(model=model, config=config)[0], 0, STEPS, communicator.rank)

    wanted = on_threads(2, run, blocks, 0, {}, keys if how == "bf16" else {})
    found = on_threads(2, run, blocks, 3, {**SMALL, **zero}, keys)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 33), nn.Linear(33, 6)
        self.twice = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.twice(self.narrow(torch.tanh(self.wide(x))))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 17)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float(), targets)


def blocks() -> nn.Module:
    with drawn_from(0):
        return Blocks()


def test_the_first_step_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pruning from the first step on, next to a copy that is compressed in plain torch."""
    monkeypatch.setenv("POLYACCEL_VERIFY", "always")
    section = copy.deepcopy(CONFIG)
    for technique in section.values():
        technique["shared_parameters"]["schedule_offset"] = 0

    def run(communicator: Any, model: nn.Module) -> list[float]:
        keys = {"compression_training": section, "activation_checkpointing": {"enabled": True}}
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=SMALL, **keys))[0]
        return steps(engine, 0, 2, communicator.rank)

    assert len(on_threads(2, run, blocks)[0]) == 2


def test_no_compressed_weight_is_kept_for_backward() -> None:
    engine = begin(0, parity_model())
    steps(engine, 0, 4, 0)
    sizes = {parameter.numel() for parameter in engine.module.parameters() if parameter.dim() > 1}
    owners = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel() in sizes:
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda saved: saved):
        loss = engine(*batch(4, 0, 0))
    assert kept
    assert all(tensor.untyped_storage().data_ptr() in owners for tensor in kept)
    loss.backward()


def test_a_backward_after_the_update_is_refused() -> None:
    engine = begin(0, parity_model())
    steps(engine, 0, 3, 0)
    late = engine(*batch(3, 0, 0))
    steps(engine, 3, 4, 0)
    with pytest.raises((PolyaccelError, RuntimeError)):
        late.backward()


def test_copies_and_pickles_compute_the_same() -> None:
    model = parity_model()
    engine = begin(0, model)
    steps(engine, 0, 4, 0)
    engine.destroy()
    wanted = model.eval()(*batch(0, 0, 0))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*batch(0, 0, 0)), wanted)


EIGHT = {"start_bits": 8, "target_bits": 8}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such layer": (
        {"weight_quantization": {"different_groups": {"a": {"params": EIGHT, "modules": ["x"]}}}},
        "different_groups.a.modules",
    ),
    "groups": (
        {
            "weight_quantization": {
                "shared_parameters": {"quantize_groups": 5},
                "different_groups": {"a": {"params": EIGHT, "modules": ["wide"]}},
            }
        },
        "quantize_groups",
    ),
    "twice": (
        {
            "weight_quantization": {
                "different_groups": {
                    "a": {"params": EIGHT, "modules": ["wide"]},
                    "b": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["wide"]},
                }
            }
        },
        "different_groups.b.modules",
    ),
    "other sizes": (
        {
            "row_pruning": {
                "different_groups": {
                    "a": {"params": {"dense_ratio": 0.5}, "modules": ["wide"], "related_modules": [["twice"]]}
                }
            }
        },
        "related_modules",
    ),
    "heads": (
        {
            "head_pruning": {
                "shared_parameters": {"num_heads": 4},
                "different_groups": {"a": {"params": {"dense_ratio": 0.5}, "modules": ["twice"]}},
            }
        },
        "num_heads",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_does_not_fit_is_named(name: str) -> None:
    section, key = copy.deepcopy(WRONG[name])
    for one in section.values():
        one.setdefault("shared_parameters", {})["enabled"] = True
    model = parity_model()
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=model, config=make_config(0, compression_training=section))
    assert any(problem.key.endswith(key) for problem in caught.value.problems)
    assert not any(isinstance(part, CompressedLayer) for part in model.modules())
