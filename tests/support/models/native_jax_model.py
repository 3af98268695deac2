"""A small function of JAX for tests of native mode, and its training in both modes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax_models import jax_gpt, leaves, tokens

import polyaccel

STEPS = 10
BATCH = 2
"""Samples of a micro-batch on one rank."""


def loss(params, batch, rng):
    """Two layers, a scalar that is trained, a table that is not, and noise that depends on rank and micro-batch."""
    x, y = batch
    hidden = jnp.tanh(x @ params["first"]["weight"] + params["first"]["bias"]) * params["scale"]
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.8, hidden.shape)
    found = hidden @ params["second"]["weight"] + params["shift"].astype(hidden.dtype)
    return jnp.square(found - y).mean(dtype=jnp.float32), {"mean": found.mean(), "x": x[0]}


def initial_params():
    draw = np.random.default_rng(0)
    return {
        "first": {"weight": draw.standard_normal((5, 43)).astype(np.float32), "bias": np.zeros(43, np.float32)},
        "second": {"weight": 0.3 * draw.standard_normal((43, 3)).astype(np.float32)},
        "scale": np.float32(1.5),
        "shift": np.arange(3, dtype=np.int32),
    }


def samples(step, micro, rank):
    draw = np.random.default_rng([step, micro, rank])
    x = draw.standard_normal((BATCH, 5)).astype(np.float32)
    return x, np.tanh(x[:, :3]).astype(np.float32)


def make_config(stage, accumulation=1, native=False, optimizer=None, **changes):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.8,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "param_persistence_threshold": 0},
        **({"jax": {"execution": "native"}} if native else {}),
        **changes,
    }


def transformation(name):
    """One of optax by name; None for None."""
    import optax

    return {
        "adam": lambda: optax.adam(optax.linear_schedule(1e-2, 0.0, 12)),  # its count matters
        "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
        "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
        "lamb": lambda: optax.lamb(1e-2),
        "masked": lambda: optax.adamw(1e-2, weight_decay=1.0, mask=matrices),
        "partition": lambda: optax.partition(
            {"trained": optax.contrib.schedule_free_adamw(1e-2), "frozen": optax.set_to_zero()}, labels
        ),
        None: lambda: None,
    }[name]()


def matrices(params):
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "second" in jax.tree_util.keystr(path) else "trained", params
    )


def start(config, fn=loss, optax_name=None):
    return polyaccel.initialize(model=fn, params=initial_params(), optimizer=transformation(optax_name), config=config)


def without_noise(params, batch, rng):
    return loss(params, batch, None)


def train_whole_batches(communicator, config, steps, processes, load, save, optax_name=None):
    """The parameters by name after steps whose six samples are cut over the processes, evenly."""
    sizes = {"train_micro_batch_size_per_gpu": None, "train_batch_size": 6}
    engine = start({**config, **sizes}, without_noise, optax_name)
    if load is not None:
        engine.load_checkpoint(load)
    own = slice(communicator.rank * 6 // processes, (communicator.rank + 1) * 6 // processes)
    for step in steps:
        parts = [samples(step, 0, rank) for rank in range(3)]
        engine.train_batch(tuple(np.concatenate(part)[own] for part in zip(*parts, strict=True)))
    if save is not None:
        engine.save_checkpoint(save)
    found = leaves(engine.params)
    engine.destroy()
    return found


def train(communicator, config, steps=range(STEPS), devices=1, optax_name=None):
    """(losses, gradient norms, parameters by name, skipped steps) of one process, whose ranks are its devices."""
    return _run(start(config, optax_name=optax_name), communicator, steps, devices, samples)


def train_gpt(communicator, config, steps=range(2 * STEPS), devices=1):
    """As `train`, of the GPT of the examples."""
    fn, params = jax_gpt()
    return _run(polyaccel.initialize(model=fn, params=params, config=config), communicator, steps, devices, tokens)


def _run(engine, communicator, steps, devices, data):
    ranks = range(communicator.rank * devices, (communicator.rank + 1) * devices)
    losses, norms = [], []
    for step in steps:
        micros = []
        for micro in range(engine.gradient_accumulation_steps()):
            parts = [data(step, micro, rank) for rank in ranks]
            micros.append(tuple(np.concatenate(part) for part in zip(*parts, strict=True)))
        losses.append(float(engine.train_batch(iter(micros))))
        norms.append(engine.get_global_grad_norm())
    found = losses, norms, leaves(engine.params), engine.skipped_steps
    engine.destroy()
    return found


def halves(params):
    """Copies of the bits of all leaves of 16 bits."""
    return [np.array(leaf).view(np.uint16) for leaf in jax.tree.leaves(params) if leaf.dtype.itemsize == 2]


def round_weights(communicator, config, load, save, spoils=False):
    """The bits of the parameters as they were loaded, and after a step, which is saved; `spoils`: then comes a step
    that is skipped."""
    engine = start(config, without_noise)
    if load is not None:
        engine.load_checkpoint(load)
    loaded = halves(engine.params)
    x, y = (np.concatenate([part] * jax.local_device_count()) for part in samples(0, 0, communicator.rank))
    engine.train_batch((x, y))
    trained = halves(engine.params)
    if spoils:
        engine.train_batch((np.full_like(x, np.inf), y))
        assert not engine.was_step_applied()
        for one, other in zip(trained, halves(engine.params), strict=True):
            np.testing.assert_array_equal(one, other)
    engine.save_checkpoint(save)
    engine.destroy()
    return loaded, trained
