"""A small function of JAX whose parameters and activations a script's own mesh cuts, and its training in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyaccel
import polyaccel.jax
from polyaccel.jax.native.mesh import join_processes

STEPS = 4
SAMPLES = 8
SPECS = {"table": P(), "first": {"kernel": P(None, "tensor"), "bias": P("tensor")}, "second": P("tensor"), "gain": P()}


def mesh():
    """Two ranks of data by two of tensors."""
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def initial_params():
    draw = np.random.default_rng(0)

    def normal(*shape):
        return (0.4 * draw.standard_normal(shape)).astype(np.float32)

    first = {"kernel": normal(8, 16), "bias": np.zeros(16, np.float32)}
    return {"table": 2 * normal(10, 8), "first": first, "second": normal(16, 8), "gain": np.ones(7, np.float32)}


def loss_on(mesh):
    """Weights of samples make a mean over all of them differ from a mean of ranks' means."""

    def constrained(value, *spec):
        return value if mesh is None else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))

    def loss(params, batch, rng):
        tokens, labels, weights = batch["tokens"], batch["labels"], batch["weights"]
        hidden = jnp.tanh(params["table"][tokens] @ params["first"]["kernel"] + params["first"]["bias"])
        hidden = constrained(hidden, "data", None, "tensor")
        logits = constrained(hidden @ params["second"] @ params["table"].T * params["gain"].mean(), "data")
        found = -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10)).sum(-1)
        return (found * weights).sum() / weights.sum(), {"weight": weights.sum()}

    return loss


def batch_of(step):
    draw = np.random.default_rng([1, step])
    tokens, labels = draw.integers(0, 10, (2, SAMPLES, 5))
    weights = (draw.random((SAMPLES, 5)) > 0.4).astype(np.float32) + np.float32(0.1)
    return {"tokens": tokens, "labels": labels, "weights": weights}


def transformation(name):
    import optax

    return {
        "adamw": lambda: optax.adamw(1e-2),
        "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        "muon": lambda: optax.contrib.muon(1e-2),
        "plateau": lambda: optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.2)),
    }[name]()


def train_plain(name, steps=STEPS):
    """(losses, parameters) of plain JAX and optax, on one device."""
    import optax

    update, loss = transformation(name), loss_on(None)
    params = jax.tree.map(jnp.asarray, initial_params())
    state = update.init(params)

    @jax.jit
    def step(params, state, batch):
        (value, _), gradients = jax.value_and_grad(lambda given: loss(given, batch, None), has_aux=True)(params)
        updates, state = optax.with_extra_args_support(update).update(gradients, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for at in range(steps):
        params, state, value = step(params, state, batch_of(at))
        losses.append(float(value))
    return losses, jax.tree.map(np.asarray, params)


def make_config(stage, offload=None, **changes):
    return {
        "train_batch_size": SAMPLES,
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0, **(offload or {})},
        "jax": {"execution": "native"},
        **changes,
    }


def start(stage, name, placed=False, **changes):
    """An engine on `mesh`; `placed`: the parameters lie there, and nothing else names it."""
    where, params = mesh(), initial_params()
    named = {"mesh": where, "param_specs": SPECS}
    if placed:
        params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(where, spec)), params, SPECS)
        named = {}
    return polyaccel.initialize(
        model=loss_on(where),
        params=params,
        optimizer=transformation(name),
        config=make_config(stage, **changes),
        **named,
    )


def own_samples(communicator, step):
    """The samples of this process."""
    return own_samples_of(communicator, batch_of(step))


def own_samples_of(communicator, batch):
    """The samples of this process: each has an equal part."""
    count = SAMPLES // communicator.world_size
    own = slice(communicator.rank * count, (communicator.rank + 1) * count)
    return jax.tree.map(lambda leaf: leaf[own], batch)


def train(communicator, stage, name, placed=False, offloads=False):
    """(losses, whole parameters, spec of one, whether its program has reduce-scatter, where states rest)."""
    from jax.experimental.multihost_utils import process_allgather

    join_processes(communicator)  # as `polyaccel.jax.init_distributed` does at the beginning of a script
    offload = {"offload_optimizer": {"device": "cpu"}} if offloads else None
    engine = start(stage, name, placed, offload=offload)
    losses = [float(engine.train_batch(own_samples(communicator, step))) for step in range(STEPS)]
    params = engine.params
    spec = params["first"]["kernel"].sharding.spec
    found = jax.tree.map(lambda leaf: np.asarray(process_allgather(leaf, tiled=True)), params)
    program = engine.program(own_samples(communicator, 0)).as_text()
    states = [*jax.tree.leaves(engine.zero.params.held.states), *(getattr(engine.zero.optimizer, "_state", None) or ())]
    kinds = {leaf.sharding.memory_kind for leaf in states if leaf.ndim}
    engine.destroy()
    return losses, found, tuple(spec), "reduce-scatter" in program, kinds


