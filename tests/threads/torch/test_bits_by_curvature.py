"""Mixture of quantisation under engines: eigenvalues of the global batch on all ranks, and in checkpoints."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from parity_models import drawn_from, make_config, on_threads
from torch import Tensor, nn

import polyaccel
from polyaccel.engine.policies.compression import Curvature
from polyaccel.errors import ConfigError
from polyaccel.torch.compression.curvature import eigenvalues, factors
from polyaccel.torch.compression.layers import compressed_layers

STEPS = 12
QUANTISED: dict[str, Any] = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1},
        "different_groups": {
            "all": {
                "params": {"start_bits": 9, "target_bits": 4, "quantization_period": 1, "period_doubling": True},
                "modules": ["fc"],
            }
        },
    }
}
EIGENVALUE = {"enabled": True, "layer_name": "blocks", "layer_num": 3, "max_iter": 200, "tol": 1e-4}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Net(nn.Module):
    """Blocks with attention between them, whose fused kernels cannot be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.fc_out = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return nn.functional.cross_entropy(self.fc_out(x).flatten(0, 1), y.flatten())


def net() -> Net:
    with drawn_from(5):
        return Net()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 5, 8, generator=generator), torch.randint(0, 3, (2, 5), generator=generator)


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    values = {"train_micro_batch_size_per_gpu": 2, "compression_training": QUANTISED, "eigenvalue": EIGENVALUE}
    return make_config(stage, **{**values, **changes})


def train(communicator: Any, model: nn.Module, config: dict[str, Any], save: Any = None, load: Any = None) -> Any:
    engine = polyaccel.initialize(model=model, config=config)[0]
    first = 0
    if load is not None:
        engine.load_checkpoint(str(load))
        first = engine.global_steps
    seen, losses = [], []
    for step in range(first, STEPS):
        loss = engine(*batch(step, communicator.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seen.append([layer.compression.pace.bits_at(step + 1) for _, layer in compressed_layers(model)])
        if save is not None and step == STEPS // 2:
            engine.save_checkpoint(str(save))
    engine.destroy()
    return losses, seen


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 2)])
def test_blocks_lose_bits_by_their_curvature_on_every_rank(stage: int, world: int) -> None:
    """Next to DeepSpeed's counter over eigenvalues of the mean loss of all ranks, in plain torch."""
    runs = on_threads(world, train, net, config_of(stage))
    assert len({str(seen) for _, seen in runs}) == 1
    losses, wanted = plainly(world)
    assert runs[0][1] == wanted
    assert runs[0][0] == pytest.approx(losses, rel=1e-5)
    assert len({row[0] for row in wanted}) > 2
    assert any(len(set(row[:3])) > 1 for row in wanted)  # blocks differ


def plainly(world: int) -> tuple[list[float], list[list[int]]]:
    """The first rank's losses and each layer's bits after each step, of a process that sees all ranks' batches."""
    model = net()
    policy = Curvature(blocks="", count=3, iterations=200, tolerance=1e-4, stability=1e-6, every=1, is_logged=False)
    layers = [*(block.fc for block in model.blocks), model.fc_out]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    bits, periods, seen, losses = [9] * 4, [1] * 4, list[list[int]](), list[float]()

    def quantised(layer: nn.Linear, count: int) -> Tensor:
        top = 2 ** (count - 1) - 1
        scale = layer.weight.detach().abs().max() / top
        return layer.weight + (torch.round(layer.weight / scale) * scale - layer.weight).detach()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for step in range(STEPS):
            total = 0.0
            given = {}
            for index, layer in enumerate(layers):
                name = f"blocks.{index}.fc.weight" if index < 3 else "fc_out.weight"
                given[name] = quantised(layer, bits[index]) if step >= 1 else layer.weight
            for rank in range(world):
                loss = torch.func.functional_call(model, given, batch(step, rank))
                total = total + loss / world
                if rank == 0:
                    losses.append(loss.item())
            due = [step + 1 - 1 >= periods[index] and bits[index] > 4 for index in range(4)]
            found = factors(eigenvalues(total, [list(b.parameters()) for b in model.blocks], policy, None))  # type: ignore[arg-type]
            optimizer.zero_grad()
            total.backward()  # type: ignore[attr-defined]
            optimizer.step()
            for index in range(4):
                if due[index]:
                    bits[index] -= 1
                    periods[index] *= 2 * (found[index] if index < 3 else 1)
            seen.append(list(bits) if step + 1 >= 1 else [0] * 4)
    return losses, seen


def test_a_checkpoint_has_the_bits(tmp_path: Any) -> None:
    straight = on_threads(2, train, net, config_of(2), tmp_path)[0]
    resumed = on_threads(2, train, net, config_of(1), None, tmp_path)[0]
    count = len(resumed[1])
    assert 0 < count < STEPS
    assert resumed[1] == straight[1][-count:]
    assert resumed[0] == pytest.approx(straight[0][-count:], rel=1e-5)


def test_fp16_finds_eigenvalues_of_the_loss_itself() -> None:
    """A gradient that is not that of the scaled loss begins no pass, and no error."""
    config = config_of(1, fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 8})
    losses, seen = on_threads(1, train, net, config)[0]
    assert all(map(math.isfinite, losses))
    assert any(len(set(row[:3])) > 1 for row in seen)


def test_eigenvalues_are_logged_where_asked(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="polyaccel"):
        on_threads(1, train, net, config_of(0, eigenvalue={**EIGENVALUE, "verbose": True}))
    assert "eigenvalues of blocks in step 2" in caplog.text


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero_optimization": {"stage": 3}}, "eigenvalue.enabled"),
        ({"eigenvalue": {**EIGENVALUE, "layer_name": "layers"}}, "eigenvalue.layer_name"),
        ({"eigenvalue": {**EIGENVALUE, "layer_num": 4}}, "eigenvalue.layer_num"),
        ({"compression_training": {}}, "eigenvalue.enabled"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=net(), config={**config_of(0), **changes})
    assert key in [problem.key for problem in caught.value.problems]


def test_an_export_has_no_trace_of_it() -> None:
    model = polyaccel.init_compression(net(), config_of(0))
    polyaccel.redundancy_clean(model, config_of(0))
    assert not [name for name in model.state_dict() if "bit_pace" in name]
    assert len(model.blocks[0].fc.weight.unique()) <= 16
