"""Step time, memory and correctness of polyaccel, DDP, FSDP2 and DeepSpeed, on one host and between two.

*tax* is the step over `local`'s of the same round, minus one, where `local` is the same compute in all ranks at once
without communication. `pa2-flat` communicates by gloo only, also inside a host; `pa3q` gathers in 8 and reduces in 4
bits (ZeRO++).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import inf, isfinite
from statistics import fmean, median
from typing import Any

from bench.measure import measured, read_memory
from bench.runner import MIB, Case, Column, Found, Option, Runs, Settings, Start, losses_off, mib
from bench.sizes import SEQUENCE, SHAPES

LOSS_TOLERANCE = 1e-4
"""How far fp32 losses may be from DDP's, in nats, at any step. At 126 M parameters DDP's own are up to 3.2e-5 from
those of float64 in the first steps, where the loss jumps; the engine's are within 5e-7."""
LOCAL_STATE_NBYTES = {"fp32": 16, "bf16": 18}
"""Bytes a parameter of plain AdamW: the parameter, its gradient and two states, all fp32, and under autocast the weight
in bf16, which backward needs too. The engines compute with the parameters that they have."""
VARIANTS = (
    *("local", "ddp", "fsdp2", "pa0", "pa1", "pa2", "pa3", "ds0", "ds1", "ds2", "ds3"),
    *("pa3q", "pa1-flat", "pa2-flat", "pa3-flat", "pa3q-flat"),
)
_LINKS = ("10gbit", "1gbit")
_QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return all variants; DeepSpeed's are absent without it."""
    has_deepspeed = find_spec("deepspeed") is not None
    return {
        name: "deepspeed is not installed"
        if name.startswith("ds") and not has_deepspeed
        else Start(environ={"POLYACCEL_COMM": "gloo"} if name.endswith("-flat") else {})
        for name in VARIANTS
    }


def settings(args: argparse.Namespace) -> list[Settings]:
    """Return a table of each number of ranks, type and micro-batch."""
    own = {"size": args.size, "steps": args.steps, "warmup": args.warmup}
    ways = [(ranks, dtype, batch) for ranks in args.ranks for dtype in args.dtype for batch in args.micro_batch]
    return [{**own, "ranks": ranks, "dtype": dtype, "micro_batch": batch} for ranks, dtype, batch in ways]


def host_settings(args: argparse.Namespace) -> list[Settings]:
    """Return a table of each number of ranks a host and link."""
    own = {"size": args.size, "steps": args.steps, "warmup": args.warmup, "dtype": "fp32"}
    own |= {"micro_batch": args.micro_batch}
    return [{**own, "slots": slots, "ranks": 2 * slots, "link": link} for slots in args.slots for link in args.links]


@contextmanager
def two_hosts(args: argparse.Namespace) -> Iterator[Any]:
    """Bring up two hosts."""
    from bench.network import brought_up

    with brought_up(2) as hosts:
        yield hosts


def between_hosts(settings: Settings, start: Start, hosts: Any) -> Start | None:
    """Limit the link, and return the start of a variant over both hosts. A host with one rank has no flat variants."""
    if settings["slots"] == 1 and start.environ:
        return None
    hosts.limit(settings["link"])
    environ = {"GLOO_SOCKET_IFNAME": "eth0", **start.environ}
    return replace(start, ranks=settings["ranks"], options=tuple(hosts.options(settings["slots"], environ)))


def is_wrong(own: Runs, found: Found) -> bool:
    """Return whether losses are not finite, or in fp32 differ from the reference's."""
    is_exact = own.settings["dtype"] == "fp32" and "q" not in own.variant  # bf16 policies differ, so their losses do
    limit = LOSS_TOLERANCE if is_exact else inf
    all_finite = all(isfinite(loss) for losses in own.losses() for loss in losses)
    return not all_finite or (deviation(own, found) or 0.0) > limit


def deviation(own: Runs, found: Found) -> float | None:
    """Return the largest distance from the losses of DDP, or of the first variant that communicates.

    None for a single run of the reference itself. `local` is compared in the first loss, before any update.
    """
    base = next((found[name] for name in ("ddp", *found) if name in found and name != "local"), None)
    if base is None or (base is own and len(own.rounds) == 1):
        return None
    return losses_off(own, base, 1 if own.variant == "local" else None)


