"""Training over a slow link: DDP, and replica groups that meet every few steps (DiLoCo), in turns on the same hosts.

The hosts are network namespaces of this machine with one rank each; `--link` limits what each may send. All variants
begin with the same weights, see the same batches, and are evaluated on the same others, with the mean of the ranks'
losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Any

from bench.runner import Option, Settings, Start, begin, launch, parse, table

_VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "diloco": {},
    "diloco-8-bits": {"quantization_bits": 8},
    "diloco-4-bits": {"quantization_bits": 4},
    "streaming": {
        "quantization_bits": 8,
        "fragments": 4,
        "fragment_sync_delay": 4,
        "fragment_update_alpha": 0.5,
    },
}
_EVALUATED = 16


def main(argv: Sequence[str]) -> int:
    """Print a table of the variants."""
    options = {
        "hosts": Option(2, "hosts"),
        "size": Option("10m", "of the model"),
        "steps": Option(256, "of each variant"),
        "every": Option(32, "steps between two outer steps"),
        "micro": Option(2, "sequences of a rank in a step"),
        "lr": Option(1e-3, "learning rate of AdamW"),
        "outer_lr": Option(0.7, "learning rate of the outer optimizer"),
        "link": Option("100mbit", "what a host may send, as tc writes it"),
        "only": Option(tuple(_VARIANTS), "variants"),
    }
    args = parse("slow-link", __doc__ or "", options, argv)
    begin()
    from bench.network import brought_up

    rows = []
    with brought_up(args.hosts) as hosts:
        hosts.limit(args.link)
        start = Start(args.hosts, options=tuple(hosts.options(1, {"GLOO_SOCKET_IFNAME": "eth0"})))
        for variant in args.only:
            found = launch("slow_link", variant, vars(args), start, limit_s=3600.0)
            seconds, cpu = (max(each[name] for each in found) for name in ("seconds", "cpu"))
            mib = sum(each["sent"] for each in found) / len(found) / 2**20
            loss = sum(each["loss"] for each in found) / len(found)
            times = f"{seconds:.1f}", f"{1e3 * seconds / args.steps:.0f}", f"{cpu:.1f}"
            rows.append((variant, *times, f"{mib:.0f}", f"{loss:.4f}"))
    title = f"{args.size}, {args.steps} steps, {args.hosts} hosts of one rank, {args.link}"
    table(title, ("variant", "seconds", "ms a step", "CPU s a rank", "MiB sent a rank", "loss of other text"), rows)
    return 0


def work(variant: str, s: Settings) -> dict[str, float]:
    """Train, and return seconds, those of the processor, bytes that left the host, and the loss of other text."""
    import os

    import torch

    from bench.training import Gpt, Trainer, draw_batch, engine_trainer, load_corpus, torch_trainer

    torch.set_num_threads(1)
    corpus, model = load_corpus(), Gpt(s["size"])
    train, other = corpus[: -(1 << 20)], corpus[-(1 << 20) :]
    trainer: Trainer
    if variant == "ddp":
        torch.distributed.init_process_group("gloo")
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        trainer = torch_trainer(ddp, lr=s["lr"], betas=(0.9, 0.95), weight_decay=0.01)
    else:
        import polyaccel

        outer = {"lr": s["outer_lr"], "momentum": 0.9, "nesterov": True}
        section = {"replica_groups": s["hosts"], "sync_every": s["every"], "outer_optimizer": outer}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": s["micro"],
            "optimizer": {"type": "AdamW", "params": {"lr": s["lr"], "betas": [0.9, 0.95], "weight_decay": 0.01}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "diloco": {**section, **_VARIANTS[variant]},
        }
        engine, *_ = polyaccel.initialize(model=model, config=config)
        trainer = engine_trainer(engine)
    rank = int(os.environ["RANK"])
    sent, began, cpu = _sent(), perf_counter(), process_time()
    for step in range(s["steps"]):
        trainer.step(*draw_batch(train, step, rank, s["micro"]))
    seconds, cpu, sent = perf_counter() - began, process_time() - cpu, _sent() - sent
    with torch.no_grad():
        losses = [float(model(*draw_batch(other, step, 0, 8))) for step in range(_EVALUATED)]
    return {"seconds": seconds, "cpu": cpu, "sent": float(sent), "loss": sum(losses) / len(losses)}


def _sent() -> int:
    """Bytes that have left this host."""
    from pathlib import Path

    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
