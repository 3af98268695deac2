"""Tiles by DeepSpeed's names, as scripts use them: a layer whose forward is replaced, a loss, any function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from hf_models import VOCABULARY, tiny
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import polyaccel
from polyaccel.comm.init.threads import run_threads
from polyaccel.errors import PolyaccelError


def hidden_of(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return found


class OwnLoss(nn.Module):
    """A model as the ALST guide has it: the MLP's forward is replaced, and the loss computed from hidden states."""

    def __init__(self, shards: int | None) -> None:
        super().__init__()
        self.inner = tiny("llama", dtype=torch.float32).train()
        self.shards = shards
        if shards is not None:
            for layer in self.inner.model.layers:
                layer.mlp.forward = self.tiled(layer.mlp, type(layer.mlp).forward)

    def tiled(self, mlp: nn.Module, forward: Any) -> Any:
        return lambda x: TiledMLP.apply(forward, mlp, x, self.shards, [mlp.down_proj.weight])

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = hidden_of(self.inner, ids)

        def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(model.inner.lm_head(x), y, reduction="sum")

        if self.shards is None:
            return loss_of(self, hidden.flatten(0, 1), targets.flatten()) / targets.numel()
        params = [self.inner.lm_head.weight]
        return (
            TiledFusedLogitsLoss.apply(loss_of, self, hidden, targets, None, self.shards, params, "sum")
            / targets.numel()
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_with_replaced_parts_trains_as_before(stage):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    ids = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))

    def losses(shards: int | None) -> list[float]:
        models = [OwnLoss(shards) for _ in range(2)]

        def run(communicator):
            engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=config)
            found = []
            for _ in range(3):
                before = engine.zero.reducer.passes
                loss = engine(ids, ids.roll(-1, 1))
                engine.backward(loss)
                assert engine.zero.reducer.passes == before + 1
                engine.step()
                found.append(loss.item())
            engine.destroy()
            return found

        return run_threads(2, run)[0]

    assert losses(4) == pytest.approx(losses(None), abs=2e-6)


@pytest.mark.parametrize("shards", [1, 3, 4])
@pytest.mark.parametrize(("dim", "reduction"), [(1, None), (1, "sum"), (0, "mean"), (0, "sum")])
@pytest.mark.parametrize("names_parameters", [False, True])
def test_any_function_is_computed_for_parts_of_the_tokens(shards, dim, reduction, names_parameters):
    layer = nn.Linear(6, 5)
    x = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(2)).requires_grad_(True)
    scale = torch.rand(2, 12, generator=torch.Generator().manual_seed(3))

    def function(hidden: Tensor, weights: Tensor, power: int) -> Tensor:
        out = (layer(hidden) * weights.unsqueeze(-1)) ** power
        assert out.shape[0] == 2
        return out.mean() if dim == 0 else out

    def found(out: Tensor) -> list[Tensor]:
        x.grad = None
        layer.zero_grad()
        out.sum().backward()
        grads = [out.detach(), x.grad, layer.weight.grad, layer.bias.grad]
        return [one.clone() for one in grads if one is not None]

    cut, passed = {"weights": scale, "hidden": x}, {"power": 2}
    parameters = list(layer.parameters()) if names_parameters else None
    mine = found(sequence_tiled_compute(function, 12, shards, cut, passed, "hidden", parameters, dim, reduction))
    plain = function(x, scale, 2)
    if dim == 0 and reduction == "sum":
        plain = plain * shards
    elif dim and reduction == "sum":
        plain = plain.sum()
    for one, other in zip(mine, found(plain), strict=True):
        torch.testing.assert_close(one, other)
    arguments = ["weights", "hidden"], ["power"], "hidden", parameters, dim, reduction, scale, x, 2
    torch.testing.assert_close(SequenceTiledCompute.apply(function, 12, shards, *arguments), mine[0])


def test_a_mask_is_cut_too_and_what_does_not_fit_is_refused():
    layer = nn.Linear(6, 5)
    x, y = torch.randn(2, 4, 6), torch.randint(5, (2, 4))
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])

    def loss_of(head: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (cross_entropy(head(x), y, reduction="none") * mask).sum()

    loss = TiledFusedLogitsLoss.apply(loss_of, layer, x, y, mask, 3, None, "sum")
    assert loss.item() == pytest.approx(loss_of(layer, x.flatten(0, 1), y.flatten(), mask.flatten()).item(), rel=1e-6)
    loss.backward()
    assert layer.weight.grad is not None
    with pytest.raises(PolyaccelError) as caught:
        TiledFusedLogitsLoss.apply(loss_of, layer, x, y[:1], None, 3, None, "sum")
    assert caught.value.value == [(2, 4, 6), (1, 4)]
    with pytest.raises(PolyaccelError) as caught:
        TiledFusedLogitsLoss.apply(loss_of, layer, x, y, None, 3, None, "max")
    assert caught.value.value == "max"
    assert "output_reduction" in str(caught.value)
