"""The GPT of the examples at stage 3 under JAX: with units, without, with layers stacked for a scan."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_models import HEADS, Run, compile_once, example, jax_gpt, leaves, tokens

import polyaccel
from polyaccel.jax import scan_units, unit

ZERO = {"param_persistence_threshold": 0, "reduce_bucket_size": 2048, "stage3_prefetch_bucket_size": 0}
STACKED = ("blocks",)


def without_units(params: Any, batch: Any, rng: Any) -> Any:
    """The loss of the GPT as somebody writes it who knows nothing of units."""
    return _loss(params, batch, _in_turn)


def with_scan(params: Any, batch: Any, rng: Any) -> Any:
    """The loss of the GPT with `params["blocks"]` stacked, its layers scanned."""
    return _loss(params, batch, scan_units)


def stacked_gpt() -> tuple[Any, Any]:
    """(fn, params) of the same model with stacked layers."""
    _, params = jax_gpt()
    return with_scan, {**params, "blocks": jax.tree.map(lambda *parts: np.stack(parts), *params["blocks"])}


def plain_gpt() -> tuple[Any, Any]:
    return without_units, jax_gpt()[1]


def mixed() -> tuple[Any, Any]:
    """A function of JAX with a module of torch in it, which is a unit."""
    from jax_layer_models import JaxOutside

    model = JaxOutside()
    return model, model.params


MODELS = {"units": jax_gpt, "plain": plain_gpt, "scan": stacked_gpt, "mixed": mixed}


@cache
def model_of(name: str) -> tuple[Any, Any]:
    """(fn, params), made once: before there are threads, for torch's random state is one."""
    return MODELS[name]()


def build(communicator: Any, model: str, config: Any) -> Any:
    fn, params = model_of(model)
    stacked = STACKED if model == "scan" else ()
    return polyaccel.initialize(model=fn, params=params, config=config, stacked=stacked)


def train_sharded(communicator: Any, model: str, config: Any, steps: int) -> Run:
    """One rank's run, with the loss of an evaluation behind those of the steps."""
    engine = build(communicator, model, config)
    compile_once(communicator, engine, tokens(0, 0, communicator.rank))
    losses, norms = [], []
    for step in range(steps):
        count = engine.gradient_accumulation_steps()
        losses.append(
            float(engine.train_batch(iter([tokens(step, micro, communicator.rank) for micro in range(count)])))
        )
        norms.append(engine.get_global_grad_norm())
    losses.append(float(engine.eval_batch(tokens(steps, 0, communicator.rank))))
    run = Run(losses, norms, leaves(engine.params))
    engine.destroy()
    return run


def _loss(params: Any, batch: Any, apply: Any) -> Any:
    """That of the example, where `apply(block, hidden, layers)` computes the blocks."""
    model = example("gpt_jax", "model")
    tokens, targets = batch
    hidden = params["tokens"]["weight"][tokens] + params["positions"]["weight"][: tokens.shape[1]]
    block = partial(model._block, batch=len(tokens), heads=HEADS)
    hidden = apply(block, hidden.reshape(tokens.size, -1), params["blocks"])
    found = (model._norm(params["norm"], hidden) @ params["tokens"]["weight"].T).astype(jnp.float32)
    right = jnp.take_along_axis(found, targets.reshape(-1, 1), axis=-1)
    return (jax.nn.logsumexp(found, axis=-1) - right[:, 0]).mean()


def _in_turn(block: Any, hidden: Any, layers: Any) -> Any:
    for layer in layers:
        hidden = block(layer, hidden)
    return hidden


def wide_program(communicator: Any, layers: int = 8, width: int = 256) -> tuple[int, int, int]:
    """Bytes of a unit's parameters, and of the temporary memory of a program with units and of one without, for a net
    whose parameters are large and whose activations are small."""

    def fn(params: Any, batch: Any, rng: Any, block: Any) -> Any:
        hidden = batch
        for layer in params:
            hidden = block(layer, hidden)
        return jnp.square(hidden).mean()

    def block(layer: Any, hidden: Any) -> Any:
        return jnp.tanh(hidden @ layer["weight"].T)

    params = [{"weight": np.full((width, width), 0.01, np.float32)} for _ in range(layers)]
    found = []
    for each in (unit(block), block):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, **ZERO},
        }
        engine = polyaccel.initialize(model=partial(fn, block=each), params=params, config=config)
        needs = engine.program(np.ones((2, width), np.float32)).memory_analysis()
        found.append(int(needs.temp_size_in_bytes))
        engine.destroy()
    return 4 * width * width, found[0], found[1]
