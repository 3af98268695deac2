"""Optimizer states in 8 and 16 bits, and master weights in 16: formulas, stages, checkpoints, memory, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity_models import assert_bitwise, drawn_from, make_config, snapshot
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError, ShardingError
from polyaccel.ops.dynamic_code import dynamic_code
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.utils import safe_get_full_optimizer_state

STEPS = 3
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "state_bits": 8}}
LION = {"type": "Lion", "params": {"lr": 1e-3, "state_bits": 8}}
SHARDED = {"reduce_bucket_size": 700, "stage3_param_persistence_threshold": 0}


class Model(nn.Module):
    """Parameters of several blocks, of a part of one, tied and frozen ones."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 24)
        self.up = nn.Linear(24, 45)
        self.down = nn.Linear(45, 24)
        self.fixed = nn.Linear(24, 24, bias=False)
        self.fixed.weight.requires_grad_(False)
        self.head = nn.Linear(24, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.fixed(x + self.down(torch.tanh(self.up(x))))
        return nn.functional.cross_entropy(self.head(x).float(), tokens.roll(1))


def built():
    with drawn_from(0):
        return Model()


def tokens(step, rank):
    return torch.randint(17, (8,), generator=torch.Generator().manual_seed(10 * step + rank))


def engine_for(stage, optimizer=ADAMW, **changes):
    config = make_config(stage, zero={**SHARDED, **changes.pop("zero", {})}, optimizer=optimizer, **changes)
    return polyaccel.initialize(model=built(), config=config)[0]


def go(engine, rank, begin=0, steps=STEPS):
    for step in range(begin, begin + steps):
        engine.backward(engine(tokens(step, rank)))
        engine.step()


def states_of(engine):
    """Every state of the optimizer, by parameter and name."""
    names = ("exp_avg", "exp_avg_sq") if "betas" in engine.optimizer.param_groups[0] else ("momentum_buffer",)
    found = {}
    for fqn, parameter in engine.module.named_parameters():
        for name in names if parameter.requires_grad else ():
            found[f"{fqn} {name}"] = safe_get_full_optimizer_state(parameter, name)
    return found


def run_of(world, stage, optimizer=ADAMW, **changes):
    def train(communicator):
        engine = engine_for(stage, optimizer, **changes)
        go(engine, communicator.rank)
        states = {} if optimizer is LION else states_of(engine)
        engine.destroy()
        return snapshot(engine.module), states

    return run_threads(world, train)[0]


def rounded(values, *, signed):
    """Float64 numbers as the nearest of their block's code."""
    code = dynamic_code(signed=signed).astype(np.float64)
    blocks = np.split(values, range(256, values.size, 256))
    scales = [block[np.argmax(np.abs(block))] for block in blocks]
    return np.concatenate(
        [code[np.abs(b[:, None] / s - code).argmin(1)] * s if s else b for b, s in zip(blocks, scales, strict=True)]
    )


def test_adamw_in_8_bits_is_its_formula_in_float64():
    found, states = run_of(1, 0)
    model = built()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    weights = {name: one.detach().double().numpy().ravel() for name, one in trained.items()}
    m, v = ({name: np.zeros(one.size) for name, one in weights.items()} for _ in range(2))
    for step in range(STEPS):
        model.zero_grad()
        model(tokens(step, 0)).backward()
        for name, one in trained.items():
            g = one.grad.double().numpy().ravel()
            first, second = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g * g
            direction = first / (1 - 0.9 ** (step + 1)) / (np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8)
            weights[name] = weights[name] * (1 - 1e-2 * 0.1) - 1e-2 * direction
            m[name], v[name] = rounded(first, signed=True), rounded(second, signed=False)
            one.data.copy_(torch.from_numpy(weights[name]).view(one.shape))
    for name, wanted in weights.items():
        differences = np.abs(found[name].double().numpy().ravel() - wanted)
        assert np.mean(differences < 1e-6) > 0.995  # the rest lay on the border of two codes
        assert differences.max() < 2e-3
        held = states[f"{name} exp_avg_sq"].double().numpy().ravel()
        assert np.mean(np.isclose(held, v[name], rtol=1e-4, atol=1e-12)) > 0.99


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "choice",
    [
        {"optimizer": ADAMW},
        {"optimizer": LION},
        {
            "optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
            "bf16": {"enabled": True, "bf16_optimizer_states": True},
        },
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True},
        },
        {"fp16": {"enabled": True, "loss_scale": 64.0, "fp16_master_weights_and_grads": True}, "optimizer": ADAMW},
    ],
    ids=["adamw", "lion", "bf16 states", "all bf16", "fp16 masters"],
)
def test_stages_have_the_same_bits(choice, world):
    wanted, states = run_of(world, 0, **choice)
    assert not all(torch.equal(value, snapshot(built())[name].to(value.dtype)) for name, value in wanted.items())
    for stage in (1, 2, 3):
        found, others = run_of(world, stage, **choice)
        assert_bitwise(found, wanted)
        assert_bitwise(others, states)


