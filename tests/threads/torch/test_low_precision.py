"""Linear layers in 8 and 4 bits under engines: the numbers of the same rounding in plain torch."""

from __future__ import annotations

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from pairwise import combinations
from parity_models import (
    assert_bitwise,
    assert_close,
    batch,
    make_config,
    on_threads,
    parity_model,
    train_on_threads,
    train_plainly,
)
from torch import Tensor, nn
from transformer_models import trained_by, trained_plainly, transformer_model

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.low_precision.formats import in_blocks

STEPS = 4
SMALL = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}
RECIPES = ["tensorwise", "rowwise", "mxfp8", "mxfp4"]


def operand(values: Tensor, dim: int, recipe: str, *, of_gradient: bool = False) -> Tensor:
    """One operand by torch's own casts, apart from the code under test."""
    if recipe.startswith("mx"):
        return in_blocks(values, dim, 8 if recipe == "mxfp8" else 4)  # proven number by number in the unit tests
    by_tensor = recipe == "tensorwise"
    dtype = torch.float8_e5m2 if by_tensor and of_gradient else torch.float8_e4m3fn
    amax = values.abs().max() if by_tensor else values.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    scale = scale if by_tensor else torch.exp2(torch.floor(torch.log2(scale.double()))).float()
    top = torch.finfo(dtype).max
    return (values * scale).clamp(-top, top).to(dtype).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = x.reshape(-1, x.shape[-1])
        return (operand(rows, 1, recipe) @ operand(weight, 1, recipe).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows, grads, recipe = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]), ctx.recipe
        of_x = operand(grads, 1, recipe, of_gradient=True) @ operand(weight, 0, recipe)
        of_weight = operand(grads, 0, recipe, of_gradient=True).t() @ operand(rows, 0, recipe)
        return of_x.view_as(x), of_weight, None


