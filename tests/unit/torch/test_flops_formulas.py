"""The profiler's operations against formulas by hand, for thirteen architectures, within 1 %."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import polyaccel
from polyaccel.observability.profiles import profile_table
from polyaccel.torch.profiling.profiler import ModuleProfiler, profile_module

B, T, D, F, V, L = 2, 24, 32, 64, 50, 2
"""Samples, tokens, width, width of feed-forward layers, words, layers."""
HEADS, KEY_HEADS = 4, 2
ATTENTION = 2 * (2 * B * T * T * D)
"""Scores, and the sum that they weight: no kernel that torch counts leaves out what a causal mask hides."""
IDS = torch.arange(B * T).reshape(B, T) % V
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": HEADS}


def dense(rows: int, *shapes: tuple[int, int]) -> int:
    return sum(2 * rows * inputs * outputs for inputs, outputs in shapes)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(D, F), nn.Linear(F, V)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        assert state is not None
        return self.head(state[0])


class Output(nn.Module):
    """The output of a recurrent network without its last state."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)[0]


def long_short_term() -> tuple[nn.Module, Any, int]:
    network = nn.LSTM(D, F, num_layers=2, bidirectional=True, batch_first=True)
    first, second = dense(B * T, (D, 4 * F), (F, 4 * F)), dense(B * T, (2 * F, 4 * F), (F, 4 * F))
    return Output(network), torch.ones(B, T, D), 2 * (first + second)


def gated() -> tuple[nn.Module, Any, int]:
    return Output(nn.GRU(D, F, batch_first=True)), torch.ones(B, T, D), dense(B * T, (D, 3 * F), (F, 3 * F))


def elman() -> tuple[nn.Module, Any, int]:
    return Output(nn.RNN(D, F, batch_first=True)), torch.ones(B, T, D), dense(B * T, (D, F), (F, F))


class Product(nn.Module):
    """An operation on the input and a weight of D x D."""

    def __init__(self, operation: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.operation, self.weight = operation, nn.Parameter(torch.eye(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(x, self.weight)


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


@torch.library.custom_op("polyaccel_tests::product", mutates_args=())
def custom_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


ROWS, SPARSE = torch.ones(B * T, D), torch.eye(D).to_sparse()
OPERATIONS: dict[str, tuple[nn.Module, torch.Tensor, int]] = {
    "bilinear": (Product(lambda x, _: nn.Bilinear(D, D, V, bias=False)(x, x)), ROWS, 2 * B * T * D * D * V),
    "einsum": (Product(lambda x, weight: torch.einsum("tf,fo->to", x, weight)), ROWS, dense(B * T, (D, D))),
    "own function": (Product(OwnProduct.apply), ROWS, dense(B * T, (D, D))),
    "matrix and vector": (Product(lambda x, weight: x @ weight[0]), ROWS, dense(B * T, (D, 1))),
    "sparse": (Product(lambda _, weight: torch.sparse.mm(SPARSE, weight)), ROWS, 2 * D * D),
    "weighted bag": (
        Product(
            lambda _, weight: nn.functional.embedding_bag(
                IDS % D, weight, mode="sum", per_sample_weights=torch.ones(IDS.shape)
            )
        ),
        ROWS,
        2 * IDS.numel() * D,
    ),
    "attention": (
        Product(lambda x, _: nn.functional.scaled_dot_product_attention(*[x.view(B, 1, T, D)] * 3)),
        ROWS,
        ATTENTION,
    ),
    "transposed convolution": (nn.ConvTranspose1d(D, V, 3), torch.ones(B, D, T), dense(B * T, (D, 3 * V))),
    "added": (Product(lambda x, weight: torch.addmm(weight, weight, weight)), ROWS, dense(D, (D, D))),
}


def perceptron() -> tuple[nn.Module, Any, int]:
    return nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, V)), torch.ones(B, D), dense(B, (D, F), (F, V))


def convolutional() -> tuple[nn.Module, Any, int]:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 64, V)
    return nn.Sequential(*layers), torch.ones(B, 3, 16, 16), dense(B * 256, (3 * 9, 8)) + dense(B, (8 * 64, V))


def separable() -> tuple[nn.Module, Any, int]:
    layers = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 16, 1)
    return nn.Sequential(*layers), torch.ones(B, 8, 16, 16), dense(B * 256 * 8, (9, 1)) + dense(B * 256, (8, 16))


def autoencoder() -> tuple[nn.Module, Any, int]:
    layers = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, stride=2)
    return nn.Sequential(*layers), torch.ones(B, 3, 16, 16), dense(B * 64, (3 * 9, 8), (8, 3 * 4))


def recurrent() -> tuple[nn.Module, Any, int]:
    return Recurrent(), torch.ones(B, T, D), dense(B * T, (D, 4 * F), (F, 4 * F)) + dense(B, (F, V))


def gpt2() -> tuple[nn.Module, Any, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_layer=L, n_head=HEADS, n_inner=F))
    layer = dense(B * T, (D, 3 * D), (D, D), (D, F), (F, D)) + ATTENTION
    return model, IDS, L * layer + dense(B * T, (D, V))


def llama() -> tuple[nn.Module, Any, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=F, num_key_value_heads=KEY_HEADS))
    keys = D * KEY_HEADS // HEADS
    layer = dense(B * T, (D, D), (D, 2 * keys), (D, D), (D, 2 * F), (F, D)) + ATTENTION
    return model, IDS, L * layer + dense(B * T, (D, V))


def bert() -> tuple[nn.Module, Any, int]:
    from transformers import BertConfig, BertModel

    layer = dense(B * T, *[(D, D)] * 4, (D, F), (F, D)) + ATTENTION
    return BertModel(BertConfig(**SIZES, intermediate_size=F)), IDS, L * layer + dense(B, (D, D))


