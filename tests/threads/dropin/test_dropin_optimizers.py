"""The config's optimizers under the drop-in, step by step against DeepSpeed 0.19.8: its own numbers where it runs on a
CPU, and the formula of its kernel in float64 where it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.lamb import FusedLamb
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from polyaccel_deepspeed.config import normalise
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

MEASURED: list[tuple[str, dict[str, Any], str | None, tuple[float, ...]]] = [
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}, None, (2.53209820, 2.41732216, 2.30555688, 2.21206296)),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}, None,
     (2.48429936, 2.34603295, 2.21506973, 2.10022118)),
    ("AdamW", {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1}, None,
     (2.46234004, 2.07150843, 1.69127864, 1.44318419)),
    ("AdamW", {"lr": 0.01, "eps": 0.1}, None, (2.54980222, 2.48455256, 2.41870697, 2.36380966)),
    ("AdamW", {"lr": 0.01, "torch_adam": True}, None, (2.53670411, 2.42624616, 2.31846553, 2.22868257)),
    ("Adam", {"lr": 0.01, "torch_adam": True, "adam_w_mode": False}, None,
     (2.53721620, 2.42723939, 2.31990385, 2.23053636)),
    ("AdamW", {"lr": 0.01, "torch_adam": True, "weight_decay": 0.2}, None,
     (2.52698551, 2.40743463, 2.29128165, 2.19372068)),
    ("AdamW", {"lr": 0.01, "adam_w_mode": False, "weight_decay": 0.1, "torch_adam": True}, None,
     (2.53209825, 2.41732188, 2.30555601, 2.21206191)),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}, "cpu", (2.53209820, 2.41732216, 2.30555688, 2.21206296)),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}, "cpu",
     (2.48429936, 2.34603295, 2.21506973, 2.10022118)),
    ("Adam", {"lr": 0.01, "torch_adam": True}, "cpu", (2.53670411, 2.42624616, 2.31846553, 2.22868257)),
    ("Adagrad", {"lr": 0.01, "weight_decay": 0.1}, None, (2.48429938, 2.36392822, 2.28657618, 2.25385273)),
    ("Adagrad", {"lr": 0.01, "weight_decay": 0.1, "eps": 0.1}, "cpu", (2.52782424, 2.44710097, 2.38971044, 2.36281378)),
    ("Adagrad", {}, "cpu", (2.53721626, 2.42961950, 2.36601249, 2.34825335)),
]  # fmt: skip
"""Name, arguments, where the states are; and the sum of the squared weights after each of four steps of DeepSpeed's."""


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    """One rank alone opens torch's own group, which the ranks of another test are not in."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def engine_of(
    model: nn.Module, kind: str, params: dict[str, Any], *, stage: int = 0, offload: str | None = None
) -> Any:
    zero: dict[str, Any] = {"stage": 2 if offload else stage}
    if offload:
        zero["offload_optimizer"] = {"device": offload}
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "zero_optimization": zero}
    return deepspeed.initialize(model=model, config={**config, "optimizer": {"type": kind, "params": params}})[0]


@pytest.mark.parametrize(("kind", "params", "offload", "squares"), MEASURED)
def test_steps_are_deepspeeds(
    kind: str, params: dict[str, Any], offload: str | None, squares: tuple[float, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)

    def body(communicator: Communicator) -> list[float]:
        engine = engine_of(model, kind, params, offload=offload)
        draws = torch.Generator().manual_seed(1)
        found = []
        for _ in squares:
            x, y = torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws)
            engine.backward((engine(x) - y).square().mean())
            engine.step()
            found.append(float(engine.module.weight.detach().double().square().sum()))
        engine.destroy()
        return found

    assert run_threads(1, body)[0] == pytest.approx(squares, rel=5e-6)


def lamb_in_float64(
    weights: list[torch.Tensor], gradients: list[list[torch.Tensor]], params: dict[str, Any]
) -> list[torch.Tensor]:
    """DeepSpeed's kernel: the trust ratio is of the update without bias correction, which multiplies the rate."""
    beta1, beta2 = params.get("betas", (0.9, 0.999))
    eps, decay, lr = params.get("eps", 1e-8), params.get("weight_decay", 0.0), params["lr"]
    low, high = params.get("min_coeff", 0.01), params.get("max_coeff", 10.0)
    weights = [weight.double() for weight in weights]
    averages, squares = [torch.zeros_like(one) for one in weights], [torch.zeros_like(one) for one in weights]
    for step, of_step in enumerate(gradients, start=1):
        rate = lr
        if params.get("bias_correction", True):
            rate = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        for index, gradient in enumerate(one.double() for one in of_step):
            averages[index] = beta1 * averages[index] + (1 - beta1) * gradient
            squares[index] = beta2 * squares[index] + (1 - beta2) * gradient.square()
            update = averages[index] / (squares[index].sqrt() + eps) + decay * weights[index]
            norm, length = float(weights[index].norm()), float(update.norm())
            ratio = min(max(norm / length, low), high) if norm and length else 1.0
            weights[index] = weights[index] - rate * ratio * update
    return weights


