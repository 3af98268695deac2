"""Shadow runs: right programs are proven, and planted errors are found with the rewrite to blame."""

from __future__ import annotations

import threading

import pytest
import torch
from planted_change import plant
from torch import nn

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.torch.api.optimizer_proof import Trial
from polyaccel.torch.rewrites.cuts import TensorParallel
from polyaccel.torch.rewrites.engine import ActivationCheckpointing
from polyaccel.verify.prove import prove, threads_run
from polyaccel.zero.engine import ZeroEngine

BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
    "gradient_clipping": 0.5,
}
_LOCK = threading.Lock()
"""Ranks that are threads share torch's generator while they make weights."""


class Block(nn.Module):
    def __init__(self, width, act, norm):
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = norm, nn.Linear(width, 3 * width), act, nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Net(nn.Module):
    """Three blocks with a head; a frozen parameter, an unused one, and a tied one."""

    def __init__(self, act=nn.GELU, norm=nn.LayerNorm):
        super().__init__()
        self.layers = nn.ModuleList([Block(8, act(), norm(8)) for _ in range(3)])
        self.head, self.unused = nn.Linear(8, 5), nn.Parameter(torch.ones(3))
        self.again = self.head
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.again(x) * self.scale, y)


def program(make_model=Net, *, optimizer=None, steps=2, **config):
    """A training loop of batches that each data rank has a part of."""

    def run():
        with _LOCK:
            torch.manual_seed(0)
            model = make_model()
            model.dummy_inputs = {"x": torch.zeros(2, 8), "y": torch.zeros(2, dtype=torch.long)}
        engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, config={**BASE, **config})
        data = engine.mesh.coordinates(default_communicator().rank)["data"]
        draw = torch.Generator().manual_seed(data)
        for _ in range(steps * BASE["gradient_accumulation_steps"]):
            x, y = torch.randn(4, 8, generator=draw), torch.randint(0, 5, (4,), generator=draw)
            engine.backward(engine(x, y))
            engine.step()
        raise AssertionError("the program ran on after its last step")

    return run


