"""A function with state on a script's own mesh: statistics of the batch, a counter, a key, and a table that is cut."""

from __future__ import annotations

import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_mesh_model import SAMPLES, STEPS, make_config, mesh, own_samples_of

import polyaccel
from polyaccel.jax.native.mesh import join_processes

SPECS = {"up": P(None, "tensor"), "down": P("tensor")}


def initial():
    """(parameters, state)."""
    draw = np.random.default_rng(0)
    params = {name: draw.standard_normal(shape).astype("f") / 3 for name, shape in (("up", (6, 8)), ("down", (8, 6)))}
    state = {
        "mean": np.zeros(8, np.float32),
        "count": np.int32(0),
        "key": jax.random.key(7),
        "seen": np.zeros((4, 6), np.float32),
    }
    return params, state


def loss_fn(params, state, batch, rng):
    """Normalised by the whole batch, whose last samples weigh more, so that means of ranks would differ."""
    hidden = batch @ params["up"]
    mean = hidden.mean(0) if rng is not None else state["mean"]
    key, drawn = jax.random.split(state["key"])
    found = jnp.tanh(hidden - mean) @ params["down"] + 0.01 * jax.random.normal(drawn, (6,))
    weights = jnp.arange(1.0, batch.shape[0] + 1)[:, None]
    new = {
        "mean": 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(hidden.mean(0)),
        "count": state["count"] + 1,
        "key": key,
        "seen": 0.5 * state["seen"] + batch[:4],
    }
    return ((found - batch) ** 2 * weights).sum() / weights.sum(), (new, hidden.max())


def batch_of(step):
    return np.random.default_rng([5, step]).standard_normal((SAMPLES, 6)).astype(np.float32)


def plain(steps=STEPS):
    """(losses, loss of an evaluation, parameters, state) of plain JAX and optax on one device."""
    import optax

    update, (params, state) = optax.adam(1e-2), initial()
    moments = update.init(params)
    losses = []

    @jax.jit
    def both(params, state, batch):
        return jax.value_and_grad(lambda own: loss_fn(own, state, batch, 0), has_aux=True)(params)

    for step in range(steps):
        (loss, (state, _)), gradients = both(params, state, batch_of(step))
        changes, moments = update.update(gradients, moments, params)
        params = optax.apply_updates(params, changes)
        losses.append(float(loss))
    return losses, float(loss_fn(params, state, batch_of(0), None)[0]), _host(params), _host(state)


def _host(tree):
    return jax.tree.map(_on_host, tree)


def _on_host(leaf):
    from jax.experimental.multihost_utils import process_allgather

    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf if getattr(leaf, "is_fully_addressable", True) else process_allgather(leaf, tiled=True))


def start(stage, where=None, state=None, **named):
    import optax

    where = where or mesh()
    params, first = initial()
    first["seen"] = jax.device_put(first["seen"], NamedSharding(where, P("data")))
    return polyaccel.initialize(
        model=loss_fn,
        params=params,
        state=first if state is None else state,
        optimizer=optax.adam(1e-2),
        config=make_config(stage),
        mesh=where,
        param_specs=SPECS,
        **named,
    )


def train(communicator, stage, folder):
    """(losses, loss of an evaluation, parameters, state, specs of the state, whether steps were one program) of steps
    in two runs, the last of which resumes on a mesh of other axes and takes its gradients in hand."""
    join_processes(communicator)
    engine = start(stage)
    losses = map(float, engine.train_steps([own_samples_of(communicator, batch_of(step)) for step in range(STEPS - 1)]))
    is_one_program = "_many_steps" in vars(engine)
    specs = {name: tuple(engine.state[name].sharding.spec) for name in ("mean", "seen")}
    engine.save_checkpoint(folder)
    engine.destroy()
    again = start(1, jax.sharding.Mesh(mesh().devices.reshape(4, 1), ("data", "tensor")))
    again.load_checkpoint(folder)
    loss, gradients = again.value_and_grad(own_samples_of(communicator, batch_of(STEPS - 1)))
    again.apply_gradients(gradients, loss)
    again.state = again.state
    evaluated = float(again.eval_batch(own_samples_of(communicator, batch_of(0))))
    found = [*losses, float(loss)], evaluated, _host(again.params), _host(again.state), specs, is_one_program
    again.destroy()
    return found


def prove(communicator, stage, is_wrong):
    """(what the log says of the proof, quantity of its error or None, losses of two steps after it)."""
    from polyaccel.errors import VerificationError
    from polyaccel.jax.partitioned.gradients import LeafGradients

    join_processes(communicator)
    said, own = [], LeafGradients.__dict__["_factor"]
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("polyaccel.jax.verify.first_step")
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    if is_wrong:
        LeafGradients._factor = 1.5
    blamed, losses = None, []
    os.environ["POLYACCEL_VERIFY"] = "always"
    try:
        engine = start(stage)
        losses += [float(engine.train_batch(own_samples_of(communicator, batch_of(step)))) for step in range(2)]
    except VerificationError as error:
        blamed = error.value
    finally:
        os.environ["POLYACCEL_VERIFY"] = "off"
        LeafGradients._factor = own
        logger.removeHandler(handler)
        logger.level = level
    return [line.partition(":")[0] for line in said], blamed, losses
