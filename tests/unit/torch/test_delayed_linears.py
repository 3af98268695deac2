"""Linear layers that leave their parameters' gradients for later: the same numbers, and nothing computed twice."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.torch.linears import LinearForward, MatmulKernels
from polyaccel.torch.sharding.backward import LaterProduct
from polyaccel.torch.weight_grad import SplitBackwardLinears


def model_of(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8, bias=bias), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3, bias=bias))


def run_forward(model: nn.Module, inputs: Tensor, *, recomputes: bool, autocast: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outputs = checkpoint(model, inputs, use_reentrant=False) if recomputes else model(inputs)
    return outputs.float().square().sum()


def run_later(left: list[LaterProduct]) -> None:
    torch.autograd.backward(*zip(*(product.root() for product in left), strict=True))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)], ids=lambda shape: f"{len(shape)}d")
@pytest.mark.parametrize("way", ["plain", "recomputes", "autocast", "without_bias"])
def test_gradients_of_inputs_come_first_and_those_of_parameters_later(shape: tuple[int, ...], way: str) -> None:
    plain = model_of(bias=way != "without_bias")
    split = deepcopy(plain)
    delayed = SplitBackwardLinears(split)
    assert len(delayed) == 2
    inputs = torch.randn(shape, requires_grad=True)
    same = inputs.detach().clone().requires_grad_()
    settings = {"recomputes": way == "recomputes", "autocast": way == "autocast"}
    run_forward(plain, inputs, **settings).backward()
    loss = run_forward(split, same, **settings)
    left: list[LaterProduct] = []
    with delayed.defer_weight_grads(left):
        loss.backward()
    linears = (split[0], split[3])
    assert all(parameter.grad is None for layer in linears for parameter in layer.parameters())
    assert split[1].weight.grad is not None  # of other layers at once
    torch.testing.assert_close(same.grad, inputs.grad)
    run_later(left)
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(gradients(split)[name], expected, msg=name)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_nothing_is_computed_twice(recomputes: bool) -> None:
    """All flops of the two parts are those of one backward pass, and each has its half. A recomputation computes the
    last layer too: torch spares it where a layer saves its input before it computes."""

    def counted(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    inputs = torch.randn(8, 16, requires_grad=True)
    whole = run_forward(model, inputs, recomputes=recomputes, autocast=False)
    expected = counted(whole.backward)
    delayed = SplitBackwardLinears(model)
    loss = run_forward(model, inputs, recomputes=recomputes, autocast=False)
    left: list[LaterProduct] = []
    with delayed.defer_weight_grads(left):
        of_inputs = counted(loss.backward)
    of_parameters = counted(lambda: run_later(left))
    one_product = 2 * 8 * 16 * 16
    assert of_inputs + of_parameters == expected + recomputes * one_product
    assert of_parameters == 4 * one_product


def test_a_layer_that_is_used_twice_gets_one_gradient() -> None:
    layer = nn.Linear(4, 4)
    delayed = SplitBackwardLinears(layer)
    arrivals: list[Tensor] = []

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            arrivals.append(parameter.grad.clone())

    layer.weight.register_post_accumulate_grad_hook(note)
    inputs = torch.randn(2, 4, requires_grad=True)
    left: list[LaterProduct] = []
    with delayed.defer_weight_grads(left):
        layer(layer(inputs)).sum().backward()
    assert not arrivals
    run_later(left)
    (found,) = arrivals
    plain = deepcopy(layer)
    plain.zero_grad()
    plain(plain(inputs)).sum().backward()
    torch.testing.assert_close(found, plain.weight.grad)


@pytest.mark.parametrize("way", ["plain", "recomputes", "autocast"])
def test_weights_that_are_transposed_wait_too(way: str) -> None:
    """GPT-2's layers."""
    torch.manual_seed(0)
    plain = nn.Sequential(Conv1D(8, 5), nn.GELU(), Conv1D(3, 8))
    split = deepcopy(plain)
    delayed = SplitBackwardLinears(split)
    assert len(delayed) == 2
    inputs = torch.randn(2, 3, 5, requires_grad=True)
    same = inputs.detach().clone().requires_grad_()
    settings = {"recomputes": way == "recomputes", "autocast": way == "autocast"}
    expected = run_forward(plain, inputs, **settings)
    expected.backward()
    loss = run_forward(split, same, **settings)
    assert torch.equal(loss, expected)
    left: list[LaterProduct] = []
    with delayed.defer_weight_grads(left):
        loss.backward()
    assert all(parameter.grad is None for parameter in split.parameters())
    torch.testing.assert_close(same.grad, inputs.grad)
    place = wrap_torch(torch.full((40,), 7.0))
    product = next(product for product in left if product.weight is split[0].weight)
    for adds in (False, True):
        product.write(place, adds)
    run_later(left)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(split)[name], gradient, msg=name)
    assert split[0].weight.grad is not None
    torch.testing.assert_close(place.raw.view(5, 8), 2 * split[0].weight.grad)
    copied = deepcopy(split)
    assert torch.equal(copied(inputs), split(inputs))
    copied.zero_grad()
    copied(inputs).sum().backward()  # the ordinary forward again
    assert copied[0].weight.grad is not None
    delayed.release()
    assert "forward" not in split[0].__dict__


