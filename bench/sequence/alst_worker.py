"""One rank of DeepSpeed's ALST on the model of `python -m bench longest`: two steps on sequences of one length, and the
peak of this process's memory.

Usage, in an environment with DeepSpeed and transformers, on two ranks that have RANK, WORLD_SIZE and MASTER_ADDR:
alst_worker.py RESULT LENGTH. Its optimizer is torch's: DeepSpeed's own is compiled at the first start, which takes
minutes, and a start that is ended meanwhile leaves a lock that all later ones wait for.
"""

from __future__ import annotations

import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 2
WORDS = 32_000
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}


def main(result: str, length: int) -> None:
    """Train, and write what this rank needed to the file `result`."""
    losses, seconds = _train(length)
    found = {"peak": _peak_nbytes(), "loss": losses[-1], "seconds": seconds}
    Path(f"{result}.{os.environ['RANK']}").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # its process aborts or hangs where gloo is taken down


def _model(length: int) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "vocab_size": WORDS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": length}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.train()
    return model


def _ids(length: int) -> Tensor:
    return torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(2))


def _train(length: int) -> tuple[list[float], float]:
    """Long sequences as DeepSpeed's ALST guide has them: Ulysses, a tiled loss, tiled MLPs, recomputed layers."""
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        TiledFusedLogitsLoss,
        TiledMLP,
        UlyssesSPAttentionHF,
    )

    deepspeed.init_distributed("gloo")
    model = _model(length)
    model.config._attn_implementation = "sdpa"
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=1,
        seq_length=length,
        seq_length_is_variable=True,
    )
    for layer in model.model.layers:
        layer.mlp.forward = partial(_tiled_mlp, TiledMLP, layer.mlp, math.ceil(length / 2 / model.config.hidden_size))
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, mpu=mpu, config=CONFIG | {"sequence_parallel_size": 2})
    group, rank = mpu.get_sequence_parallel_group(), dist.get_rank()
    ids = _ids(length)
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    part = slice(rank * length // 2, (rank + 1) * length // 2)
    positions = torch.arange(length)[None]
    losses, seconds = [], 0.0
    for _ in range(STEPS):
        began = perf_counter()
        hidden = engine.module.model(input_ids=ids[:, part], position_ids=positions[:, part], use_cache=False)[0]
        head = engine.module.lm_head

        def loss_of(head: Any, x: Tensor, y: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(head(x).float(), y, ignore_index=-100, reduction="sum")

        own = targets[:, part]
        tiles = max(1, own.shape[1] * WORDS // (1 << 22))
        total = TiledFusedLogitsLoss.apply(loss_of, head, hidden, own, None, tiles, [head.weight], "sum")
        loss = total * 2 / (length - 1)
        shown = loss.detach().clone()
        dist.all_reduce(shown, group=group)
        engine.backward(loss)
        engine.step()
        losses.append(float(shown) / 2)
        seconds = perf_counter() - began
    return losses, seconds


def _tiled_mlp(tiled: Any, mlp: Any, tiles: int, x: Tensor) -> Tensor:
    out: Tensor = tiled.apply(type(mlp).forward, mlp, x, tiles, list(mlp.parameters()))
    return out


def _peak_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
