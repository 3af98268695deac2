"""The drop-in's gates compute DeepSpeed's formulas, token by token, and its layers of experts what these say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
)
from deepspeed.utils import groups
from polyaccel_deepspeed.experts.models import with_expert_ranks
from torch import Tensor, nn

from polyaccel.errors import ConfigError, PolyaccelError

TOKENS, EXPERTS = 11, 4


def drawn(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))


def probabilities(logits: Tensor) -> list[list[float]]:
    rows = [[math.exp(value) for value in row] for row in logits.tolist()]
    return [[value / sum(row) for value in row] for row in rows]


def ranked(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda at: -row[at])


def gates_loss(scores: list[list[float]], chosen: list[list[int]]) -> float:
    """experts x sum of (share of tokens that chose it) x (its mean probability)."""
    total = 0.0
    for expert in range(EXPERTS):
        share = sum(expert in each for each in chosen) / TOKENS
        total += share * sum(row[expert] for row in scores) / TOKENS
    return EXPERTS * total


def assert_weights(found: Tensor, kept: list[dict[int, float]]) -> None:
    """`found` (tokens, experts, capacity) has each token's weights, each expert's in places of their own."""
    wanted = torch.tensor([[each.get(expert, 0.0) for expert in range(EXPERTS)] for each in kept])
    torch.testing.assert_close(found.sum(2), wanted)
    assert int((found > 0).sum(0).max()) <= 1


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_two_choices(factor: float) -> None:
    logits = drawn()
    scores = probabilities(logits)
    chosen = [ranked(row)[:2] for row in scores]
    room = max(math.ceil(TOKENS / EXPERTS * 2 * factor), 1)
    taken = [0] * EXPERTS
    kept: list[dict[int, float]] = [{} for _ in chosen]
    for turn in range(2):
        for token, each in enumerate(chosen):
            if taken[each[turn]] < room:
                kept[token][each[turn]] = scores[token][each[turn]]
            taken[each[turn]] += 1
    shared = [{expert: value / sum(each.values()) for expert, value in each.items()} for each in kept]
    loss, weights, mask, counts = top2gating(logits, factor, 1, top2_2nd_expert_sampling=False)
    assert loss.item() == pytest.approx(gates_loss(scores, [each[:1] for each in chosen]))
    assert_weights(weights, shared)
    assert weights.shape[2] == room
    assert torch.equal(mask, weights > 0)
    assert counts.tolist() == taken


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_many_choices_are_kept_by_probability_or_place(policy: str) -> None:
    logits = drawn(1)
    scores = probabilities(logits)
    chosen = [ranked(row)[:3] for row in scores]
    room = max(math.ceil(TOKENS / EXPERTS * 3 * 0.6), 1)
    kept: list[dict[int, float]] = [{} for _ in chosen]
    for expert in range(EXPERTS):
        tokens = [token for token, each in enumerate(chosen) if expert in each]
        if policy == "probs":
            tokens.sort(key=lambda token: -scores[token][expert])
        for token in tokens[:room]:
            kept[token][expert] = scores[token][expert]
    shared = [{expert: value / sum(each.values()) for expert, value in each.items()} for each in kept]
    loss, weights, _, counts = topkgating(logits, 3, 0.6, 1, drop_policy=policy)
    assert loss.item() == pytest.approx(gates_loss(scores, chosen) / 3)
    assert_weights(weights, shared)
    assert counts.tolist() == [sum(expert in each for each in chosen) for expert in range(EXPERTS)]


def test_one_choice_of_the_tokens_that_count() -> None:
    logits = drawn(2)
    used = torch.arange(TOKENS) % 3 > 0
    scores = probabilities(logits)
    chosen = [ranked(row)[:1] if counts else [] for row, counts in zip(scores, used.tolist(), strict=True)]
    loss, weights, _, counts = top1gating(logits, 1.0, 1, used_token=used.float(), drop_tokens=False)
    assert loss.item() == pytest.approx(gates_loss(scores, chosen))
    assert_weights(weights, [{expert: scores[token][expert] for expert in each} for token, each in enumerate(chosen)])
    assert int(counts.sum()) == int(used.sum())


def test_a_full_expert_takes_tokens_at_random() -> None:
    logits = torch.zeros(TOKENS, EXPERTS)
    logits[:, 2] = 1.0
    seen = set()
    for seed in range(30):
        torch.manual_seed(seed)
        _, weights, _, counts = top1gating(logits, 1.0, 1)
        taken = tuple(weights.sum((1, 2)).nonzero().squeeze(1).tolist())
        assert len(taken) == math.ceil(TOKENS / EXPERTS)
        assert counts.tolist() == [0, 0, TOKENS, 0]
        seen.update(taken)
    assert seen == set(range(TOKENS))


def made(**settings: Any) -> MoE:
    torch.manual_seed(3)
    expert = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    layer = MoE(6, expert, EXPERTS, **settings)
    with torch.no_grad():
        for parameter in layer.deepspeed_moe.experts.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # copies of one expert, otherwise
    return layer


def of_expert(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return torch.relu(x @ up.T + up_bias) @ down.T + down_bias


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("use_residual", [False, True])
def test_a_layer_adds_up_experts_times_weights(k: int, use_residual: bool) -> None:
    layer = made(k=k, use_residual=use_residual, capacity_factor=0.8, min_capacity=1, top2_2nd_expert_sampling=False)
    x = torch.randn(2, 7, 6)
    torch.manual_seed(0)
    out, loss, counts = layer(x)
    torch.manual_seed(0)
    alone, weights, _, of_gate = layer.deepspeed_moe.gate(x.view(-1, 6))
    stacks = [value.unbind() for _, value in layer.deepspeed_moe.experts.named_parameters()]
    made_of = torch.stack([of_expert(x.view(-1, 6), *one) for one in zip(*stacks, strict=True)], dim=1)
    wanted = (made_of * weights.sum(2, keepdim=True)).sum(1).view_as(x)
    if use_residual:
        shares = torch.softmax(layer.coefficient(x), -1)
        wanted = wanted * shares[..., :1] + layer.mlp(x) * shares[..., 1:]
    torch.testing.assert_close(out, wanted)
    assert loss.item() == pytest.approx(alone.item())
    assert counts.tolist() == of_gate.tolist()
    (out.sum() + loss).backward()
    assert layer.deepspeed_moe.gate.wg.weight.grad is not None


def test_an_expert_may_return_a_tuple() -> None:
    class Biased(nn.Linear):
        def forward(self, input: Tensor) -> Any:  # noqa: A002 - as nn.Linear has it
            return super().forward(input), self.bias

    torch.manual_seed(0)
    layer = MoE(6, Biased(6, 6), 2, use_residual=True)
    out, _, _ = layer(torch.randn(3, 6))
    assert out.shape == (3, 6)


@pytest.mark.parametrize("policy", ["Jitter", "RSample"])
def test_noise_is_of_training_alone(policy: str) -> None:
    gate = TopKGate(6, EXPERTS, noisy_gate_policy=policy, use_rts=False)
    x = torch.randn(20, 6)
    first, second = (gate(x)[1] for _ in range(2))
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    gate.eval()
    assert torch.equal(gate(x)[1], gate(x)[1])


def test_parameters_of_experts_stand_in_groups_of_their_own() -> None:
    model = nn.ModuleDict({"one": made(ep_size=2), "two": made(ep_size=4), "plain": nn.Linear(6, 6)})
    assert has_moe_layers(model) == (True, EXPERTS)
    assert has_moe_layers(model["plain"]) == (False, 0)
    split = configure_moe_param_groups(list(model.parameters()))
    assert [(group["name"], is_moe_param_group(group), len(group["params"])) for group in split] == [
        ("dense-params", False, 4), ("ep_size_2", True, 4), ("ep_size_4", True, 4),
    ]  # fmt: skip
    assert {id(one) for group in split for one in group["params"]} == {id(one) for one in model.parameters()}
    assert not any(map(is_moe_param, split[0]["params"]))
    assert configure_moe_param_groups(split) is split
    small = {"params": list(model["one"].parameters()), "name": "all", "lr": 0.1}
    parts = split_params_into_different_moe_groups_for_optimizer(small, max_group_size=250)
    assert [(part["name"], part["lr"], sum(one.numel() for one in part["params"])) for part in parts] == [
        ("all", 0.1, 24), ("ep_size_2", 0.1, 224), ("ep_size_2", 0.1, 216),
    ]  # fmt: skip
    out, loss, _ = model["one"](torch.randn(4, 6))
    (out.sum() + loss).backward()
    shared, experts = split_params_grads_into_shared_and_expert_params(model.parameters())
    assert (len(shared), len(experts)) == (1, 4)


def test_layers_say_how_many_ranks_share_experts() -> None:
    small = MoE(6, nn.Linear(6, 6), num_experts=2, ep_size=2)
    model = nn.ModuleList([made(), made(ep_size=2), made(ep_size=4)])
    assert with_expert_ranks({"a": 1}, nn.ModuleList([made()])) == {"a": 1}
    assert with_expert_ranks({}, model)["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert with_expert_ranks({}, model.append(small))["expert_parallel"]["autoep_size"] == 2
    with pytest.raises(ConfigError) as caught:
        with_expert_ranks({"expert_parallel": {"enabled": True, "autoep_size": 4}}, model)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("expert_parallel.autoep_size", 4)]
    assert "ep_size" in str(caught.value)
    with pytest.raises(PolyaccelError) as caught:
        groups._get_expert_parallel_group("ep_size_8")
    assert caught.value.value == "ep_size_8"


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"ep_size": 5}, 5),
        ({"k": 5}, 5),
        ({"noisy_gate_policy": "Noise"}, "Noise"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], value: object) -> None:
    with pytest.raises(PolyaccelError) as caught:
        made(**settings)
    assert caught.value.value == value