def rounded(model: nn.Module, recipe: str, left_out: tuple[str, ...] = ()) -> nn.Module:
    """The model in plain torch, with layers that round, and so do copies of it."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
        out: Tensor = Product.apply(x, weight, recipe)  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias

    for name, layer in model.named_modules():
        is_linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
        if is_linear and not (left_out and name.endswith(left_out)):
            layer.forward = MethodType(forward, layer)
    return model


@combinations(stage=[0, 1, 2, 3], world=[1, 2, 3], recipe=RECIPES)
def test_training_is_that_of_plain_torch(stage: int, world: int, recipe: str) -> None:
    config = make_config(stage, low_precision_linear={"recipe": recipe}, zero=SMALL if stage else {})
    run = train_on_threads(world, config, STEPS)
    plain = train_plainly(world, STEPS, build=lambda: rounded(parity_model(), recipe))
    unrounded = train_plainly(world, STEPS)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_close(run.params, plain.params, 2e-5)
    assert run.losses != pytest.approx(unrounded.losses, rel=1e-4)  # it was rounded


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)


@pytest.mark.parametrize(
    ("kind", "recipe", "stage", "data"),
    [
        ("llama", "tensorwise", 1, 2),
        ("llama", "rowwise", 3, 1),
        ("gpt2", "rowwise", 2, 1),
        ("gpt2", "tensorwise", 0, 1),
    ],
)
def test_tensor_ranks_round_what_one_rank_rounds(kind: str, recipe: str, stage: int, data: int) -> None:
    """Scales are those of whole tensors and rows, so few elements are rounded another way: sums differ in their last
    places, and a number at a border then goes to the other side."""
    model = transformer_model(kind)
    excluded = ["lm_head"]
    plain = rounded(copy.deepcopy(model), recipe, tuple(excluded))
    losses, norms, _ = trained_plainly(plain, kind, data, adamw)
    copies = [copy.deepcopy(model) for _ in range(2 * data)]
    config = make_config(
        stage,
        optimizer={"type": "AdamW", "params": {"lr": 2e-3}},
        gradient_clipping=1.0,
        tensor_parallel={"autotp_size": 2},
        low_precision_linear={"recipe": recipe, "excluded_modules": excluded},
    )

    def train(communicator: Any) -> Any:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        found = trained_by(engine, kind, communicator.rank // 2)
        engine.destroy()
        return found

    for rank, (found, of_norms) in enumerate(run_threads(2 * data, train)):
        assert found == pytest.approx(losses[rank // 2], rel=1e-3)
        assert of_norms == pytest.approx(norms, rel=2e-2)


def engine_of(model: nn.Module, stage: int = 0, **section: Any) -> Any:
    config = make_config(stage, low_precision_linear={"recipe": "mxfp8", **section})
    return polyaccel.initialize(model=model, config=config)[0]


def test_layers_are_chosen_by_name_and_given_back() -> None:
    model = parity_model()
    before = copy.deepcopy(model)
    engine = engine_of(model, modules=["wide", "head"], excluded_modules=["head"])
    (rewrite,) = [one for one in engine.rewrites if one.name == "low_precision_linear"]
    assert rewrite.modules == ("wide",)
    assert type(pickle.loads(pickle.dumps(copy.deepcopy(model.wide)))) is nn.Linear
    engine.destroy()
    x = torch.randn(2, 6)
    assert torch.equal(model.wide(x), before.wide(x))


def test_a_checkpoint_has_whole_weights(tmp_path: Any) -> None:
    """Saved in 8 bits at stage 3 by two ranks, and loaded without: weights and states are those that were updated."""

    def run(communicator: Any, model: nn.Module) -> Any:
        config = make_config(3, low_precision_linear={"recipe": "rowwise"}, zero=SMALL)
        engine = polyaccel.initialize(model=model, config=config)[0]
        engine.backward(engine(*batch(0, 0, communicator.rank)))
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        return dict(model.named_parameters())

    wanted = on_threads(2, run, parity_model)[0]
    model = parity_model()
    engine = polyaccel.initialize(model=model, config=make_config(0))[0]
    engine.load_checkpoint(str(tmp_path))
    engine.destroy()
    assert_bitwise(dict(model.named_parameters()), wanted)


@pytest.mark.parametrize("precision", [{"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}])
def test_bf16_and_autocast_round_what_they_multiply(precision: dict[str, Any]) -> None:
    model = nn.Linear(64, 8, bias=False)
    weight = model.weight.detach().to(torch.bfloat16)
    config = make_config(0, low_precision_linear={"recipe": "mxfp8"}, **precision)
    engine = polyaccel.initialize(model=model, config=config)[0]
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    out = engine(x)
    assert out.dtype is torch.bfloat16
    wanted = (in_blocks(x, 1, 8) @ in_blocks(weight, 1, 8).t()).to(torch.bfloat16)
    assert torch.equal(out.detach(), wanted)
    engine.destroy()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"low_precision_linear": {"recipe": "mxfp8", "modules": ["nowhere"]}}, "low_precision_linear.modules"),
        ({"tiled_compute": {"enabled": True}}, "tiled_compute.enabled"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], key: str) -> None:
    config = make_config(0, **{"low_precision_linear": {"recipe": "mxfp8"}, **changes})
    with pytest.raises(ConfigError) as error:
        polyaccel.initialize(model=parity_model(), config=config)
    assert key in [problem.key for problem in error.value.problems]


def test_blocks_are_not_cut_over_ranks() -> None:
    """A region of the small Llama has 16 columns a rank: half of a block."""
    models = [transformer_model("llama") for _ in range(2)]
    config = make_config(0, tensor_parallel={"autotp_size": 2}, low_precision_linear={"recipe": "mxfp8"})

    def begin(communicator: Any) -> list[str]:
        with pytest.raises(ConfigError) as error:
            polyaccel.initialize(model=models[communicator.rank], config=config)
        return [problem.key for problem in error.value.problems]

    for keys in run_threads(2, begin):
        assert set(keys) == {"low_precision_linear.recipe"}
