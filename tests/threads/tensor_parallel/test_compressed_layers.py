"""Compressed layers on tensor ranks: the masks, levels and losses of one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity_models import make_config
from torch import nn
from transformer_models import trained_by, transformer_model

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.compression.layers import compressed_layers

Section = dict[str, Any]
LINEARS = {"llama": [r"layers\."], "gpt2": [r"h\."], "t5": [r"block\."]}
WIDE = {"llama": ("up_proj", ["down_proj", "gate_proj"]), "gpt2": ("c_fc", ["mlp.c_proj"]), "t5": ("wi_0", [r"\.wo$"])}
HEADS = {"gpt2": (r"attn\.c_proj", 7, None), "t5": (r"SelfAttention\.o$", 5, [r"SelfAttention\.v$"])}


def shared(**keys: Any) -> Section:
    return {"enabled": True, "schedule_offset": 1, **keys}


def weights(kind: str, bits: int, groups: int, **keys: Any) -> Section:
    params = {"start_bits": bits, "target_bits": bits, "quantization_period": 0}
    rules = {"a": {"params": params, "modules": [*LINEARS[kind], "embed", "wte", "^shared"]}}
    rules["a"]["modules"] = [one for one in rules["a"]["modules"]]
    return {
        "weight_quantization": {"shared_parameters": shared(quantize_groups=groups, **keys), "different_groups": rules}
    }


def inputs(kind: str, calibration: str, how: str) -> Section:
    keys = shared(range_calibration=calibration, quantization_type=how)
    rules = {"a": {"params": {"bits": 8}, "modules": LINEARS[kind]}}
    return {"activation_quantization": {"shared_parameters": keys, "different_groups": rules}}


def sparse(kind: str, method: str, **keys: Any) -> Section:
    if method == "snip_momentum":
        keys |= {"dense_ratio": 0.5, "schedule_offset_stride": 1, "schedule_offset_end": 2, "block_pattern": "1x1"}
        return {"sparse_pruning": {"shared_parameters": shared(method=method, **keys)}}
    rules = {"a": {"params": {"dense_ratio": 0.5}, "modules": LINEARS[kind]}}
    return {"sparse_pruning": {"shared_parameters": shared(method=method), "different_groups": rules}}


def rows(kind: str, method: str) -> Section:
    module, related = WIDE[kind]
    rules = {"a": {"params": {"dense_ratio": 0.6}, "modules": [module], "related_modules": [related]}}
    return {"row_pruning": {"shared_parameters": shared(method=method), "different_groups": rules}}


def heads(kind: str) -> Section:
    module, count, related = HEADS[kind]
    rules = {"a": {"params": {"dense_ratio": 0.6}, "modules": [module], "related_modules": [related or []]}}
    keys = shared(method="topk", num_heads=count)
    return {"head_pruning": {"shared_parameters": keys, "different_groups": rules}}


SECTIONS: dict[str, tuple[str, Section]] = {
    "weights": ("llama", weights("llama", 4, 2)),
    "asymmetric": ("gpt2", weights("gpt2", 6, 7, quantization_type="asymmetric")),
    "ternary": ("t5", weights("t5", 2, 1)),
    "dynamic": ("llama", inputs("llama", "dynamic", "asymmetric")),
    "static": ("gpt2", inputs("gpt2", "static", "symmetric")),
    "sparse": ("gpt2", sparse("gpt2", "l1")),
    "learned": ("llama", sparse("llama", "topk")),
    "rows": ("llama", rows("llama", "l1")),
    "learned rows": ("gpt2", rows("gpt2", "topk")),
    "heads": ("gpt2", heads("gpt2")),
    "all": (
        "t5",
        {**weights("t5", 8, 2), **inputs("t5", "static", "asymmetric"), **sparse("t5", "l1"), **rows("t5", "topk")},
    ),
}


def config_of(section: Section, stage: int, **keys: Any) -> Any:
    adamw = {"type": "AdamW", "params": {"lr": 2e-3}}
    return make_config(stage, optimizer=adamw, gradient_clipping=1.0, compression_training=section, **keys)


def train(kind: str, section: Section, stage: int, data: int, tensor: int, **keys: Any) -> list[Any]:
    """The losses and norms, masks and whole parameters of each rank."""
    copies = [transformer_model(kind) for _ in range(data * tensor)]
    config = config_of(section, stage, **({"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}), **keys)

    def run(communicator: Any) -> Any:
        model = copies[communicator.rank]
        engine, *_ = polyaccel.initialize(model=model, config=config)
        found = trained_by(engine, kind, communicator.rank // tensor)
        state = {name: one.clone() for name, one in engine.module_state_dict().items()}
        engine.destroy()
        return *found, state

    return run_threads(data * tensor, run)


@pytest.mark.parametrize(
    ("name", "stage", "data", "tensor"),
    [
        ("weights", 0, 1, 2),
        ("asymmetric", 2, 2, 2),
        ("ternary", 3, 1, 2),
        ("dynamic", 1, 1, 3),
        ("static", 3, 2, 2),
        ("sparse", 3, 1, 2),
        ("learned", 2, 1, 2),
        ("rows", 1, 1, 3),
        ("learned rows", 3, 1, 2),
        ("heads", 0, 1, 2),
        ("all", 3, 1, 2),
    ],
)
def test_tensor_ranks_compute_what_one_rank_does(name: str, stage: int, data: int, tensor: int) -> None:
    kind, section = SECTIONS[name]
    plain = train(kind, section, 0, data, 1)
    for rank, (losses, norms, state) in enumerate(train(kind, section, stage, data, tensor)):
        wanted, of_norms, of_one = plain[rank // tensor]
        print(name, losses, wanted, norms, of_norms)
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert norms == pytest.approx(of_norms, rel=2e-3)
        assert state.keys() == of_one.keys()
        for key, values in state.items():
            if key.endswith("_mask"):
                assert torch.equal(values, of_one[key]), key
