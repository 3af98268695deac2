"""A job for the tests: trains a small Llama of transformers under many settings, one after another, on this device.

Prints a line a setting: how far its losses are from plain torch's. Ends with 1 where one is wrong or fails. Arguments
are parts of names of settings; `--few` takes five of them.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import traceback
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyaccel

STEPS = 4
TYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
ADAMW = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
HOST: dict[str, Any] = {"device": "cpu", "pin_memory": True}
RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
COMPILED = ("cpu", "cuda", "xpu")
"""Devices that torch's compiler knows."""
TILES = {"tiled_compute": {"enabled": True}}


def build() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 400, "num_hidden_layers": 3, "vocab_size": 503}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends)).train()


def batches(device: Any) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(7)
    drawn = [torch.randint(3, 503, (2, length), generator=draws).to(device) for length in (65, 33, 64, 17)]
    return [{"input_ids": tokens, "labels": tokens, "use_cache": False} for tokens in drawn]


def plain(device: Any) -> list[float]:
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "betas": (0.9, 0.95)})
    losses = []
    for batch in batches(device)[:STEPS]:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(zero: dict[str, Any], changes: dict[str, Any], how: str) -> list[float]:
    """Return the losses. `how` is empty, `compile`, or `resume`, where another engine takes the last step."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": 0.5,
        **changes,
        "zero_optimization": {"reduce_bucket_size": 100_000, "stage3_param_persistence_threshold": 0, **zero},
    }
    engine, *_ = polyaccel.initialize(model=build(), config=config)
    if how == "compile":
        engine.compile()
    losses = []
    for step, batch in enumerate(batches(engine.device)[:STEPS]):
        if how == "resume" and step == STEPS - 1:
            with tempfile.TemporaryDirectory() as folder:
                engine.save_checkpoint(folder)
                engine.destroy()
                engine, *_ = polyaccel.initialize(model=build(), config=config)
                engine.load_checkpoint(folder)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def all_settings() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    found: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {}
    for stage in range(4):
        for name, types in TYPES.items():
            found[f"{stage}, {name}"] = ({"stage": stage}, types, "")
        found[f"{stage}, recomputed, bf16"] = ({"stage": stage}, {**RECOMPUTED, **TYPES["bf16"]}, "")
        found[f"{stage}, tiles, fp32"] = ({"stage": stage}, TILES, "")
        found[f"{stage}, resumed, bf16"] = ({"stage": stage}, TYPES["bf16"], "resume")
        found[f"{stage}, host, bf16"] = ({"stage": max(stage, 1), "offload_optimizer": HOST}, TYPES["bf16"], "")
    folder = tempfile.mkdtemp()
    files = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
    found["2, files, fp32"] = ({"stage": 2, "offload_optimizer": files}, {}, "")
    found["3, files, fp32"] = ({"stage": 3, "offload_optimizer": files, "offload_param": HOST}, {}, "")
    found["3, parameters in files, bf16"] = (
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}},
        TYPES["bf16"],
        "",
    )
    found["3, host, parameters, fp16"] = (
        {"stage": 3, **dict.fromkeys(("offload_optimizer", "offload_param"), HOST)},
        TYPES["fp16"],
        "",
    )
    found["3, 8 bits, bf16"] = ({"stage": 3, "zero_quantized_weights": True}, TYPES["bf16"], "")
    for stage in (0, 2, 3) if polyaccel.get_accelerator().torch_device_type in COMPILED else ():
        found[f"{stage}, compiled, fp32"] = ({"stage": stage}, {}, "compile")
    return found


def main() -> int:
    is_few, *chosen = "--few" in sys.argv, *(name for name in sys.argv[1:] if name != "--few")
    if is_few:
        chosen = ["3, bf16", "2, host", "2, files", "3, compiled", "3, tiles"]
    found: dict[str, Any] = {}
    for name, (zero, changes, how) in all_settings().items():
        if chosen and not any(part in name for part in chosen):
            continue
        try:
            found[name] = train(zero, changes, how)
        except Exception:
            found[name] = traceback.format_exc()
        gc.collect()
    device = polyaccel.get_accelerator().torch_device_type
    expected, failed = plain(device), 0
    for name, losses in found.items():
        if isinstance(losses, str):
            failed += 1
            print(f"FAILED {name}\n{losses}")
            continue
        off = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
        is_right = off <= (2e-5 if "fp32" in name else 2e-3)
        failed += not is_right
        print(f"{'right' if is_right else 'WRONG'} {name:28} losses off by {off:.1e}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
