"""What the JAX tests share: the GPT of the examples in torch and in JAX, from the same weights, and runs of both."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import torch
from parity_models import drawn_from

import polyaccel
from polyaccel.jax.pytree import named_leaves

STAGES = (0, 1, 2)
"""Those where ranks may be threads: at stage 3 programs wait for each other in XLA's threads, one a core."""
EXAMPLES = Path(__file__).parents[3] / "examples"
HEADS = 2
CONTEXT = 16
SMALL_BUCKET = 2048
"""Elements: so that the model needs many buckets."""


def example(name: str, file: str) -> ModuleType:
    """A file of an example, under a name of its own."""
    known = f"{name}_{file}"
    if known not in sys.modules:
        spec = spec_from_file_location(known, EXAMPLES / name / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


def sizes(name: str) -> Any:
    return example(name, "model").Shape(layers=2, width=16, heads=HEADS, context=CONTEXT)


def torch_gpt() -> torch.nn.Module:
    """The same model every time."""
    with drawn_from(0):
        model: torch.nn.Module = example("gpt", "model").Gpt(sizes("gpt"))
        return model


def jax_gpt() -> tuple[Any, Any]:
    """(fn, params) of the JAX model with the values of `torch_gpt`."""
    model = example("gpt_jax", "model")
    values = {fqn: parameter.detach().numpy() for fqn, parameter in torch_gpt().named_parameters()}
    params = model.initial_params(sizes("gpt_jax"), 0)
    return partial(model.loss, heads=HEADS), filled(params, values)


def filled(tree: Any, values: dict[str, Any], path: str = "") -> Any:
    """`tree` with each leaf replaced by the value of its path."""
    if isinstance(tree, dict):
        return {key: filled(value, values, f"{path}{key}.") for key, value in tree.items()}
    if isinstance(tree, list):
        return [filled(value, values, f"{path}{index}.") for index, value in enumerate(tree)]
    return values[path[:-1]].copy()


def leaves(tree: Any) -> dict[str, Any]:
    """Copies of a tree's leaves by path, as float64."""
    arrays = jax.tree.map(jax.numpy.asarray, tree)
    return {fqn: np.array(leaf.astype("float32"), np.float64) for fqn, leaf in named_leaves(arrays)[0].items()}


def tokens(step: int, micro: int, rank: int, size: int = 2) -> tuple[Any, Any]:
    """The tokens and targets of one micro-batch, a function of where it stands."""
    random = np.random.default_rng([step, micro, rank])
    text = np.cumsum(random.integers(0, 3, (size, CONTEXT + 1)), axis=1) % 256
    return text[:, :-1], text[:, 1:].copy()


def make_config(stage: int, *, accumulation: int = 1, zero: dict[str, Any] | None = None, **changes: Any) -> Any:
    """AdamW under WarmupLR with clipping; `changes` replace keys of the config."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.7,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 3e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": SMALL_BUCKET, **(zero or {})},
        **changes,
    }


@dataclass
class Run:
    """What a training run left behind, on one rank."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Any]


def train_torch(communicator: Any, model: torch.nn.Module, config: Any, steps: int) -> Run:
    engine, *_ = polyaccel.initialize(model=model, config=config)
    losses, norms = [], []
    for step in range(steps):
        count = engine.gradient_accumulation_steps()
        batches = (
            tuple(torch.from_numpy(part) for part in tokens(step, micro, communicator.rank)) for micro in range(count)
        )
        losses.append(float(engine.train_batch(batches)))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return Run(losses, norms, {fqn: p.detach().double().numpy().copy() for fqn, p in model.named_parameters()})


def compile_once(communicator: Any, engine: Any, batch: Any) -> None:
    """Have rank 0 compile the program of a micro-batch like `batch`: the others read it. Each for itself, all at a
    time, takes as many times as long as there are more ranks than cores."""
    if communicator.rank == 0:
        engine.program(batch)
    communicator.barrier()


def train_jax(communicator: Any, model: tuple[Any, Any], config: Any, steps: int) -> Run:
    """`model` is what `jax_gpt` gave, made before there were threads: torch's random state is one."""
    fn, params = model
    engine = polyaccel.initialize(model=fn, params=params, config=config)
    compile_once(communicator, engine, tokens(0, 0, communicator.rank))
    losses, norms = [], []
    for step in range(steps):
        count = engine.gradient_accumulation_steps()
        batches = iter([tokens(step, micro, communicator.rank) for micro in range(count)])
        losses.append(float(engine.train_batch(batches)))
        norms.append(engine.get_global_grad_norm())
    run = Run(losses, norms, leaves(engine.params))
    assert str(engine.copies) == f"zero-copy {len(run.params)}/{len(run.params)}"
    engine.destroy()
    return run