def tax(own: Runs, found: Found) -> float | None:
    """Return the median over rounds of the step over `local`'s of the same round, minus one."""
    local = found.get("local")
    if local is None or own is local:
        return None
    both = sorted(own.rounds.keys() & local.rounds.keys())
    pairs = [[median(_means(ranks, "seconds")) for ranks in (own.rounds[turn], local.rounds[turn])] for turn in both]
    return median(ours / theirs for ours, theirs in pairs) - 1 if pairs else None


def _means(ranks: list[Any], name: str) -> list[float]:
    return [fmean(step) for step in zip(*(rank[name] for rank in ranks), strict=True)]


def columns(settings: Settings) -> Mapping[str, Column]:
    """Return the columns of times."""
    tokens = settings["micro_batch"] * SEQUENCE * settings["ranks"]
    return {
        "step s": lambda own, found: f"{median(own.means('seconds')):.4f}",
        "min s": lambda own, found: f"{min(own.means('seconds')):.4f}",
        "CPU s": lambda own, found: f"{fmean(own.means('cpu')):.4f}",
        "tokens/s": lambda own, found: f"{tokens / median(own.means('seconds')):.0f}",
        "tax": lambda own, found: "-" if (value := tax(own, found)) is None else f"{100 * value:+.0f} %",
        "peak MiB": mib("peak"),
        "PSS MiB": mib("pss"),
        "faults": lambda own, found: f"{median(own.means('faults')):.0f}",
        "loss off by": lambda own, found: "-" if (value := deviation(own, found)) is None else f"{value:.1e}",
    }


def memory_columns(settings: Settings) -> Mapping[str, Column]:
    """Return the columns of peaks next to the formula of `polyaccel.zero.plan.memory`.

    Expected is the process before it had a model, the states by the formula, and the rest (activations, the
    framework's memory) of `local`, plain torch without communication.
    """
    local_nbytes = LOCAL_STATE_NBYTES[settings["dtype"]]

    def states(own: Runs) -> float | None:
        if own.variant == "local":
            return float(local_nbytes * own.values("params")[0])
        estimate = own.values("estimate")[0]
        return sum(estimate.values()) if estimate else None

    def rest(found: Found) -> float | None:
        local = found.get("local")
        return None if local is None else mean(local, "peak") - mean(local, "base") - (states(local) or 0.0)

    def expected(own: Runs, found: Found) -> float | None:
        needs = states(own), rest(found)
        return None if needs[0] is None or needs[1] is None else mean(own, "base") + needs[0] + needs[1]

    def difference(own: Runs, found: Found) -> str:
        wanted = expected(own, found)
        return "-" if wanted is None else f"{100 * (mean(own, 'peak') / wanted - 1):+.1f} %"

    return {
        "base": lambda own, found: shown(mean(own, "base")),
        "states by formula": lambda own, found: shown(states(own)),
        "rest": lambda own, found: shown(rest(found) if states(own) is not None else None),
        "expected": lambda own, found: shown(expected(own, found)),
        "measured": lambda own, found: shown(mean(own, "peak")),
        "difference": difference,
        "PSS": lambda own, found: shown(mean(own, "pss")),
    }


def mean(own: Runs, name: str) -> float:
    """Return the mean of a figure over ranks and rounds."""
    return fmean(own.values(name))


def shown(nbytes: float | None) -> str:
    """Format bytes as MiB."""
    return "-" if nbytes is None else f"{nbytes / MIB:.0f}"


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train the GPT by a variant; return the figures of `measured`, memory and the estimate."""
    import torch.distributed as dist

    from bench.training import Gpt, draw_batch, load_corpus

    dist.init_process_group("gloo")
    library = load_library(variant)
    corpus, rank = load_corpus(), dist.get_rank()
    base = read_memory()["VmRSS"]
    model = Gpt(s["size"])
    params = sum(parameter.numel() for parameter in model.parameters())
    trainer = build_trainer(variant, s, model, library)
    del model  # FSDP2 and the engines hold what they need of it
    dist.barrier()
    batch = partial(draw_batch, corpus, rank=rank, micro_batch=s["micro_batch"])
    figures = measured(lambda step: trainer.step(*batch(step)), s["steps"], s["warmup"])
    dist.barrier()  # PSS divides pages by the processes that have them now
    estimate = None
    if variant.startswith("pa"):
        from polyaccel.zero.plan.memory import estimate_memory

        rows = estimate_memory(trainer.subject.zero.plan).rows
        estimate = {row.purpose.value: row.nbytes for row in rows}
    pss = read_memory()["Pss"]
    dist.barrier()
    return {**figures, **trainer.phases, "base": base, "params": params, "estimate": estimate, "pss": pss}


def load_library(variant: str) -> Any:
    """Import and join the library of a variant; None for plain torch. Imports are not part of a model's memory."""
    if variant.startswith("pa"):
        polyaccel = import_module("polyaccel")
        polyaccel.init_distributed()
        import_module("polyaccel.torch.initialize")
        return polyaccel
    if variant.startswith("ds"):
        deepspeed = import_module("deepspeed")
        deepspeed.init_distributed("gloo")
        return deepspeed
    if variant == "fsdp2":
        import_module("torch.distributed.fsdp")
    return None


