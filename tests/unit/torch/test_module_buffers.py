"""The types of module buffers."""

from __future__ import annotations

import torch
from torch import nn

from polyaccel.torch.params.specs import convert_buffers
from polyaccel.types import DType


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
