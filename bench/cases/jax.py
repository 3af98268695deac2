"""JAX function under the engine, the path of torch, and JAX's own shardings and shard_map: the GPTs of the examples.

AdamW and clipping at 1.0, on two ranks of one thread. Needs jax, optax and torch in the environment.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from time import perf_counter
from typing import Any

import numpy as np

from bench.measure import measured
from bench.runner import MIB, ROOT, Case, Column, Found, Option, Runs, Settings, Start, ms

_WARMUP = 3
_ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
_NAMES = {
    "torch2": "torch, ZeRO-2",
    "views2": "JAX, views, ZeRO-2",
    "jit3": "JAX, one jit, ZeRO-3",
    "jit3-gloo": "JAX, one jit, ZeRO-3, over gloo",
    "native2": "JAX, native, ZeRO-2, over gloo",
    "native3": "JAX, native, ZeRO-3, over gloo",
    "gspmd3": "JAX's own shardings (GSPMD), ZeRO-3, over gloo",
    "shardmap2": "jit and shard_map by hand, ZeRO-2, over gloo",
}
_OVER_GLOO = ("jit3-gloo", "native2", "native3")
Step = Callable[[Any], float]
"""Trains on a batch (tokens, targets) of this rank; returns the loss."""
Needs = tuple[int, int]
"""Bytes of XLA's arguments and temporary memory."""


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launch of each variant; rounds share compiled programs."""
    programs = str(Path(gettempdir(), f"polyaccel-bench-jax-{os.getpid()}"))
    environ = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": programs}
    return {
        name: Start(environ={**environ, "POLYACCEL_COMM": "gloo"} if name in _OVER_GLOO else environ) for name in _NAMES
    }


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns."""

    def needs(number: int) -> Column:
        def cell(own: Runs, found: Found) -> str:
            known = own.values("needs")[-1]
            return f"{known[number] / MIB:.0f}" if known else "-"

        return cell

    def ratio(own: Runs, found: Found) -> str:
        base = next(iter(found.values()))
        return f"{median(own.means('seconds')) / median(base.means('seconds')):.2f}"

    return {
        "library": lambda own, found: _NAMES[own.variant],
        "ms a step": ms(),
        "CPU ms a step": ms("cpu"),
        "x first": ratio,
        "XLA arguments MiB": needs(0),
        "XLA temporary MiB": needs(1),
        "s to first step": lambda own, found: f"{own.values('first_s')[0]:.1f}",
        "peak RSS MiB": lambda own, found: f"{own.values('max_rss')[-1] / MIB:.0f}",
        "first, last loss": lambda own, found: ", ".join(f"{loss:.4f}" for loss in own.losses()[-1][:: s["steps"] + 2]),
    }


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train the example's GPT; return the figures of `measured`, XLA's needs and the peak RSS."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})  # XLA has as many threads as cores that it sees
    name = variant.partition("-")[0]
    model = _load("gpt" if name == "torch2" else "gpt_jax")
    shape = model.SHAPES[s["size"]]
    count = _WARMUP + s["steps"]
    batches = [_batch(step, rank, s["micro_batch"], shape.context) for step in range(count)]
    began_s = perf_counter()
    train, needs = _BUILDERS[name](model, shape, batches[0], world)
    ends_s: list[float] = []

    def step(number: int) -> float:
        loss = train(batches[number])
        ends_s.append(perf_counter())
        return loss

    figures = measured(step, s["steps"], _WARMUP)
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**figures, "needs": needs, "max_rss": max_rss, "first_s": ends_s[0] - began_s}


def _with_torch(model: Any, shape: Any, batch: Any, world: int) -> tuple[Step, Needs | None]:
    torch, polyaccel = import_module("torch"), import_module("polyaccel")
    torch.manual_seed(0)
    engine, *_ = polyaccel.initialize(model=model.Gpt(shape), config=_config(2, len(batch[0])))

    def step(batch: Any) -> float:
        return float(engine.train_batch(iter([tuple(torch.from_numpy(part).long() for part in batch)])))

    return step, None


def _with_jax(model: Any, shape: Any, batch: Any, world: int, *, stage: int) -> tuple[Step, Needs | None]:
    engine = import_module("polyaccel").initialize(
        model=partial(model.loss, heads=shape.heads),
        params=model.initial_params(shape, 0),
        config=_config(stage, len(batch[0])),
    )
    return lambda batch: float(engine.train_batch(batch)), _needs(engine.program(batch))


def _with_native(model: Any, shape: Any, batch: Any, world: int, *, stage: int) -> tuple[Step, Needs | None]:
    import_module("polyaccel.jax").init_distributed()
    config = {**_config(stage, len(batch[0])), "jax": {"execution": "native"}}
    loss, params = partial(model.loss, heads=shape.heads), model.initial_params(shape, 0)
    engine = import_module("polyaccel").initialize(model=loss, params=params, config=config)
    return lambda batch: float(engine.train_batch(batch)), _needs(engine.program(batch))


