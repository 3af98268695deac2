"""A step of levanter's GPT-2 by levanter's own trainer and by this engine, on two processes of one thread.

Model, tokens, AdamW and clipping are the same; levanter cuts parameters over the axis `data` (FSDP), this engine by
ZeRO. It needs levanter (`marin-levanter` on PyPI, Python 3.12) and polyaccel in an environment of their own:

    OTHER/bin/python bench/beside_levanter.py theirs native3 theirs native3 --size 29m --steps 4

Each name is a variant that starts two processes; the variants run in turn. Times are of rank 0, medians; CPU times are
those of its process, which tell more where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

_SHAPES = {"29m": (9, 512, 8), "126m": (10, 1024, 16)}
_VOCABULARY, _CONTEXT, _WARMUP, _WORLD = 256, 512, 2, 2
_LR, _BETAS, _DECAY = 3e-4, (0.9, 0.95), 0.01
Step = Callable[[np.ndarray], float]


def main() -> None:
    """Run the variants in turn, or one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="+", choices=[*_BUILDERS])
    parser.add_argument("--size", choices=[*_SHAPES], default="29m")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    if "RANK" in os.environ:
        print(json.dumps(_train(given.variants[0], given.size, given.steps)))
        return
    print(
        "| variant | ms a step | CPU ms a step | s to first step | peak RSS MiB | losses |\n|---|---|---|---|---|---|"
    )
    for variant in given.variants:
        found = _launch(variant, given.size, given.steps)
        figures = [f"{found[name]:.0f}" for name in ("ms", "cpu_ms", "first_s", "rss_mib")]
        print("|", " | ".join([variant, *figures, ", ".join(f"{loss:.5f}" for loss in found["losses"])]), "|")


def _launch(variant: str, size: str, steps: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), variant, "--size", size, "--steps", str(steps)]
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(_WORLD)}
        environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        errors = [os.open(Path(folder, f"rank{rank}"), os.O_WRONLY | os.O_CREAT) for rank in range(_WORLD)]
        ranks = [
            subprocess.Popen(
                command,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=errors[rank],
                cwd=folder,
                text=True,
            )
            for rank in range(_WORLD)
        ]
        outputs = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            sys.exit("\n".join(Path(folder, f"rank{rank}").read_text()[-3000:] for rank in range(_WORLD)))
    found: list[dict[str, Any]] = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    means = [sum(one) / _WORLD for one in zip(*(each["losses"] for each in found), strict=True)]  # ours are of a rank
    return {**found[0], "losses": means}


def _train(variant: str, size: str, steps: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})
    began_s = perf_counter()
    step = _BUILDERS[variant](size)
    losses, walls_s, cpus_s, first_s = [], [], [], 0.0
    for number in range(_WARMUP + steps):
        tokens = np.random.default_rng(number).integers(0, _VOCABULARY, (_WORLD, _CONTEXT), dtype=np.int32)
        wall_s, cpu_s = perf_counter(), process_time()
        losses.append(step(tokens))
        first_s = first_s or perf_counter() - began_s
        walls_s.append(perf_counter() - wall_s)
        cpus_s.append(process_time() - cpu_s)
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = {"ms": median(walls_s[_WARMUP:]) * 1e3, "cpu_ms": median(cpus_s[_WARMUP:]) * 1e3}
    return {**times, "first_s": first_s, "rss_mib": rss_mib, "losses": losses[:2] + losses[-1:]}


def _theirs(size: str) -> Step:
    """Return a step of levanter's trainer: parameters and states cut over the axis `data`."""
    jax, jmp, hax = import_module("jax"), import_module("jmp"), import_module("haliax")
    trainers, distributed = import_module("levanter.trainer"), import_module("levanter.distributed")
    tracker = import_module("levanter.tracker").NoopConfig()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank = int(os.environ["RANK"])
    config = trainers.TrainerConfig(
        train_batch_size=_WORLD,
        num_train_steps=1000,
        mp=jmp.get_policy("f32"),
        tracker=tracker,
        log_jaxprs=False,
        log_xla_hlo=False,
        require_accelerator=False,
        load_checkpoint=False,
        jax_compilation_cache_dir=str(Path.cwd() / "programs"),
        distributed=distributed.DistributedConfig(
            coordinator_address=address, num_processes=_WORLD, process_id=rank, local_device_ids=0
        ),
    )
    config.initialize()
    model_config = _model_config(size)

    def loss(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key).scalar()

    trainer = trainers.Trainer(config, _optimizer(), loss)
    trainer.__enter__()
    vocabulary = hax.Axis("vocab", _VOCABULARY)
    built = lambda: model_config.build(vocabulary, key=jax.random.PRNGKey(0))  # noqa: E731
    held = [trainer.initial_state(jax.random.PRNGKey(1), model_init=built)]
    rows = jax.sharding.NamedSharding(
        trainer.device_mesh, jax.sharding.PartitionSpec(("replica_dcn", "replica", "data"))
    )
    batch_axis = trainer.TrainBatch

    def step(tokens: np.ndarray) -> float:
        whole = jax.make_array_from_callback(tokens.shape, rows, lambda index: tokens[index])
        info = trainer.train_step(held[0], _example(hax, whole, batch_axis, model_config))
        held[0] = info.state
        return float(info.loss)

    return step


def _ours(size: str, *, stage: int) -> Step:
    """Return a step of this engine over levanter's module."""
    polyaccel = import_module("polyaccel")
    import_module("polyaccel.jax").init_distributed()
    jax, hax = import_module("jax"), import_module("haliax")
    model_config, rank = _model_config(size), int(os.environ["RANK"])
    module = model_config.build(hax.Axis("vocab", _VOCABULARY), key=jax.random.PRNGKey(0))

    def loss(model: Any, tokens: Any, rng: Any) -> Any:
        example = _example(hax, tokens, hax.Axis("batch", tokens.shape[0]), model_config)
        return model.compute_next_token_loss(example).scalar()

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "jax": {"execution": "native"},
    }
    engine = polyaccel.initialize(model=loss, params=module, optimizer=_optimizer(), config=config)
    return lambda tokens: float(engine.train_batch(tokens[rank : rank + 1]))


def _example(hax: Any, tokens: Any, batch: Any, model_config: Any) -> Any:
    lm, attention = import_module("levanter.models.lm_model"), import_module("levanter.layers.attention")
    position = model_config.max_Pos
    weight = hax.broadcast_axis(lm.LmExample.causal_loss_mask(position).astype("float32"), batch)
    return lm.LmExample(hax.named(tokens, (batch, position)), weight, attention.AttentionMask.causal())


def _model_config(size: str) -> Any:
    layers, width, heads = _SHAPES[size]
    gpt2 = import_module("levanter.models.gpt2").Gpt2Config
    return gpt2(
        max_seq_len=_CONTEXT,
        hidden_dim=width,
        num_layers=layers,
        num_heads=heads,
        gradient_checkpointing=False,
        attn_backend=None,
    )


def _optimizer() -> Any:
    optax = import_module("optax")
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_LR, *_BETAS, weight_decay=_DECAY))


_BUILDERS: dict[str, Callable[[str], Step]] = {
    "theirs": _theirs,
    "native2": lambda size: _ours(size, stage=2),
    "native3": lambda size: _ours(size, stage=3),
}

if __name__ == "__main__":
    main()