RIGHT = {
    "stage 0": (2, {}),
    "stage 2": (2, {"zero_optimization": {"stage": 2}}),
    "stage 3 on three ranks": (3, {"zero_optimization": {"stage": 3}}),
    "tensor ranks beside data ranks": (4, {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 1}}),
    "bf16, recomputed": (1, {"bf16": {"enabled": True}, "activation_checkpointing": {"enabled": True}}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_program_is_proven(case):
    world, config = RIGHT[case]
    proof = prove(threads_run(world, program(**config)))
    assert proof.is_proven, [str(one) for one in proof.findings]
    assert not proof.is_weak
    assert proof.quantities > 60
    if "mesh" in config:
        assert proof.acted["tensor_parallel"] > 0


def double_gradient(model):
    model.layers[1].fc2.bias.register_hook(lambda gradient: 2 * gradient)


def shift_output(model):
    model.layers[2].act.register_forward_hook(lambda module, inputs, output: output * 1.001)


def count_twice(model):
    def count(module, inputs, output):
        if module.training:
            module.num_batches_tracked += 1

    model.layers[0].norm.register_forward_hook(count)


def test_a_doubled_gradient_under_tensor_ranks(monkeypatch):
    plant(monkeypatch, TensorParallel, double_gradient)
    proof = prove(threads_run(2, program(mesh={"tensor": 2})))
    assert (proof.findings[0].kind, proof.findings[0].name) == ("gradient", "layers.1.fc2.bias")
    assert proof.findings[0].found == pytest.approx(2 * proof.findings[0].wanted)
    assert proof.blamed == ("tensor_parallel",)


def test_an_output_off_by_a_factor_under_recomputation(monkeypatch):
    plant(monkeypatch, ActivationCheckpointing, shift_output)
    proof = prove(threads_run(2, program(activation_checkpointing={"enabled": True}, zero_optimization={"stage": 3})))
    assert not proof.is_proven
    assert proof.blamed == ("activation_checkpointing",)


class Choice(nn.Module):
    """A router of two experts, whose scores differ by one unit in the last place."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([1.0, 1.0 + 2**-23]), requires_grad=False)
        self.gains = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return x * self.gains[self.scores.argmax()]


def flip_choice(model):
    act = model.layers[1].act
    act.register_forward_hook(lambda module, inputs, output: inputs[0] * module.gains[module.scores.argmin()])


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_choice_that_rounding_flips_is_no_alarm_and_hides_none(monkeypatch, is_wrong):
    plant(monkeypatch, ActivationCheckpointing, flip_choice)
    if is_wrong:
        plant(monkeypatch, ActivationCheckpointing, shift_output)
    proof = prove(threads_run(1, program(lambda: Net(act=Choice), activation_checkpointing={"enabled": True})))
    assert proof.is_proven != is_wrong, [str(one) for one in proof.findings]
    assert proof.blamed == (("activation_checkpointing",) if is_wrong else ())


def test_a_buffer_updated_twice_shows_in_the_buffer_alone(monkeypatch):
    plant(monkeypatch, ActivationCheckpointing, count_twice)
    model = lambda: Net(norm=nn.BatchNorm1d)  # noqa: E731
    proof = prove(threads_run(1, program(model, activation_checkpointing={"enabled": True})))
    assert {one.kind for one in proof.findings} == {"buffer"}
    assert proof.findings[0].name == "layers.0.norm.num_batches_tracked"
    assert proof.blamed == ("activation_checkpointing",)


class Keeper(nn.Module):
    """What modules keep besides parameters: tensors, numbers and generators, none of which changes the loss."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("seen", torch.zeros(width), persistent=False)
        self.calls, self.last, self.draw = 0, torch.zeros(width), torch.Generator().manual_seed(0)

    def forward(self, x):
        self.seen += x.detach().mean(0)
        self.last = x.detach().mean(0)
        torch.rand(1, generator=self.draw)
        return x


class DoubledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def spoil_all_but_gradients(model):
    """Change each quantity that the loss and the gradients of parameters do not show."""

    def spoil(module, inputs, output):
        module.seen.mul_(1.01)
        module.last.mul_(1.01)
        module.calls = 1
        module.draw.manual_seed(3)

    model.layers[0].norm.register_forward_hook(spoil)
    model.layers[0].register_forward_pre_hook(lambda module, inputs: (DoubledBackward.apply(inputs[0]),))


def test_each_quantity_shows_its_own_error(monkeypatch):
    update = ZeroEngine.update

    def update_wrongly(self, *args):
        result = update(self, *args)
        for shard in self.shards:
            shard.states["exp_avg_sq"].raw.mul_(1.01)
        return result

    plant(monkeypatch, ActivationCheckpointing, spoil_all_but_gradients)
    monkeypatch.setattr(ZeroEngine, "update", update_wrongly)
    model = lambda: Net(norm=Keeper)  # noqa: E731
    proof = prove(threads_run(1, program(model, activation_checkpointing={"enabled": True})), steps=1)
    found = {}
    for one in proof.findings:
        found.setdefault(one.kind, set()).add(one.parameter)
    states = found.pop("state")
    assert found == {
        "input": {"input 0 of pass 0", "input 0 of pass 1"},
        "buffer": {"layers.0.norm.seen"},
        "kept": {"layers.0.norm.last"},
        "attribute": {"layers.0.norm.calls"},
        "random": {"layers.0.norm.draw"},
    }
    assert {name for name, _ in model().named_parameters()} - {"scale", "unused"} <= states
    assert all(one.name.endswith(" exp_avg_sq") for one in proof.findings if one.kind == "state")
    assert proof.blamed == ("activation_checkpointing",)


class NormalisedSGD(torch.optim.Optimizer):
    """An update by the norm of the whole tensor, which a slice does not have."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one -= group["lr"] * one.grad / (one.grad.norm() + 1e-6)


def test_an_optimizer_of_whole_tensors_on_shards(monkeypatch):
    """The trial of the optimizer, which would refuse it, is left out."""
    monkeypatch.setattr("polyaccel.torch.api.optimizer_proof.try_on_slices", lambda optimizer: Trial())
    config = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    proof = prove(threads_run(2, program(optimizer=NormalisedSGD, **config)))
    assert {one.kind for one in proof.findings if one.step == 0} <= {"update", "loss"}
    assert proof.findings[0].kind == "update"
    assert proof.blamed == ("zero_optimization",)


def test_a_program_that_draws_other_weights_each_time_is_weak():
    def model():
        torch.seed()
        return Net()

    assert prove(threads_run(1, program(model))).is_weak
