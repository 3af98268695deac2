"""Step of a mixture of experts on two ranks: polyaccel with experts over both ranks and on each, DDP, DeepSpeed.

A Mixtral of transformers, AdamW, clipping at 1.0, fp32, the same batches for every variant. A second table has the
dispatch of rows to their experts and back, without gathering them by expert, which one rank does too. Its seconds
include the wait for the other rank, its CPU seconds do not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from bench.measure import measured
from bench.runner import (
    DEEPSPEED,
    MIB,
    Case,
    Column,
    Found,
    Option,
    Runs,
    Settings,
    Start,
    deepspeed_start,
    losses_off,
    ms,
    speed,
    table,
)

WORDS = 4096
_WARMUP = 3
_OURS = "polyaccel ep2"
_NEAR = 1e-3
_ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launch of each variant."""
    torchrun = Start(launcher="torchrun")
    return {"DDP": torchrun, _OURS: Start(), "polyaccel ep1": Start(), "DeepSpeed ep2": deepspeed_start(args)}


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns of steps."""
    phases: dict[str, Column] = {name: ms(name) for name in ("forward", "backward", "update")}
    return {
        "median ms": ms(),
        "least ms": ms(best=True),
        "CPU ms": ms("cpu"),
        "x ours": lambda own, found: _times(own, found, "seconds"),
        "x in CPU": lambda own, found: _times(own, found, "cpu"),
        **phases,
        "loss off by": lambda own, found: f"{losses_off(own, next(iter(found.values()))):.0e}",
    }


def _times(own: Runs, found: Found, name: str) -> str:
    return f"{1 / float(text):.2f}" if (text := speed(_OURS, name)(own, found)) != "-" else "-"


def is_wrong(own: Runs, found: Found) -> bool:
    """Return whether a loss differs from DDP's."""
    return losses_off(own, next(iter(found.values()))) > _NEAR


def dispatch_table(found: Found) -> tuple[str, bool]:
    """Print the medians of dispatches over all launches."""
    runs = [ranks[0]["dispatches"] for ranks in found[_OURS].rounds.values()] if _OURS in found else []
    rows = []
    for of_size in zip(*runs, strict=True):
        path, gather, copies, counts = (
            [1e6 * median(one[clock] for run in of_size for one in run[name]) for clock in (0, 1)]
            for name in ("path", "gather", "copies", "counts")
        )
        path = [whole - part for whole, part in zip(path, gather, strict=True)]
        cells = [f"{seconds:.0f} ({cpu:.0f})" for seconds, cpu in (path, gather, copies)]
        ratios = [f"{whole / part:.1f}" for whole, part in zip(path, copies, strict=True)]
        rows.append((f"{of_size[0]['nbytes'] / MIB:.3g} MiB", *cells, *ratios, f"{counts[0]:.0f} ({counts[1]:.0f})"))
    names = ("rows of", "there and back", "gathered", "two copies", "times copies", "in CPU", "exchange of counts")
    table("Rows to their experts and back; us (CPU us)", names, rows)
    return "", False


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train the mixture; return the figures of `measured`, phases and dispatches."""
    from transformers import logging

    from bench.training import random_words

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    trainer, rank = build(variant, s), int(os.environ["RANK"])
    shape = s["batch"], s["length"]
    figures = measured(lambda step: trainer.step(random_words(shape, WORDS, 100 * step + rank)), s["steps"], _WARMUP)
    figures |= {name: times[_WARMUP:] for name, times in trainer.phases.items()}
    if variant == _OURS:
        figures["dispatches"] = dispatches(trainer.subject, s, 4 * s["steps"])
    return figures


def dispatches(engine: Any, s: Settings, times: int) -> list[dict[str, Any]]:
    """Return seconds and CPU seconds of the parts of a dispatch, for the model's rows and for 16 times as many bytes.

    `counts` is the exchange of how many rows each rank sends, `path` the way of rows to their experts and back,
    `gather` the part of it that gathers them by expert, `copies` two copies of all rows in this process's memory.
    """
    import torch

    from polyaccel.torch.experts.routing import route
    from polyaccel.torch.experts.token_dispatch import DispatchBuffers, plan_dispatch
    from polyaccel.torch.tensor_parallel.ranks import even_parts

    communicator, experts = engine.runtime.process_group_for(("expert",)), s["experts"]
    parts = even_parts(experts, communicator.world_size)
    found: list[dict[str, Any]] = []
    for longer, wider in ((1, 1), (8, 2)):
        tokens = longer * s["batch"] * s["length"]
        routing = route(torch.rand(tokens, experts).topk(2, dim=1).indices, torch.ones(tokens, 2), experts)
        values, buffers = torch.randn(tokens, wider * s["hidden"]), DispatchBuffers(communicator)
        rows = values.index_select(0, routing.tokens)
        copies = torch.empty_like(rows), torch.empty_like(rows)
        taken: dict[str, list[list[float]]] = {name: [] for name in ("counts", "path", "gather", "copies")}
        for _ in range(times):
            communicator.barrier()
            began = _now()
            plan = plan_dispatch(communicator, routing, parts, buffers)
            planned = _now()
            came = plan.dispatch(values, routing.tokens)
            arrived = _now()
            if plan.room is not None:
                came = plan.room.rows(len(came), came.shape[1], came.dtype).copy_(came)
            communicator.barrier()
            leaves = _now()
            back = plan.combine(came)
            returned = _now()
            torch.index_select(values, 0, routing.tokens, out=copies[0])
            gathered = _now()
            copies[0].copy_(rows)
            copies[1].copy_(copies[0])
            there, again = _between(planned, arrived), _between(leaves, returned)
            taken["counts"].append(_between(began, planned))
            taken["path"].append([a + b for a, b in zip(there, again, strict=True)])
            taken["gather"].append(_between(returned, gathered))
            taken["copies"].append(_between(gathered, _now()))
            if not torch.equal(back, rows):
                raise SystemExit("rows came back with other values")
        found.append({"nbytes": rows.nbytes, **taken})
    return found


def _now() -> tuple[float, float]:
    return perf_counter(), thread_time()


def _between(earlier: tuple[float, float], later: tuple[float, float]) -> list[float]:
    return [b - a for a, b in zip(earlier, later, strict=True)]


def build(variant: str, s: Settings) -> Any:
    """Return the trainer of a variant; the model is the same on every rank."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    from bench.training import engine_trainer, torch_trainer, transformers_loss

    torch.manual_seed(1)
    shape: dict[str, Any] = {"hidden_size": s["hidden"], "intermediate_size": s["inner"], "vocab_size": WORDS}
    shape |= {"num_hidden_layers": s["layers"], "num_attention_heads": 4, "num_key_value_heads": 4}
    shape |= {"num_local_experts": s["experts"], "num_experts_per_tok": 2, "max_position_embeddings": s["length"]}
    model: Any = MixtralForCausalLM(MixtralConfig(**shape)).train()
    if variant == "DDP":
        torch.distributed.init_process_group("gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return torch_trainer(wrapped, transformers_loss(wrapped), **_ADAMW)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": s["batch"],
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": s["stage"]},
        "steps_per_print": 10**9,
    }
    ranks = int(variant[-1])
    if variant.startswith("polyaccel"):
        import polyaccel

        config["expert_parallel"] = {"enabled": True, "autoep_size": ranks}
        config["optimizer"] = {"type": "AdamW", "params": _ADAMW}
        engine: Any = polyaccel.initialize(model=model, config=config)[0]
    else:
        engine = _deepspeed_engine(model, config, ranks)
    return engine_trainer(engine, transformers_loss(engine))


