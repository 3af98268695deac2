"""Linear layers in tiles, estimates of memory and rotated positions, beside plain torch and DeepSpeed's figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as at_3
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as at_2
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from deepspeed.sequence.layer import apply_rotary_pos_emb
from torch import nn


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (7, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiles_compute_what_the_whole_layer_does(rows: int, columns: int, bias: bool) -> None:
    whole = nn.Linear(11, 7, bias=bias)
    tiled = TiledLinear(11, 7, bias, columns, rows, init_linear=whole)
    x = torch.randn(4, 11)
    torch.testing.assert_close(tiled(x), whole(x))
    assert sum(one.numel() for one in tiled.parameters()) == sum(one.numel() for one in whole.parameters())
    tiled(x).square().sum().backward()
    whole(x).square().sum().backward()
    assert whole.weight.grad is not None
    torch.testing.assert_close(
        torch.cat([torch.cat([one.weight.grad for one in row], 1) for row in tiled.linears]), whole.weight.grad
    )


def test_tiles_take_and_give_parts() -> None:
    whole = nn.Linear(6, 4)
    tiled = TiledLinear(6, 4, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    tiled.copy_params_from(whole)
    x = torch.randn(3, 6)
    torch.testing.assert_close(torch.cat(tiled(x.split(3, -1)), -1), whole(x))
    for splits in ({"in_splits": 7}, {"out_splits": 0}):
        with pytest.raises(RuntimeError):
            TiledLinear(6, 4, **splits)
    with pytest.raises(RuntimeError):
        tiled(x.split(2, -1))


class ReturnsBias(nn.Linear):
    def forward(self, rows: torch.Tensor) -> Any:
        return rows @ self.weight.T, self.bias


def test_tiles_return_their_bias() -> None:
    whole = nn.Linear(6, 4)
    tiled = TiledLinearReturnBias(6, 4, in_splits=2, out_splits=3, linear_cls=ReturnsBias, init_linear=whole)
    output, bias = tiled(torch.ones(2, 6))
    torch.testing.assert_close(output + bias, whole(torch.ones(2, 6)))


def test_estimates_are_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """Of DeepSpeed 0.19.8, for 2,851 million parameters on two hosts of eight."""
    n, layer = 2_851_000_000, 32_000_000
    assert at_2(n, 8, 2) == (273_696_000_000, 5_702_000_000)
    assert at_2(n, 8, 2, False) == (136_848_000_000, 8_909_375_000)
    assert at_3(n, layer, 8, 2) == (38_488_500_000, 128_000_000, 128_000_000)
    assert at_3(n, layer, 8, 2, True, False, False) == (136_848_000_000, 484_375_000, 128_000_000)
    assert at_3(n, layer, 8, 2, False, False, True) == (1_536_000_000, 3_335_375_000, 128_000_000)
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    estimate_zero2_model_states_mem_needs_all_live(model, 4)
    estimate_zero3_model_states_mem_needs_all_live(model, 4)
    printed = capsys.readouterr().out
    assert printed.count("offload_optimizer=") == 8
    assert "325 parameters, 220 of them in the largest layer" in printed


def test_positions_are_rotated_by_halves() -> None:
    t, angles = torch.randn(5, 2, 6), torch.randn(5, 1, 2).repeat(1, 1, 2)
    found = apply_rotary_pos_emb(t, angles.cos(), angles.sin())
    turned = torch.complex(t[..., :2], t[..., 2:4]) * torch.polar(torch.ones(5, 1, 2), angles[..., :2])
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag, t[..., 4:]], -1))