@pytest.mark.parametrize(("before", "after"), [((2, 3), (3, 1)), ((2, 0), (1, 2)), ((1, 1), (2, 3))])
def test_checkpoints_resume_with_the_same_bits_at_another_world_size(tmp_path, before, after):
    """One batch for all ranks, so that the number of ranks does not change the gradients."""

    def save(communicator):
        engine = engine_for(before[1])
        go(engine, 0)
        engine.save_checkpoint(str(tmp_path))
        states = states_of(engine)
        go(engine, 0, STEPS)
        engine.destroy()
        return states, snapshot(engine.module)

    def resume(communicator):
        engine = engine_for(after[1])
        engine.load_checkpoint(str(tmp_path))
        states = states_of(engine)
        go(engine, 0, STEPS)
        engine.destroy()
        return states, snapshot(engine.module)

    states, weights = run_threads(before[0], save)[0]
    for found, ends in run_threads(after[0], resume):
        assert_bitwise(found, states)
        for name, value in ends.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-4)


def test_checkpoints_load_into_states_of_32_bits_and_back(tmp_path):
    wide = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}

    def visit(communicator):
        first = engine_for(2)
        go(first, 0)
        first.save_checkpoint(str(tmp_path), tag="8")
        second = engine_for(1, wide)
        second.load_checkpoint(str(tmp_path), tag="8")
        second.save_checkpoint(str(tmp_path), tag="32")
        third = engine_for(3)
        third.load_checkpoint(str(tmp_path), tag="32")
        assert_bitwise(states_of(second), states_of(first))
        assert_bitwise(states_of(third), states_of(first))

    run_threads(2, visit)


def test_a_parameter_has_two_bytes_of_state():
    engine = polyaccel.initialize(model=nn.Linear(512, 512, bias=False), config=make_config(2, optimizer=ADAMW))[0]
    measured = dict(engine.zero.memory.measured())
    estimated = dict(engine.zero.memory.estimated())
    (purpose,) = (name for name in measured if "optimizer" in name)
    assert 2.0 <= measured[purpose] / 512**2 <= 2.04
    assert measured[purpose] == estimated[purpose]


def test_bfloat16_averages_move_on_average():
    """With a decay of 0.999 an average changes by less than half the spacing of bfloat16 in a step."""
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    config = make_config(1, optimizer={"type": "AdamW", "params": {"lr": 1e-6}}, bf16=bf16)
    model = nn.Linear(1, 4000, bias=False)
    engine = polyaccel.initialize(model=model, config=config)[0]
    for step in range(40):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).float().sum() * (1 if step < 20 else 1.03))
        engine.step()
    found = safe_get_full_optimizer_state(model.weight, "exp_avg_sq").double().mean()
    gradients = torch.tensor([1.0] * 20 + [torch.tensor(1.03).bfloat16().item()] * 20).double()
    wanted = sum(0.001 * 0.999 ** (39 - at) * value**2 for at, value in enumerate(gradients))
    assert abs(found / wanted - 1) < 3e-3


def test_what_has_no_narrow_states_is_refused(tmp_path):
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    for optimizer in (
        {"type": "Lamb", "params": {}},
        {"type": "ScheduleFreeAdamW", "params": {}},
        {"type": "RMSprop", "params": {}},
        {"type": "Muon", "params": {}},
    ):
        with pytest.raises(ConfigError) as caught:
            engine_for(1, optimizer, bf16=bf16)
        assert [problem.key for problem in caught.value.problems] == ["bf16.bf16_optimizer_states"]
    masters = {"enabled": True, "bf16_master_weights_and_grads": True}
    model = built()
    with pytest.raises(ConfigError):
        polyaccel.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=make_config(0, bf16=masters)
        )
    files = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ShardingError):
        engine_for(1, zero=files)


def test_states_on_the_host_have_the_same_bits():
    wanted, _ = run_of(2, 2)
    found, _ = run_of(2, 2, zero={"offload_optimizer": {"device": "cpu"}})
    assert_bitwise(found, wanted)
