"""Linear layers over oneDNN: the numbers of torch's within rounding, at every stage alike, and nothing else changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity_models import SMALL_BUCKET, make_config, parity_model, train_on_threads, train_plainly
from stage3_models import CASES, Gpt, assert_same_run, seeded, token_loss
from torch import Tensor, nn
from torch.nn import functional

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.ops.base import LINEAR, LINEAR_WEIGHT_GRAD, KernelTable
from polyaccel.ops.matmul_autotune import VARIABLE
from polyaccel.ops.torch import linear as torch_linear
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch import linears
from polyaccel.torch.linears import MatmulKernels, agreed_kernels

STEPS = 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every product that oneDNN computes, in order; engines use it wherever they can."""
    seen: list[str] = []
    real = torch_linear.onednn_kernels()

    def counted(op: Any) -> Any:
        def run(*arguments: Any) -> Any:
            seen.append(op.name)
            return real[op](*arguments)

        return run

    table = KernelTable("counted", {op: counted(op) for op in real})
    monkeypatch.setattr(torch_linear, "onednn_kernels", lambda: table)
    monkeypatch.setenv(VARIABLE, "on")
    return seen


@contextmanager
def engine_around(model: nn.Module, stage: int = 0, **changes: Any) -> Iterator[Any]:
    """An engine of one rank in this thread."""
    engine, *_ = polyaccel.initialize(model=model, config=make_config(stage, **changes))
    yield engine
    engine.destroy()