def vision() -> tuple[nn.Module, Any, int]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    model = ViTForImageClassification(
        ViTConfig(**sizes, intermediate_size=F, image_size=32, patch_size=8, num_labels=V)
    )
    tokens = 4 * 4 + 1
    layer = dense(B * tokens, *[(D, D)] * 4, (D, F), (F, D)) + 2 * (2 * B * tokens * tokens * D)
    return model, torch.ones(B, 3, 32, 32), dense(B * 16, (3 * 64, D)) + L * layer + dense(B, (D, V))


def mixture() -> tuple[nn.Module, Any, int]:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts, chosen = 4, 2
    config = MixtralConfig(
        **SIZES,
        intermediate_size=F,
        num_key_value_heads=HEADS,
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        experts_implementation="eager",
    )
    routed = dense(B * T, (D, experts)) + dense(B * T * chosen, (D, 2 * F), (F, D))
    layer = dense(B * T, *[(D, D)] * 4) + ATTENTION + routed
    return MixtralForCausalLM(config), IDS, L * layer + dense(B * T, (D, V))


ARCHITECTURES: tuple[Callable[[], tuple[nn.Module, Any, int]], ...] = (
    *(perceptron, convolutional, separable, autoencoder, recurrent),
    *(long_short_term, gated, elman),
    *(gpt2, llama, bert, vision, mixture),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.__name__)
def test_operations_are_those_of_the_formula(architecture: Callable[[], tuple[nn.Module, Any, int]]) -> None:
    torch.manual_seed(0)
    model, inputs, formula = architecture()
    root = profile_module(model, lambda: model(inputs), warm_up=0)
    assert root.operations == pytest.approx(formula, rel=0.01)
    assert root.macs == root.operations // 2
    assert root.parameters == sum(one.numel() for one in model.parameters())
    assert root.seconds is not None
    leaves = [node for _, node in root.walk() if not node.children]
    assert sum(node.operations for node in leaves) <= root.operations
    for _, node in root.walk():
        assert sum(child.operations for child in node.children) <= node.operations
        assert node.seconds is not None or not any(one.calls for _, one in node.walk())


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_one_call(name: str) -> None:
    """Against formulas by hand; torch's own counter has no more where it counts the same call."""
    module, inputs, formula = OPERATIONS[name]
    root = profile_module(module, lambda: module(inputs), warm_up=0)
    with FlopCounterMode(display=False) as torchs:
        module(inputs)
    assert root.operations == formula
    assert torchs.get_total_flops() in (0, formula)
    assert root.uncounted == ()


@pytest.mark.parametrize(
    ("operation", "names"),
    [
        (custom_product, ("polyaccel_tests.product",)),
        (lambda x, weight: torch.fft.fft(x).real @ weight, ("aten._fft_r2c",)),
        (lambda x, weight: torch.linalg.solve(weight, x.T), ("aten._linalg_solve_ex",)),
        (lambda x, weight: torch.cdist(x, weight, p=1.0), ("aten._cdist_forward",)),
        (lambda x, weight: torch.nn.functional.interpolate(x[None, None], scale_factor=2, mode="bilinear"), ()),
        (lambda x, weight: torch.softmax(x, 0).cumsum(0).sum() * weight, ()),
    ],
    ids=["custom", "fft", "solve", "cdist", "interpolate", "elementwise"],
)
def test_what_has_no_formula_is_named_in_the_report(operation: Any, names: tuple[str, ...]) -> None:
    model = nn.Sequential(Product(operation))
    root = profile_module(model, lambda: model(ROWS), warm_up=0)
    assert root.uncounted == names
    table = profile_table(root, "a profile")
    assert all(table.count(name) == 1 for name in names)


def test_throughput_names_what_it_leaves_out_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Product(custom_product)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "timers": {"throughput": {"enabled": True}}}
    engine, *_ = polyaccel.initialize(model=model, config=config)
    with caplog.at_level("WARNING"):
        for rows in (2, 2, 3):
            with pytest.raises(RuntimeError) as caught:  # the operation has no backward pass
                engine.backward(engine(torch.ones(rows, D)).sum())
            assert "polyaccel_tests.product" in str(caught.value)
    engine.destroy()
    assert sum("polyaccel_tests.product" in record.getMessage() for record in caplog.records) == 1


def test_each_module_has_what_is_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 4), nn.Tanh()))
    model.append(model[0])  # a module that is inside twice
    inputs = torch.ones(3, 8)

    def run() -> None:
        model[1](model[0](inputs))
        model[0](inputs)

    profiler = ModuleProfiler(model)
    with profiler.looking(counts=True, times=True):
        run()
    nodes = {node.name: node for _, node in profiler.profile().walk()}
    assert (nodes["0"].calls, nodes["0"].operations, nodes["0"].parameters) == (2, 2 * 2 * 3 * 8 * 16, 8 * 16 + 16)
    assert (nodes["1"].calls, nodes["1.0"].operations, nodes["1.1"].operations) == (1, 2 * 3 * 16 * 4, 0)
    assert nodes["1"].operations == nodes["1.0"].operations
    before = nodes["0"].operations
    run()  # nobody looks
    assert {node.name: node for _, node in profiler.profile().walk()}["0"].operations == before
    profiler.reset()
    assert profiler.profile().operations == 0


def test_a_pass_that_raises_leaves_no_hook() -> None:
    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(4, 4), Broken(4, 4))
    profiler = ModuleProfiler(model)
    with pytest.raises(ValueError) as caught, profiler.looking(counts=True, times=True):
        model(torch.ones(2, 4))
    assert str(caught.value) == "no"
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert model[0](torch.ones(2, 4)).shape == (2, 4)
