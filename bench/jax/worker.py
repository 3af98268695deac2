"""What every rank of `python -m bench jax` does.

`python -m bench.jax.worker VARIANT SIZE MICRO_BATCH STEPS RESULT` under a launcher trains the GPTs of the examples,
with AdamW and clipping at 1.0; rank 0 writes its figures as JSON to RESULT.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_WARMUP = 3
_ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

Step = Callable[[Any], float]
"""Trains on a batch (tokens, targets) of this rank; returns the loss."""
Needs = tuple[int, int]
"""Bytes of XLA's arguments and temporary memory."""


def main(argv: list[str]) -> None:
    variant, size, micro_batch, steps, result = argv[0], argv[1], int(argv[2]), int(argv[3]), Path(argv[4])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})  # XLA has as many threads as cores that it sees
    name, _, comm = variant.partition("-")
    if comm:
        os.environ["POLYACCEL_COMM"] = comm
    model = _load("gpt" if name == "torch2" else "gpt_jax")
    shape = model.SHAPES[size]
    batches = [_batch(step, rank, micro_batch, shape.context) for step in range(_WARMUP + steps)]
    step, needs = _BUILDERS[name](model, shape, batches[0], world)
    times, losses = [], []
    for batch in batches:
        began = perf_counter()
        losses.append(step(batch))
        times.append(perf_counter() - began)
    if rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {"step_s": median(times[_WARMUP:]), "needs": needs, "peak": peak, "losses": [losses[0], losses[-1]]}
        result.write_text(json.dumps(figures))


def _with_torch(model: Any, shape: Any, batch: Any, world: int) -> tuple[Step, Needs | None]:
    torch, polyaccel = import_module("torch"), import_module("polyaccel")
    torch.manual_seed(0)
    engine, *_ = polyaccel.initialize(model=model.Gpt(shape), config=_config(2, len(batch[0])))

    def step(batch: Any) -> float:
        return float(engine.train_batch(iter([tuple(torch.from_numpy(part).long() for part in batch)])))

    return step, None


def _with_jax(model: Any, shape: Any, batch: Any, world: int, *, stage: int) -> tuple[Step, Needs | None]:
    polyaccel = import_module("polyaccel")
    engine = polyaccel.initialize(
        model=partial(model.loss, heads=shape.heads),
        params=model.initial_params(shape, 0),
        config=_config(stage, len(batch[0])),
    )
    return lambda batch: float(engine.train_batch(batch)), _needs(engine.program(batch))


def _with_gspmd(model: Any, shape: Any, batch: Any, world: int) -> tuple[Step, Needs | None]:
    """Stage 3 as JAX's own shardings: each parameter and its states cut along the largest axis that divides."""
    jax, optax = import_module("jax"), import_module("optax")
    sharding = import_module("jax.sharding")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, world, int(os.environ["RANK"]))
    mesh = sharding.Mesh(np.array(jax.devices()), ("ranks",))

    def cut(array: Any) -> Any:
        axes = [axis for axis in range(array.ndim) if array.shape[axis] % world == 0]
        axis = max(axes, key=lambda axis: array.shape[axis], default=None)
        parts = ["ranks" if at == axis else None for at in range(array.ndim)]
        return sharding.NamedSharding(mesh, sharding.PartitionSpec(*parts))

    def place(array: Any) -> Any:
        return jax.make_array_from_callback(array.shape, cut(array), lambda index: array[index])

    update = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(_ADAMW["lr"], *_ADAMW["betas"], _ADAMW["eps"], weight_decay=_ADAMW["weight_decay"]),
    )
    params = jax.tree.map(place, model.initial_params(shape, 0))
    cuts = jax.tree.map(cut, params)
    of_state = jax.tree.map(cut, jax.eval_shape(update.init, params))
    state = jax.jit(update.init, out_shardings=of_state)(params)
    rows = sharding.NamedSharding(mesh, sharding.PartitionSpec("ranks"))
    everywhere = sharding.NamedSharding(mesh, sharding.PartitionSpec())

    def train(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(partial(model.loss, heads=shape.heads))(params, batch, None)
        updates, state = update.update(jax.lax.with_sharding_constraint(gradients, cuts), state, params)
        return optax.apply_updates(params, updates), state, loss

    def whole(batch: Any) -> Any:
        return tuple(jax.make_array_from_process_local_data(rows, part) for part in batch)

    jitted = jax.jit(train, donate_argnums=(0, 1), out_shardings=(cuts, of_state, everywhere))
    program = jitted.lower(params, state, whole(batch)).compile()
    held = [params, state]

    def step(batch: Any) -> float:
        held[0], held[1], loss = program(held[0], held[1], whole(batch))
        return float(loss)

    return step, _needs(program)


_BUILDERS: dict[str, Callable[..., tuple[Step, Needs | None]]] = {
    "torch2": _with_torch,
    "views2": partial(_with_jax, stage=2),
    "jit3": partial(_with_jax, stage=3),
    "gspmd3": _with_gspmd,
}


def _needs(program: Any) -> Needs:
    analysis = program.memory_analysis()
    return int(analysis.argument_size_in_bytes), int(analysis.temp_size_in_bytes)


def _config(stage: int, micro_batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": _ADAMW},
        "zero_optimization": {"stage": stage},
    }


def _batch(step: int, rank: int, micro_batch: int, context: int) -> Any:
    text = np.random.default_rng([step, rank]).integers(0, 256, (micro_batch, context + 1), dtype=np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


def _load(example: str) -> Any:
    spec = spec_from_file_location("model", _EXAMPLES / example / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["model"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
