"""The types of module buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import polyaccel
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError
from polyaccel.torch.sharding.specs import convert_buffers


def _model() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3)))


def test_floating_buffers_change_and_counters_do_not() -> None:
    model = _model()
    convert_buffers(model, DType.BFLOAT16, ())
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        "0.running_mean": torch.bfloat16,
        "0.running_var": torch.bfloat16,
        "0.num_batches_tracked": torch.int64,
        "1.0.running_mean": torch.bfloat16,
        "1.0.running_var": torch.bfloat16,
        "1.0.num_batches_tracked": torch.int64,
    }


def test_without_a_type_nothing_changes() -> None:
    model = _model()
    convert_buffers(model, None, None)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}


def test_named_modules_and_what_is_in_them_keep_their_type() -> None:
    model = _model()
    convert_buffers(model, DType.BFLOAT16, ("1",))
    assert model[0].running_mean.dtype is torch.bfloat16
    assert model[1][0].running_mean.dtype is torch.float32


def test_auto_asks_the_model() -> None:
    model = _model()
    model._keep_in_fp32_modules = ["1"]  # type: ignore[assignment]
    convert_buffers(model, DType.FLOAT16, None)
    assert model[0].running_mean.dtype is torch.float16
    assert model[1][0].running_mean.dtype is torch.float32


class Writing(nn.Module):
    """A layer that computes with its buffers in one way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("outer", torch.ones(4, 4), persistent=False)
        if kind == "spectral norm":
            self.linear = spectral_norm(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        seen = hidden.detach()
        if self.kind == "moving average":
            self.mean.lerp_(seen.mean(0), 0.1)
        elif self.kind == "covariance":
            self.outer.addmm_(seen.T, seen)
        elif self.kind == "product":
            hidden = hidden @ self.outer
        return hidden


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4), Writing(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x)).square().mean()


def trained(kind: str, precision: str, x: torch.Tensor, **more: object) -> torch.Tensor:
    config = {"train_batch_size": 4, precision: {"enabled": True}, "optimizer": {"type": "AdamW"}, **more}
    engine, *_ = polyaccel.initialize(model=Around(kind), config=config)
    try:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        return loss
    finally:
        engine.destroy()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("moving average", "inner.mean"),
        ("covariance", "inner.mean"),
        ("product", "inner.mean"),
        ("spectral norm", "inner.linear.parametrizations.weight.0._u"),
    ],
)
def test_types_that_do_not_fit_name_the_buffers_and_the_key_that_helps(kind: str, name: str, precision: str) -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)
    with pytest.raises(PolyaccelError) as caught:
        trained(kind, precision, x)
    assert caught.value.value == name
    assert "buffer_dtype" in caught.value.hint
    assert trained(kind, precision, x, data_types={"buffer_dtype": precision}).isfinite()


def test_inputs_of_another_type_are_no_matter_of_buffers() -> None:
    """The linear layer that refuses them has none."""
    with pytest.raises(RuntimeError) as caught:
        trained("none", "bf16", torch.randn(4, 4))
    assert "dtype" in str(caught.value)