def test_frozen_parameters_and_those_that_are_computed_go_the_ordinary_way() -> None:
    frozen, computed = nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    frozen.weight.requires_grad_(False)
    model = nn.Sequential(frozen, computed)
    delayed = SplitBackwardLinears(model)
    left: list[LaterProduct] = []
    with delayed.defer_weight_grads(left):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert not left
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_outside_of_a_split_pass_layers_are_as_ever() -> None:
    plain = model_of()
    split = deepcopy(plain)
    delayed = SplitBackwardLinears(split)
    inputs = torch.randn(4, 5)
    for model in (plain, split):
        model(inputs).sum().backward()
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(gradients(split)[name], expected, msg=name)
    copy = deepcopy(split)
    assert "forward" not in pickle.loads(pickle.dumps(split))[0].__dict__ or torch.equal(copy(inputs), plain(inputs))
    delayed.release()
    assert "forward" not in split[0].__dict__


def test_products_of_the_accelerator_are_used() -> None:
    calls: list[str] = []

    def told(name: str, function: Any) -> Any:
        return lambda *args: (calls.append(name), function(*args))[1]

    layer = nn.Linear(4, 3)
    products = MatmulKernels(
        told("forward", nn.functional.linear),
        told("input", torch.mm),
        told("weight", lambda grad, x: grad.t() @ x),
        "cpu",
        0,
    )
    layer.__dict__["forward"] = own = LinearForward(layer, products)
    delayed = SplitBackwardLinears(layer)
    left: list[LaterProduct] = []
    with delayed.defer_weight_grads(left):
        layer(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert calls == ["forward", "input"]
    run_later(left)
    assert calls == ["forward", "input", "weight"]
    delayed.release()
    assert layer.__dict__["forward"] is own


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "by-its-own-product"])
@pytest.mark.parametrize("held_as", [torch.float32, torch.float64], ids=str)
def test_products_are_written_to_their_place_and_added_up_there(in_place: bool, held_as: torch.dtype) -> None:
    """Where a bucket holds another type, too."""
    layer = nn.Linear(6, 4)
    delayed = SplitBackwardLinears(layer, adds_in_place=in_place)
    left: list[LaterProduct] = []
    for _ in range(3):
        with delayed.defer_weight_grads(left):
            layer(torch.randn(5, 6, requires_grad=True)).square().sum().backward()
    weight, bias = (wrap_torch(torch.full((numel,), 7.0, dtype=held_as)) for numel in (24, 4))
    before = weight.version
    for adds, product in zip((False, True, True), left, strict=True):
        product.write(weight, adds)
        product.write_bias(bias, adds)
    assert weight.version > before
    run_later(left)
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    torch.testing.assert_close(weight.raw.view(4, 6), layer.weight.grad, check_dtype=False)
    torch.testing.assert_close(bias.raw, layer.bias.grad, check_dtype=False)
