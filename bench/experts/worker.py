"""One rank of `python -m bench experts`: worker.py VARIANT STEPS RESULT SIZES, with sizes as JSON.

A Mixtral of transformers, AdamW, clipping at 1.0, float32, the same batches for every variant. Each rank writes the
seconds and the CPU seconds of its steps, the seconds by phase, and its losses to RESULT.RANK. A variant of DeepSpeed
runs in that library's own environment, which has no polyaccel: whatever a variant needs is imported where it begins.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, logging

WARMUP = 3
WORDS = 4096
LR, CLIP, DECAY = 1e-3, 1.0, 0.01


class Trainer(ABC):
    """A model in training."""

    @abstractmethod
    def loss_of(self, words: Tensor) -> Tensor:
        """The loss of sequences (batch, length)."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Gradients."""

    @abstractmethod
    def update(self) -> None:
        """Clip them and update the parameters."""


class EngineTrainer(Trainer):
    """An engine of ours or of DeepSpeed's, whose calls are the same."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def loss_of(self, words: Tensor) -> Tensor:
        return self.engine(input_ids=words, labels=words).loss  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


class TorchTrainer(Trainer):
    """torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module) -> None:
        torch.distributed.init_process_group("gloo")
        self._model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def loss_of(self, words: Tensor) -> Tensor:
        return self._model(input_ids=words, labels=words).loss  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def main(argv: list[str]) -> None:
    """Train, and write what this rank measured; ours also the tokens' dispatches."""
    variant, steps, result, sizes = argv[0], int(argv[1]), argv[2], json.loads(argv[3])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    trainer = build(variant, model_of(sizes), sizes)
    found: dict[str, list[Any]] = {each: [] for each in ("seconds", "cpu", "forward", "backward", "update", "losses")}
    for step in range(WARMUP + steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        words = torch.randint(WORDS, (sizes["batch"], sizes["length"]), generator=generator)
        began, began_cpu = perf_counter(), _cpu_seconds()
        loss = trainer.loss_of(words)
        forward = perf_counter()
        trainer.backward(loss)
        backward = perf_counter()
        trainer.update()
        ended = perf_counter()
        found["losses"].append(loss.item())
        if step >= WARMUP:
            found["seconds"].append(ended - began)
            found["cpu"].append(_cpu_seconds() - began_cpu)
            found["forward"].append(forward - began)
            found["backward"].append(backward - forward)
            found["update"].append(ended - backward)
    if variant == "polyaccel, ep 2" and isinstance(trainer, EngineTrainer):
        found["dispatches"] = dispatches(trainer.engine, sizes, 4 * steps)
    Path(f"{result}.{rank}").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's process may abort or hang where gloo is taken down


def dispatches(engine: Any, sizes: dict[str, int], times: int) -> list[dict[str, Any]]:
    """For the sizes of the model, and for sixteen times as many bytes: `nbytes` of the rows, and of each time seconds
    and CPU seconds of telling how many rows travel (`told`), of the rows' way to their experts and back (`travelled`),
    of gathering them by expert, which is a part of that way (`gathered`), and of copying all of them twice in this
    process's own memory (`copied`), once for each way. Tokens choose two of the experts at random; experts put what
    they make where it is sent from."""
    from polyaccel.torch.experts.routing import route
    from polyaccel.torch.experts.token_dispatch import DispatchBuffers, plan_dispatch
    from polyaccel.torch.tensor_parallel.ranks import even_parts

    communicator = engine.runtime.process_group_for(("expert",))
    experts = sizes["experts"]
    found: list[dict[str, Any]] = []
    for longer, wider in ((1, 1), (8, 2)):
        tokens = longer * sizes["batch"] * sizes["length"]
        chosen = torch.rand(tokens, experts).topk(2, dim=1).indices
        routing = route(chosen, torch.ones(tokens, 2), experts)
        values, room = torch.randn(tokens, wider * sizes["hidden"]), DispatchBuffers(communicator)
        rows = values.index_select(0, routing.tokens)
        copies = torch.empty_like(rows), torch.empty_like(rows)
        taken: dict[str, list[tuple[float, ...]]] = {each: [] for each in ("told", "travelled", "gathered", "copied")}
        for _ in range(times):
            communicator.barrier()
            began = _now()
            plan = plan_dispatch(communicator, routing, even_parts(experts, communicator.world_size), room)
            told = _now()
            came = plan.dispatch(values, routing.tokens)
            arrived = _now()
            if plan.room is not None:
                came = plan.room.rows(len(came), came.shape[1], came.dtype).copy_(came)
            communicator.barrier()
            leaves = _now()
            back = plan.combine(came)
            travelled = _now()
            torch.index_select(values, 0, routing.tokens, out=copies[0])
            gathered = _now()
            copies[0].copy_(rows)
            copies[1].copy_(copies[0])
            copied = _now()
            taken["told"].append(_between(began, told))
            taken["travelled"].append(
                tuple(map(sum, zip(_between(told, arrived), _between(leaves, travelled), strict=True)))
            )
            taken["gathered"].append(_between(travelled, gathered))
            taken["copied"].append(_between(gathered, copied))
            if not torch.equal(back, rows):
                raise SystemExit("rows came back as others")
        found.append({"nbytes": rows.nbytes, **taken})
    return found


def _now() -> tuple[float, float]:
    return perf_counter(), thread_time()


def _between(earlier: tuple[float, float], later: tuple[float, float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in zip(earlier, later, strict=True))


def model_of(sizes: dict[str, int]) -> MixtralForCausalLM:
    """The same model on every rank and for every variant."""
    torch.manual_seed(1)
    shape: dict[str, Any] = {"hidden_size": sizes["hidden"], "intermediate_size": sizes["inner"]}
    shape |= {"num_hidden_layers": sizes["layers"], "num_attention_heads": 4, "num_key_value_heads": 4}
    config = MixtralConfig(
        vocab_size=WORDS,
        num_local_experts=sizes["experts"],
        num_experts_per_tok=2,
        max_position_embeddings=sizes["length"],
        use_cache=False,
        **shape,
    )
    model = MixtralForCausalLM(config)
    model.train()
    return model


def build(variant: str, model: MixtralForCausalLM, sizes: dict[str, int]) -> Trainer:
    """The trainer of a variant of `bench.experts.compare`."""
    if variant == "DDP":
        return TorchTrainer(model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes["batch"],
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": sizes["stage"]},
        "steps_per_print": 10**9,
    }
    ranks = 1 if variant.endswith("ep 1") else 2
    if variant.startswith("polyaccel"):
        import polyaccel

        config["expert_parallel"] = {"enabled": True, "autoep_size": ranks}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}
        return EngineTrainer(polyaccel.initialize(model=model, config=config)[0])
    return EngineTrainer(_deepspeed_engine(model, config, ranks))


def _deepspeed_engine(model: MixtralForCausalLM, config: dict[str, Any], ranks: int) -> Any:
    """DeepSpeed's engine around `model`, with layers of its `MoE` that have the model's values. The optimizer is
    torch's, because DeepSpeed compiles its own at the first start."""
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]

    deepspeed.init_distributed("gloo")
    from deepspeed.moe.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        split_params_into_different_moe_groups_for_optimizer,
    )

    rank = torch.distributed.get_rank()
    for layer in model.model.layers:
        layer.mlp = MoEBlock(layer.mlp, model.config, ranks, rank)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [one for one in model.parameters() if one.requires_grad], "name": "parameters"}
    )
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Expert(nn.Module):
    """An expert as Mixtral has it."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


class MoEBlock(nn.Module):
    """DeepSpeed's layer in place of Mixtral's block, with its values; no token is dropped."""

    def __init__(self, block: Any, config: Any, ranks: int, rank: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE  # type: ignore[import-not-found,import-untyped,unused-ignore]

        count = config.num_local_experts
        expert = Expert(config.hidden_size, config.intermediate_size)
        settings = {"num_experts": count, "ep_size": ranks, "k": config.num_experts_per_tok, "drop_tokens": False}
        self.moe = MoE(config.hidden_size, expert, top2_2nd_expert_sampling=False, **settings)
        own = self.moe.deepspeed_moe.experts.deepspeed_experts
        first = rank * len(own) if ranks > 1 else 0
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(block.gate.weight)
            for number, each in enumerate(own, first):
                each.gate_up.weight.copy_(block.experts.gate_up_proj[number])
                each.down.weight.copy_(block.experts.down_proj[number])

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.moe(hidden_states)[0]
        return out


def _cpu_seconds() -> float:
    used = getrusage(RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