def _with_gspmd(model: Any, shape: Any, batch: Any, world: int) -> tuple[Step, Needs | None]:
    """Stage 3 as JAX's own shardings: each parameter and its states cut along the largest axis that divides."""
    jax, optax = import_module("jax"), import_module("optax")
    sharding, mesh = import_module("jax.sharding"), _gloo_mesh(world)

    def cut(array: Any) -> Any:
        axes = [axis for axis in range(array.ndim) if array.shape[axis] % world == 0]
        axis = max(axes, key=lambda axis: array.shape[axis], default=None)
        parts = ["ranks" if at == axis else None for at in range(array.ndim)]
        return sharding.NamedSharding(mesh, sharding.PartitionSpec(*parts))

    def place(array: Any) -> Any:
        return jax.make_array_from_callback(array.shape, cut(array), lambda index: array[index])

    update = optax.chain(optax.clip_by_global_norm(1.0), _adamw())
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


def _with_shard_map(model: Any, shape: Any, batch: Any, world: int) -> tuple[Step, Needs | None]:
    """Stage 2 as one writes it: whole parameters, flat gradients summed and cut, Adam on a shard, and a gather."""
    jax, optax, jnp = import_module("jax"), import_module("optax"), import_module("jax.numpy")
    spec, mesh, update = import_module("jax.sharding").PartitionSpec, _gloo_mesh(world), _adamw()
    first, unravel = import_module("jax.flatten_util").ravel_pytree(model.initial_params(shape, 0))
    padded = jnp.pad(first, (0, -first.size % world))
    size = padded.size // world
    loss_fn = partial(model.loss, heads=shape.heads)

    def train(flat: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda flat: loss_fn(unravel(flat[: first.size]), batch, None))(flat)
        own = jax.lax.psum_scatter(gradients, "ranks", tiled=True) / world
        norm = jnp.sqrt(jax.lax.psum(jnp.sum(jnp.square(own)), "ranks"))
        own = own * jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        weights = jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index("ranks") * size, size)
        updates, state = update.update(own, state, weights)
        flat = jax.lax.all_gather(optax.apply_updates(weights, updates), "ranks", tiled=True)
        return flat, state, jax.lax.pmean(loss, "ranks")

    def placed(array: Any, *axes: Any) -> Any:
        where = jax.sharding.NamedSharding(mesh, spec(*axes))
        return jax.make_array_from_callback(array.shape, where, lambda index: np.asarray(array)[index])

    state = jax.tree.map(lambda leaf: placed(leaf, *["ranks"] * leaf.ndim), update.init(padded))
    of_state = jax.tree.map(lambda leaf: spec(*["ranks"] * leaf.ndim), state)
    given = {"in_specs": (spec(), of_state, spec("ranks")), "out_specs": (spec(), of_state, spec())}
    spread = jax.shard_map(train, mesh=mesh, check_vma=False, **given)

    def whole(batch: Any) -> Any:
        rows = jax.sharding.NamedSharding(mesh, spec("ranks"))
        return tuple(jax.make_array_from_process_local_data(rows, part) for part in batch)

    held = [placed(padded), state]
    program = jax.jit(spread, donate_argnums=(0, 1)).lower(*held, whole(batch)).compile()

    def step(batch: Any) -> float:
        held[0], held[1], loss = program(*held, whole(batch))
        return float(loss)

    return step, _needs(program)


def _gloo_mesh(world: int) -> Any:
    """The devices of all processes, which exchange over gloo."""
    jax = import_module("jax")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, world, int(os.environ["RANK"]))
    return jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))


def _adamw() -> Any:
    adamw = import_module("optax").adamw
    return adamw(_ADAMW["lr"], *_ADAMW["betas"], _ADAMW["eps"], weight_decay=_ADAMW["weight_decay"])


_BUILDERS: dict[str, Callable[..., tuple[Step, Needs | None]]] = {
    "torch2": _with_torch,
    "views2": partial(_with_jax, stage=2),
    "jit3": partial(_with_jax, stage=3),
    "native2": partial(_with_native, stage=2),
    "native3": partial(_with_native, stage=3),
    "gspmd3": _with_gspmd,
    "shardmap2": _with_shard_map,
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
    spec = spec_from_file_location("model", ROOT / "examples" / example / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["model"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_OPTIONS = {
    "size": Option("medium", "of the examples' GPT (medium: 29 M parameters)"),
    "micro_batch": Option(1, "sequences a rank"),
    "steps": Option(10, "measured in each launch"),
}
CASES = {"jax": Case("jax", __doc__ or "", _OPTIONS, variants, columns, "{size}, micro-batch {micro_batch}, 2 ranks")}