def _deepspeed_engine(model: Any, config: dict[str, Any], ranks: int) -> Any:
    """Return DeepSpeed's engine around `model`, with layers of its `MoE` that have the model's values.

    The optimizer is torch's, because DeepSpeed compiles its own at the first start.
    """
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import torch

    deepspeed.init_distributed("gloo")
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from deepspeed.moe.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        split_params_into_different_moe_groups_for_optimizer as split,
    )
    from torch import Tensor, nn

    class Expert(nn.Module):
        """Expert of Mixtral."""

        def __init__(self, hidden: int, inner: int) -> None:
            super().__init__()
            self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
            self.down = nn.Linear(inner, hidden, bias=False)

        def forward(self, rows: Tensor) -> Tensor:
            gate, up = self.gate_up(rows).chunk(2, dim=-1)
            return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]

    class MoEBlock(nn.Module):
        """DeepSpeed's layer in place of Mixtral's block, with its values; no token is dropped."""

        def __init__(self, block: Any, shape: Any, rank: int) -> None:
            super().__init__()
            settings = {"num_experts": shape.num_local_experts, "ep_size": ranks, "k": shape.num_experts_per_tok}
            expert = Expert(shape.hidden_size, shape.intermediate_size)
            kinds = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
            self.moe = MoE(shape.hidden_size, expert, **settings, **kinds)
            own = self.moe.deepspeed_moe.experts.deepspeed_experts
            with torch.no_grad():
                self.moe.deepspeed_moe.gate.wg.weight.copy_(block.gate.weight)
                for number, each in enumerate(own, rank * len(own) if ranks > 1 else 0):
                    each.gate_up.weight.copy_(block.experts.gate_up_proj[number])
                    each.down.weight.copy_(block.experts.down_proj[number])

        def forward(self, hidden_states: Tensor) -> Tensor:
            out: Tensor = self.moe(hidden_states)[0]
            return out

    for layer in model.model.layers:
        layer.mlp = MoEBlock(layer.mlp, model.config, torch.distributed.get_rank())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(split({"params": trained, "name": "parameters"}), fused=True, **_ADAMW)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


CASES = {
    "experts": Case(
        "experts",
        __doc__ or "",
        {
            "steps": Option(10, "measured in each launch"),
            "hidden": Option(256, "features of a token"),
            "inner": Option(512, "features of an expert"),
            "layers": Option(4, "blocks"),
            "experts": Option(16, "experts of a layer, two a token"),
            "length": Option(512, "tokens of a sequence"),
            "batch": Option(1, "sequences a rank"),
            "stage": Option(1, "ZeRO stage, except for DDP", range(4)),
            "deepspeed": DEEPSPEED,
        },
        variants,
        columns,
        "Mixture: hidden {hidden}, inner {inner}, {layers} x {experts} experts, {batch} x {length}, stage {stage}",
        is_wrong=is_wrong,
        verdict=dispatch_table,
    )
}