class Weights(nn.Module):
    """A matrix, a vector, and one that begins at zero; its gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.vector = nn.Parameter(torch.randn(3) * 10)
        self.zeros = nn.Parameter(torch.zeros(5))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((one * gradient).sum() for one, gradient in zip(self.parameters(), gradients, strict=True))


LAMBS: list[dict[str, Any]] = [
    {"lr": 0.01},
    {"lr": 0.01, "bias_correction": False},
    {"lr": 0.02, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-3},
    {"lr": 0.01, "max_coeff": 0.3, "min_coeff": 0.2},
]


@pytest.mark.parametrize("params", LAMBS)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 2)])
def test_lamb_is_deepspeeds(params: dict[str, Any], stage: int, ranks: int) -> None:
    draws = torch.Generator().manual_seed(2)
    gradients = [[torch.randn(one.shape, generator=draws) for one in Weights().parameters()] for _ in range(5)]
    models = [Weights() for _ in range(ranks)]
    wanted = lamb_in_float64([one.detach() for one in Weights().parameters()], gradients, params)

    def body(communicator: Communicator) -> list[torch.Tensor]:
        engine = engine_of(models[communicator.rank], "Lamb", params, stage=stage)
        for of_step in gradients:
            engine.backward(engine(of_step))
            engine.step()
        found = list(engine.module_state_dict().values())
        engine.destroy()
        return found

    for found in run_threads(ranks, body):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)


def test_lamb_moves_as_far_as_deepspeeds_under_a_constant_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    begin = model.weight.detach().clone()

    def body(communicator: Communicator) -> list[float]:
        engine = engine_of(model, "Lamb", {"lr": 0.01})
        found = []
        for _ in range(3):
            engine.backward(engine(torch.ones(8, 8)).sum())
            engine.step()
            found.append(float((engine.module.weight.detach() - begin).norm()))
        engine.destroy()
        return found

    assert run_threads(1, body)[0] == pytest.approx([0.005089, 0.008875, 0.012124], rel=1e-3)


def test_a_fused_lamb_that_a_script_makes_is_the_same() -> None:
    draws = torch.Generator().manual_seed(3)
    gradients = [[torch.randn(one.shape, generator=draws) for one in Weights().parameters()] for _ in range(3)]
    model = Weights()
    wanted = lamb_in_float64([one.detach() for one in Weights().parameters()], gradients, {"lr": 0.05})

    def body(communicator: Communicator) -> list[torch.Tensor]:
        config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0}
        optimizer = FusedLamb(model.parameters(), lr=0.05)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        for of_step in gradients:
            engine.backward(engine(of_step))
            engine.step()
        found = list(engine.module_state_dict().values())
        engine.destroy()
        return found

    for ours, theirs in zip(run_threads(1, body)[0], wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)


BASE = {"train_batch_size": 4, "gradient_clipping": 0.0}


@pytest.mark.parametrize(
    ("zero", "params", "betas"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"lr": 1e-3}, [0.9, 0.999]),
        ({"stage": 1, "cpu_offload": True}, {}, [0.9, 0.999]),
        ({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, {}, [0.9, 0.999]),
        ({"stage": 2}, {"lr": 1e-3}, None),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, {}, None),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"betas": [0.5, 0.6]}, [0.5, 0.6]),
    ],
)
def test_lion_on_the_host_has_other_defaults(zero: dict[str, Any], params: dict[str, Any], betas: Any) -> None:
    given = {**BASE, "zero_optimization": zero, "optimizer": {"type": "Lion", "params": params}}
    before = json.dumps(given)
    tree, changes = normalise(given)
    assert tree["optimizer"]["params"].get("betas") == betas
    assert "optimizer.type" in [change.key for change in changes]  # it names the difference where all is zero
    assert json.dumps(given) == before


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_what_does_not_exist_is_refused_by_name(kind: str) -> None:
    def body(communicator: Communicator) -> None:
        with pytest.raises(ConfigError) as caught:
            engine_of(nn.Linear(8, 8), kind, {"lr": 0.01})
        assert (caught.value.problems[0].key, caught.value.problems[0].value) == ("optimizer.type", kind)

    run_threads(1, body)


def test_amsgrad_is_refused_by_name() -> None:
    def body(communicator: Communicator) -> None:
        with pytest.raises(ConfigError) as caught:
            engine_of(nn.Linear(8, 8), "AdamW", {"lr": 0.01, "amsgrad": True, "torch_adam": True})
        assert caught.value.problems[0].key == "optimizer.params.amsgrad"

    run_threads(1, body)


@pytest.mark.parametrize("stage", [0, 2])
def test_muon_as_an_object_is_the_config_s(stage: int) -> None:
    """Its groups follow from DeepSpeed's marks, and both train over two ranks."""
    torch.manual_seed(0)
    marked = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    copies = [deepcopy(marked) for _ in range(4)]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    params = {"muon_lr": 0.02, "adam_lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0}
    muon = {"optimizer": {"type": "Muon", "params": params}}
    for model in copies:
        deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon"), model)
        deepspeed.resolve_per_head_muon_after_sharding(model)
    assert [each.use_muon for each in copies[0].parameters()] == [True, False, True, False]

    def body(communicator: Communicator, by_object: bool) -> list[float]:
        model = copies[communicator.rank + 2 * by_object]
        optimizer = None
        if by_object:
            kinds = {kind: [each for each in model.parameters() if each.use_muon is kind] for kind in (True, False)}
            optimizer = MuonWithAuxAdam([{"params": each, "use_muon": kind} for kind, each in kinds.items()])
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config | ({} if by_object else muon))
        losses = []
        for step in range(4):
            draws = torch.Generator().manual_seed(10 * step + communicator.rank)
            loss = engine(torch.randn(4, 6, generator=draws)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    by_config, by_object = (run_threads(2, lambda ranks, way=way: body(ranks, way)) for way in (False, True))
    for mine, other in zip(by_object, by_config, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
        assert mine[-1] < mine[0]
    with pytest.raises(PolyaccelError):
        MuonWithAuxAdam([{"params": [*marked.parameters()]}])