def build_trainer(variant: str, s: Settings, model: Any, library: Any) -> Any:
    """Return the trainer of a variant: AdamW with the same settings, and clipping at 1.0."""
    import torch

    from bench.training import ADAMW, engine_trainer, torch_trainer

    bf16 = s["dtype"] == "bf16"
    if library is not None:
        config = {
            "train_micro_batch_size_per_gpu": s["micro_batch"],
            "gradient_accumulation_steps": 1,
            "steps_per_print": 10**9,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": int(variant[2]), **(_QUANTISED if "q" in variant else {})},
            "bf16": {"enabled": bf16},
            "optimizer": {"type": "AdamW", "params": ADAMW},
        }
        return engine_trainer(library.initialize(model=model, model_parameters=model.parameters(), config=config)[0])
    if variant == "fsdp2":
        shard_module(model, s["ranks"], torch.bfloat16 if bf16 else None)
        bf16 = False  # FSDP2 casts itself
    elif variant == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    return torch_trainer(model, autocast=torch.autocast("cpu", torch.bfloat16) if bf16 else None, **ADAMW)


def shard_module(model: Any, ranks: int, dtype: Any) -> None:
    """Apply FSDP2 with a unit for every block, and bf16 for parameters and gradients where bf16 is trained."""
    from torch.distributed.device_mesh import init_device_mesh  # 0.3 s and 50 MB that the others do without
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    shard: Callable[[Any], object] = partial(
        fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    )
    for module in (*model.blocks, model):
        shard(module)


def _options(batches: tuple[int, ...], warmup: int, steps: int) -> dict[str, Option]:
    return {
        "size": Option("29m", "model", SHAPES),
        "micro_batch": Option(batches, "sequences a rank and step"),
        "dtype": Option(("fp32", "bf16"), "types", ("fp32", "bf16")),
        "ranks": Option((2,), "processes of one thread; more than cores share them"),
        "steps": Option(steps, "measured steps"),
        "warmup": Option(warmup, "steps before them"),
    }


def _with_ranks(settings: Settings, start: Start, place: Any) -> Start:
    return replace(start, ranks=settings["ranks"])


_TITLE = "{size}, micro-batch {micro_batch}, {dtype}, {ranks} ranks"
_ABOUT = __doc__ or ""
CASES = {
    "steps": Case(
        "steps", _ABOUT, _options((1, 4), 4, 12), variants, columns, _TITLE, settings,
        rounds=2, default=VARIANTS[:11], is_wrong=is_wrong, prepare=_with_ranks,
    ),
    "memory": Case(
        "memory", _ABOUT, _options((1,), 2, 3), variants, memory_columns, f"Peak memory a rank in MiB: {_TITLE}",
        settings, rounds=1, default=VARIANTS[:7], work="steps", prepare=_with_ranks,
    ),
    "hosts": Case(
        "hosts", _ABOUT,
        {
            **_options((1,), 2, 4), "micro_batch": Option(1, "sequences a rank"),
            "slots": Option((1, 2), "ranks a host"), "links": Option(_LINKS, "rates of the link", _LINKS),
        },
        variants, columns, f"Two hosts of {{slots}}, a link of {{link}}: {_TITLE}", host_settings,
        rounds=2, default=(*VARIANTS[:3], *VARIANTS[4:7], *VARIANTS[11:]), is_wrong=is_wrong, work="steps",
        around=two_hosts, prepare=between_hosts,
    ),
}  # fmt: skip
