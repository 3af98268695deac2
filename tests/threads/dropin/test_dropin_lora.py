"""`deepspeed.linear` and LoRA fused by the engine, next to plain torch and PEFT."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.linear import LoRAConfig, OptimizedLinear, QuantizationConfig, init_lora
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from parity_models import make_config
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

peft = pytest.importorskip("peft")
RANK, ALPHA, STEPS = 2, 6.0, 3


class Plain(nn.Module):
    """LoRA by hand: the formula of the paper."""

    def __init__(self, weight: Tensor, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())

    def forward(self, x: Tensor) -> Tensor:
        added = functional.linear(functional.linear(x, self.first), self.second)
        return functional.linear(x, self.weight) + ALPHA / RANK * added


def layers(bits: int | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    of_bits = None if bits is None else QuantizationConfig(q_bits=bits, group_size=5)
    settings = {"lora_config": LoRAConfig(lora_r=RANK, lora_alpha=ALPHA), "quantization_config": of_bits}
    made = nn.Sequential(
        OptimizedLinear(12, 7, dtype=torch.float32, **settings),
        nn.Tanh(),
        OptimizedLinear(7, 4, dtype=torch.float32, **settings),
    )
    for part in made:
        if isinstance(part, LoRAOptimizedLinear):
            nn.init.normal_(part.lora_weight_2.weight, std=0.3)
    return made


def plain_twin(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(
        *(
            Plain(part.full_weight(), part.lora_weight_1.weight.data, part.lora_weight_2.weight.data)
            if isinstance(part, LoRAOptimizedLinear)
            else part
            for part in model
        )
    )


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_losses(model: nn.Module, ranks: int) -> list[float]:
    """Of rank 0, in one process."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batch(step, rank)).square().mean() for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        found.append(losses[0].item())
    return found


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_is_that_of_plain_torch(stage: int, bits: int | None) -> None:
    """A frozen weight in 4 or 8 bits rests as it is at every stage."""
    model = layers(bits)
    models = [copy.deepcopy(model) for _ in range(2)]
    frozen = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
    wanted = plain_losses(plain_twin(model), 2)

    def body(communicator: Communicator) -> list[float]:
        zero = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0} if stage else {}
        config = make_config(stage, zero=zero, gradient_clipping=0.0)
        engine = deepspeed.initialize(model=models[communicator.rank], config=config)[0]
        losses = []
        for step in range(STEPS):
            loss = engine(batch(step, communicator.rank)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    assert run_threads(2, body)[0] == pytest.approx(wanted, rel=1e-5)
    for name, one in models[1].named_parameters():
        if name in frozen:
            assert one.dtype is frozen[name].dtype
            assert torch.equal(one, frozen[name])
    assert len(frozen) == (2 if bits is None else 4)


def test_a_layer_computes_what_pefts_does() -> None:
    model = layers()
    base = nn.Sequential(nn.Linear(12, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False))
    twin: Any = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0", "2"]))
    with torch.no_grad():
        for index in (0, 2):
            ours: Any = model[index]
            theirs = twin.base_model.model[index]
            theirs.base_layer.weight.copy_(ours.weight)
            theirs.lora_A["default"].weight.copy_(ours.lora_weight_1.weight)
            theirs.lora_B["default"].weight.copy_(ours.lora_weight_2.weight)
    torch.testing.assert_close(model(batch(0, 0)), twin(batch(0, 0)), rtol=1e-6, atol=1e-6)
    engine = deepspeed.initialize(model=model, config=make_config(0, gradient_clipping=0.0))[0]
    engine.fuse_lora_weight()
    twin.merge_adapter()
    torch.testing.assert_close(engine(batch(1, 0)), twin(batch(1, 0)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("of_peft", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fusing_is_undone_bit_by_bit(dtype: str, of_peft: bool) -> None:
    model: Any = layers()
    if of_peft:
        base = nn.Sequential(nn.Linear(12, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False))
        settings = peft.LoraConfig(r=RANK, init_lora_weights=False, target_modules=["0", "2"])
        model = peft.get_peft_model(base, settings)
    keys: dict[str, Any] = {} if dtype == "fp32" else {"bf16": {"enabled": True}}
    engine = deepspeed.initialize(model=model, config=make_config(2, gradient_clipping=0.0, **keys))[0]
    x = batch(0, 0).to(next(model.parameters()).dtype)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    apart = engine(x)
    for _ in range(2):
        engine.fuse_lora_weight()
        engine.fuse_lora_weight()
        torch.testing.assert_close(engine(x), apart, rtol=5e-2, atol=5e-2) if dtype == "bf16" else (
            torch.testing.assert_close(engine(x), apart, rtol=1e-5, atol=1e-6)
        )
        changed = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
        assert len(changed) == 2
        for refused in (lambda: engine.backward(apart.mean()), lambda: engine.save_checkpoint("nowhere")):
            with pytest.raises(PolyaccelError):
                refused()
        engine.unfuse_lora_weight()
        engine.unfuse_lora_weight()
        assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())
    engine.backward(engine(x).square().mean())
    engine.step()
    assert sum(not torch.equal(one, before[name]) for name, one in model.named_parameters()) == 4


def test_sharded_weights_are_not_fused() -> None:
    engine = deepspeed.initialize(model=layers(), config=make_config(3, gradient_clipping=0.0))[0]
    with pytest.raises(PolyaccelError) as caught:
        engine.fuse_lora_weight()
    assert caught.value.value == 3


def test_weights_of_plain_layers_are_loaded() -> None:
    """Rounded under a config of quantisation; and by plain layers where `target_mods` does not name them."""
    plain = nn.ModuleDict({"q_proj": nn.Linear(12, 8, bias=False), "head": nn.Linear(12, 3, bias=False)})
    for of_bits, bound in (
        (None, 1e-6),
        (QuantizationConfig(group_size=4), 0.02),
        (QuantizationConfig(q_bits=4, group_size=4), 0.3),
    ):
        config = LoRAConfig(lora_r=RANK, delay_lora_init=True)
        sizes = {"q_proj": 8, "head": 3}
        model = nn.ModuleDict(
            {
                name: OptimizedLinear(12, size, lora_config=config, quantization_config=of_bits, dtype=torch.float32)
                for name, size in sizes.items()
            }
        )
        with pytest.raises(PolyaccelError):
            model["q_proj"](batch(0, 0))
        model.load_state_dict(plain.state_dict(), strict=True)
        init_lora(model)
        assert sorted(name for name, one in model.named_parameters() if one.requires_grad) == [
            "q_proj.lora_weight_1.weight",
            "q_proj.lora_weight_2.weight",
        ]
        assert torch.equal(model["head"](batch(0, 0)), plain["head"](batch(0, 0)))
        error = (model["q_proj"](batch(0, 0)) - plain["q_proj"](batch(0, 0))).abs().max()
        assert error < bound
        copied = copy.deepcopy(model)
        copied.load_state_dict(model.state_dict())
        assert torch.equal(copied["q_proj"](batch(0, 0)), model["q_proj"](batch(0, 0)))


def test_what_there_is_not_is_refused() -> None:
    assert type(OptimizedLinear(3, 2, bias=True)) is nn.Linear
    for wrong in (
        {"quantization_config": QuantizationConfig(q_bits=6)},
        {"lora_config": LoRAConfig(), "quantization_config": QuantizationConfig(q_bits=6)},
    ):
        with pytest.raises(PolyaccelError):
            OptimizedLinear(3, 2, **wrong)