@contextmanager
def switched(setter: Any, value: Any, before: Any) -> Iterator[None]:
    """A setting of the process in another state."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


def alone(fn: Any) -> Any:
    return run_threads(1, lambda communicator: fn())[0]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("shape", [(64, 48), (2, 3, 48), (48,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_and_gradients_are_torchs_within_rounding(shape, has_bias, calls):
    products = MatmulKernels.from_table(CpuAccelerator("torch").matrix_kernels("on"), "cpu", 0)
    torch.manual_seed(0)
    found, wanted = ([torch.randn(shape), torch.randn(33, 48), torch.randn(33)] for _ in range(2))
    for mine, theirs in zip(found, wanted, strict=True):
        theirs.copy_(mine)
        mine.requires_grad_()
        theirs.requires_grad_()
    outs = []
    for (x, weight, bias), apply in ((found, products.apply), (wanted, functional.linear)):
        out = apply(x * 1.0, weight, bias if has_bias else None)
        outs.append(out.detach().clone())
        torch.tanh_(out).square().sum().backward()  # in place, as activations may be
    assert sorted(calls) == ["linear", "linear_input_grad", "linear_weight_grad"]
    assert outs[0].shape == outs[1].shape
    assert relative_error(*outs) < 1e-5
    for mine, theirs in zip(found, wanted, strict=True):
        if theirs.grad is not None:
            assert relative_error(mine.grad, theirs.grad) < 1e-5
        else:
            assert mine.grad is None


def test_only_the_gradients_that_are_needed_are_computed(calls):
    products = MatmulKernels.from_table(CpuAccelerator("torch").matrix_kernels("on"), "cpu", 0)
    x, weight = torch.randn(4, 6), torch.randn(5, 6, requires_grad=True)
    products.apply(x, weight, None).sum().backward()
    products.apply(x.requires_grad_(), weight.detach(), None).sum().backward()
    with torch.no_grad():
        products.apply(x, weight, None)
    assert calls == ["linear", "linear_weight_grad", "linear", "linear_input_grad", "linear"]


def test_gradients_of_gradients_are_torchs(calls):
    products = MatmulKernels.from_table(CpuAccelerator("torch").matrix_kernels("on"), "cpu", 0)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 6), (5, 6), (5,)))
    second = []
    for apply in (functional.linear, products.apply):
        first = torch.autograd.grad(apply(x, weight, bias).pow(3).sum(), [x, weight, bias], create_graph=True)
        assert calls == (["linear"] if apply == products.apply else [])
        second.append(torch.autograd.grad(sum(each.square().sum() for each in first), [x, weight, bias]))
    for mine, theirs in zip(*second, strict=True):
        assert relative_error(mine, theirs) < 1e-5


def test_a_table_with_some_products_leaves_the_rest_to_torch(calls):
    table = torch_linear.onednn_kernels().only([LINEAR_WEIGHT_GRAD])
    products = MatmulKernels.from_table(table, "cpu", 0)
    x, weight = torch.randn(2, 4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    out = products.apply(x, weight, None)
    assert torch.equal(out, functional.linear(x, weight))
    out.sum().backward()
    assert calls == ["linear_weight_grad"]


@pytest.mark.parametrize("case", ["gpt", "reentrant", "recomputed"])
@pytest.mark.parametrize("world", [1, 2])
def test_stages_stay_bitwise_equal(case, world, calls):
    build, loss = CASES[case]
    runs, counts = {}, {}
    for stage in (0, 1, 2, 3):
        zero = {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 0}
        calls.clear()
        runs[stage] = train_on_threads(world, make_config(stage, zero=zero), STEPS, build=build, loss_fn=loss)
        counts[stage] = len(calls)
        assert_same_run(runs[stage], runs[0])
    assert counts[0] == counts[1] == counts[2] == counts[3] > 0


class Borrower(Gpt):
    """The root runs a layer of another unit past its hooks, so that nobody has gathered it the first time."""

    def logits(self, tokens: Tensor) -> Tensor:
        return super().logits(tokens) + self.blocks[0].wide.forward(self.embed(tokens)).mean()


def test_parameters_that_are_gathered_on_demand_take_the_same_path(calls):
    zero = {"stage3_param_persistence_threshold": 0}
    runs, counts = [], []
    for stage in (2, 3):
        calls.clear()
        config = make_config(stage, zero=zero)
        runs.append(train_on_threads(2, config, STEPS, build=seeded(Borrower), loss_fn=token_loss))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0
    assert_same_run(*runs)


def test_parameters_that_are_still_arriving_take_the_same_path(calls):
    runs, counts = [], []
    for deferred in (False, True):
        calls.clear()
        zero = {"reduce_bucket_size": SMALL_BUCKET, "overlap_param_gather": deferred}
        runs.append(train_on_threads(2, make_config(2, zero=zero), STEPS))
        counts.append(len(calls))
    assert_same_run(*runs)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_plain_torchs_within_rounding(stage, calls):
    run = train_on_threads(2, make_config(stage), STEPS)
    plain = train_plainly(2, STEPS)
    assert calls
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}],
    ids=["bf16", "autocast"],
)
def test_other_precisions_go_the_ordinary_way(changes, calls, monkeypatch):
    run = train_on_threads(1, make_config(2, **changes), STEPS)
    assert calls == []
    monkeypatch.setenv(VARIABLE, "off")
    assert_same_run(run, train_on_threads(1, make_config(2, **changes), STEPS))


def test_float64_models_and_small_products_are_left_alone(calls, monkeypatch):
    train_on_threads(1, make_config(0), 1, build=lambda: parity_model().double())
    assert calls == []
    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.setattr(torch_linear, "faster_kernels", torch_linear.onednn_kernels)
    train_on_threads(1, make_config(0), 1)  # tiny
    assert calls == []

    def big() -> None:
        with engine_around(nn.Linear(512, 512)) as engine:
            engine(torch.randn(32, 512))
            engine.eval()(torch.randn(1, 512))

    alone(big)
    assert calls == ["linear"]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """A subclass without a forward of its own."""


def test_layers_are_unchanged_but_for_their_forward_and_get_that_back(calls):
    def check() -> None:
        model = nn.Sequential(nn.Linear(4, 4), Renamed(4, 4), Doubled(4, 4), nn.Linear(4, 4))
        patched = model[3].forward = lambda x: functional.linear(x, model[3].weight)
        names = [*model.state_dict()]
        with engine_around(model) as engine:
            engine(torch.randn(2, 4))
            assert calls == ["linear", "linear"]
            assert [type(layer) for layer in model] == [nn.Linear, Renamed, Doubled, nn.Linear]
            assert [*model.state_dict()] == names
        assert ["forward" in layer.__dict__ for layer in model] == [False, False, False, True]
        assert model[3].forward is patched
        model(torch.randn(2, 4))
        assert len(calls) == 2

    alone(check)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_ordinary_modules(copied, calls):
    def check() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with engine_around(model):
            twin = copied(model)
            nn.init.zeros_(twin[0].weight)
            x = torch.randn(3, 4)
            wanted = functional.linear(twin[0].bias.expand(3, 4), twin[1].weight, twin[1].bias)
            assert torch.equal(twin(x), wanted)
            assert calls == []
            assert torch.equal(copied(twin)(x), wanted)
            with engine_around(twin) as engine:  # one copy may be trained too
                engine(x)
            assert calls == ["linear"] * 2
            model(x)
        assert len(calls) == 4

    alone(check)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_compiling_tracing_and_transforming_take_the_ordinary_path(calls):
    def check() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        x = torch.randn(3, 4)
        wanted = model(x).detach()
        with engine_around(model):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), wanted)
            assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), wanted)
            jacobian = torch.func.jacrev(model)(x)
            assert jacobian.shape == (3, 1, 3, 4)
            assert torch.func.vmap(model)(x).shape == (3, 1)
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                assert torch.autograd.forward_ad.unpack_dual(model(dual)).tangent is not None
            with switched(torch._C._set_mkldnn_enabled, False, True):
                model(x)
            with switched(torch.set_float32_matmul_precision, "high", "highest"):
                model(x)
            assert calls == []
            assert relative_error(model(x).detach(), wanted) < 1e-5
            assert calls == ["linear"] * 2

    alone(check)


def test_wrong_shapes_are_refused_in_torchs_words(calls):
    def check() -> None:
        model = nn.Linear(4, 4)
        with engine_around(model) as engine:
            with pytest.raises(RuntimeError) as caught:
                engine(torch.randn(3, 5))
            assert "3x5 and 4x4" in str(caught.value)
            assert engine(torch.randn(0, 4)).shape == (0, 4)

    alone(check)


def test_ranks_use_what_all_of_them_have_chosen(calls, monkeypatch):
    real = torch_linear.onednn_kernels()

    class Choosing(CpuAccelerator):
        def __init__(self, ops: list[Any]) -> None:
            super().__init__("torch")
            self.ops = ops

        def matrix_kernels(self, choice: Any) -> KernelTable:
            return real.only(self.ops)

    def agree(communicator: Any, other_choice: Any) -> set[Any]:
        ops = [LINEAR, LINEAR_WEIGHT_GRAD] if communicator.rank else [LINEAR]
        choice = other_choice if communicator.rank else "auto"
        return set(agreed_kernels(Choosing(ops), communicator, choice))

    assert run_threads(2, agree, "auto") == [{LINEAR}, {LINEAR}]
    assert run_threads(2, agree, "on") == [set(), set()]


def test_the_config_can_switch_them_off(calls, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(torch_linear, "faster_kernels", torch_linear.onednn_kernels)
    monkeypatch.setattr(linears, "LEAST_WORK", 0)
    train_on_threads(1, make_config(1, matrix_kernels="off"), 1)
    assert calls == []
    train_on_threads(1, make_config(1), 1)
    assert calls


def test_products_of_experts_alone_leave_linear_layers_to_torch(monkeypatch):
    """Where oneDNN is no faster, csrc's products of experts are all that the table has."""
    monkeypatch.setattr(torch_linear, "onednn_kernels", lambda: KernelTable("none", {}))
    monkeypatch.setenv(VARIABLE, "on")
    assert set(CpuAccelerator("torch").matrix_kernels("on"))
    model = parity_model()

    def train() -> None:
        with engine_around(model):
            assert all("forward" not in layer.__dict__ for layer in model.modules() if isinstance(layer, nn.Linear))

    alone(train)