def train_in_hand(communicator, stage):
    """(losses, parameters) of a step by hand at perturbed weights, and of one with two micro-batches. A leaf has no
    elements."""
    where = mesh()
    engine = polyaccel.initialize(
        model=loss_on(where),
        params={**initial_params(), "empty": np.zeros((0, 4), np.float32)},
        optimizer=transformation("adamw"),
        config=make_config(stage, train_batch_size=2 * SAMPLES, gradient_accumulation_steps=2),
        mesh=where,
        param_specs=SPECS,
    )
    loss, gradients = engine.value_and_grad(batch_of(0))
    moved = jax.tree.map(lambda leaf, one: leaf + 0.1 * one, engine.params, gradients)
    _, gradients = engine.value_and_grad(batch_of(0), moved)
    engine.apply_gradients(gradients, loss)
    losses = [float(loss), float(engine.train_batch(iter([batch_of(1), batch_of(2)])))]
    found = engine.params
    engine.destroy()
    return losses, {name: jax.tree.map(np.asarray, found[name]) for name in SPECS}


def train_plainly_in_hand():
    """As `train_in_hand`, by plain JAX and optax."""
    import optax

    update, loss = transformation("adamw"), loss_on(None)
    params = jax.tree.map(jnp.asarray, initial_params())
    state = update.init(params)

    def both(params, step):
        return jax.value_and_grad(lambda given: loss(given, batch_of(step), None)[0])(params)

    first, gradients = both(params, 0)
    gradients = both(jax.tree.map(lambda leaf, one: leaf + 0.1 * one, params, gradients), 0)[1]
    updates, state = update.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    found = [both(params, step) for step in (1, 2)]
    gradients = jax.tree.map(lambda one, two: (one + two) / 2, *(gradients for _, gradients in found))
    updates, state = update.update(gradients, state, params)
    losses = [float(first), float(np.mean([loss for loss, _ in found]))]
    return losses, jax.tree.map(np.asarray, optax.apply_updates(params, updates))


def resume(communicator, folder, name):
    """Parameters after steps on the mesh, and after as many of two runs: one at stage 3, one at another place."""
    whole = start(1, name)
    for step in range(STEPS):
        whole.train_batch(batch_of(step))
    first = start(3, name)
    for step in range(STEPS - 1):
        first.train_batch(batch_of(step))
    first.save_checkpoint(folder)
    config = {"train_batch_size": SAMPLES, "zero_optimization": {"stage": 2}}  # views mode, on one device
    optimizer = transformation(name)
    with jax.default_device(jax.devices()[0]):
        other = polyaccel.initialize(model=loss_on(None), params=initial_params(), optimizer=optimizer, config=config)
    again = start(2, name)
    for engine in (other, again):
        engine.load_checkpoint(folder)
        engine.train_batch(batch_of(STEPS - 1))
    return [jax.tree.map(np.asarray, engine.params) for engine in (whole, other, again)]


def scanned(params, batch, rng):
    """Layers in a scan, with a root before and after them."""

    def block(layer, hidden):
        return hidden + jnp.tanh(hidden @ layer["kernel"]) @ layer["kernel"].T * layer["gain"]

    hidden = batch["x"] @ params["root"]
    hidden = polyaccel.jax.scan_units(block, hidden, params["layers"])
    hidden = polyaccel.jax.unit(block)(params["last"], hidden)
    return jnp.square(hidden @ params["root"].T - batch["x"]).mean(), hidden[:, 0]


def scanned_params():
    draw = np.random.default_rng(3)
    layers = {"kernel": draw.standard_normal((3, 8, 12)).astype(np.float32) / 4, "gain": np.ones((3, 8), np.float32)}
    last = {"kernel": draw.standard_normal((8, 12)).astype(np.float32) / 4, "gain": np.ones(8, np.float32)}
    return {"root": draw.standard_normal((6, 8)).astype(np.float32) / 2, "layers": layers, "last": last}


def scanned_batch(step):
    return {"x": np.random.default_rng([4, step]).standard_normal((SAMPLES, 6)).astype(np.float32)}


def train_scanned(communicator, has_mesh):
    """(losses, evaluation, parameters, bytes of temporary memory) at stage 3, on the mesh, or a rank a device."""
    named = {"mesh": mesh(), "param_specs": {"last": P()}, "batch_spec": P("data")} if has_mesh else {}
    config = {**make_config(3), "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    named["stacked"] = ["layers"]
    engine = polyaccel.initialize(model=scanned, params=scanned_params(), config=config, **named)
    losses = [float(engine.train_batch(scanned_batch(step))) for step in range(STEPS)]
    aux = np.asarray(engine.aux).reshape(-1)
    found = losses, float(engine.eval_batch(scanned_batch(0))), aux, jax.tree.map(np.asarray, engine.params)
    engine.destroy()
    return found


def train_scanned_plainly():
    """As `train_scanned`, of views mode on one rank at stage 0."""
    config = {"train_batch_size": SAMPLES, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine = polyaccel.initialize(model=scanned, params=scanned_params(), config=config)
    losses = [float(engine.train_batch(scanned_batch(step))) for step in range(STEPS)]
    aux = np.asarray(engine.aux).reshape(-1)
    return losses, float(engine.eval_batch(scanned_batch(0))), aux, jax.tree.map(np.asarray, engine.params)
