"""One rank of SFT by an engine of verl: `sft_job.py BACKEND MODEL OUT [STAGE]`. Rank 0 writes losses and weights."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cpu_platform  # noqa: F401 - before verl's engines
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import sft_loss

STEPS = 4
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def batch(step: int, rank: int) -> TensorDict:
    """Eight sequences of uneven lengths, whose second half is learned."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(6, 14, (8,), generator=generator).tolist()
    rows = [torch.randint(2, 64, (length,), generator=generator) for length in lengths]
    masks = [(torch.arange(length) >= length // 2).long() for length in lengths]
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    positions = nested([torch.arange(length) for length in lengths])
    fields = {"input_ids": nested(rows), "position_ids": positions, "loss_mask": nested(masks)}
    data = TensorDict(fields, batch_size=[8])
    settings: dict[str, Any] = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4, "temperature": 1.0}
    tu.assign_non_tensor(data, **settings, use_remove_padding=False, global_batch_size=16)
    return data


def continued(engine: Any, loss_of: Any, folder: str) -> list[float]:
    """The loss of a further step, and that of the same one after loading what was saved before it."""
    engine.save_checkpoint(folder)
    losses = []
    for _ in range(2):
        for step in (STEPS, STEPS + 1):
            with engine.train_mode():
                output = engine.train_batch(batch(step, dist.get_rank()), loss_of)
            engine.lr_scheduler_step()
        losses.append(sum(output["loss"]))
        engine.load_checkpoint(folder)
    return losses


def main(backend: str, model: str, out: str, stage: str = "3") -> None:
    dist.init_process_group("gloo")
    options: dict[str, Any] = {"use_torch_compile": False, "use_remove_padding": False, "mixed_precision": FP32}
    plain: dict[str, Any] = {
        "load_tokenizer": False,
        "use_remove_padding": False,
        "enable_gradient_checkpointing": False,
    }
    model_config = HFModelConfig(path=model, override_config={"attn_implementation": "eager"}, **plain)
    optimizer_config = FSDPOptimizerConfig(lr=1e-2, clip_grad=0.5, total_training_steps=8, lr_warmup_steps=2)
    kind: Any = FSDPEngineWithLMHead
    if backend == "polyaccel":
        from polyaccel_verl import PolyaccelEngineConfig
        from verl.workers.engine import EngineRegistry

        kind = EngineRegistry.get_engine_cls("language_model", "polyaccel")
        zero = {"stage": int(stage), "stage3_param_persistence_threshold": 0}
        engine_config: Any = PolyaccelEngineConfig(**options, polyaccel={"zero_optimization": zero})
    else:
        engine_config = FSDPEngineConfig(**options, strategy=backend)
    engine = kind(model_config, engine_config, optimizer_config, None)
    engine.initialize()
    found: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    loss_of = partial(sft_loss, config=None)
    for step in range(STEPS):
        with engine.train_mode():
            output = engine.train_batch(batch(step, dist.get_rank()), loss_of)
        found["losses"].append(sum(output["loss"]))
        found["norms"].append(output["metrics"]["grad_norm"])
        found["rates"].append(engine.lr_scheduler_step())
    with engine.eval_mode():
        output = engine.infer_batch(batch(99, dist.get_rank()), loss_of)
    found["evaluated"] = output["loss"]
    weights = {name: float(value.double().norm()) for name, value in engine.get_per_tensor_param()[0]}
    if backend == "polyaccel":
        found["again"] = continued(engine, loss_of, f"{out}.checkpoint")
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({**found, "weights": weights}), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
