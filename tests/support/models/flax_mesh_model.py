"""Modules of flax whose parameters have names of axes, and their training on a script's own mesh and without one."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax_mesh_model
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import polyaccel

RULES = (("batch", "data"), ("embed", None), ("mlp", "tensor"))
X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
STEPS = 3


class Logical(nn.Module):
    """Layers with logical names of axes."""

    @nn.compact
    def __call__(self, x):
        named = [
            nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            for names in (("embed", "mlp"), ("mlp", "embed"))
        ]
        hidden = nn.with_logical_constraint(nn.relu(nn.Dense(16, kernel_init=named[0])(x)), ("batch", "mlp"))
        return nn.Dense(6, kernel_init=named[1])(hidden)


class Partitioned(nnx.Module):
    """Layers with axes of the mesh, which nnx puts there when they are made."""

    def __init__(self, rngs):
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        self.up = nnx.Linear(6, 16, rngs=rngs, kernel_init=named)
        self.down = nnx.Linear(16, 6, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def train_linen(has_mesh):
    """(losses, spec of the first kernel)."""
    module = Logical()
    variables = module.init(jax.random.key(0), X)

    def loss(variables, batch, rng):
        with nn.logical_axis_rules(RULES if has_mesh else ()):
            return ((module.apply(variables, batch) - batch) ** 2).mean()

    if not has_mesh:
        return _train(loss, nn.unbox(variables)), None
    specs = nn.logical_to_mesh(nn.get_partition_spec(variables), RULES)
    named = {"mesh": jax_mesh_model.mesh(), "param_specs": specs}
    engine = _start(loss, variables, named)
    losses = [float(engine.train_batch(X)) for _ in range(STEPS)]
    return losses, nn.unbox(engine.params)["params"]["Dense_0"]["kernel"].sharding.spec


def train_nnx(has_mesh):
    """(losses, spec of the first kernel) of a module that lies on the mesh already."""

    def loss(module, batch, rng):
        return ((module(batch) - batch) ** 2).mean()

    with jax.set_mesh(jax_mesh_model.mesh()):
        module = Partitioned(nnx.Rngs(0))
    if not has_mesh:
        graph, state = nnx.split(module)
        whole = jax.tree.map(np.asarray, state)
        return _train(lambda state, batch, rng: loss(nnx.merge(graph, state), batch, rng), whole), None
    engine = _start(loss, module, {})
    losses = [float(engine.train_batch(X)) for _ in range(STEPS)]
    return losses, {leaf.sharding.spec for leaf in jax.tree.leaves(engine.params)}


def _start(loss, params, named):
    config = jax_mesh_model.make_config(3)
    return polyaccel.initialize(model=loss, params=params, optimizer=optax.adam(1e-2), config=config, **named)


def _train(loss, params):
    """Losses of plain JAX and optax."""
    update = optax.adam(1e-2)
    state, losses = update.init(params), []
    for _ in range(STEPS):
        value, gradients = jax.value_and_grad(lambda given: loss(given, X, None))(params)
        updates, state = update.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


def both(communicator):
    """Of linen and of nnx: the results on a mesh, and without one."""
    found = {}
    for name, train in {"linen": train_linen, "nnx": train_nnx}.items():
        (losses, spec), (plain, _) = train(True), train(False)
        np.testing.assert_allclose(losses, plain, rtol=1e-6)
        found[name] = spec
    return found["linen"] == P(None, "tensor"), found["nnx"] == {P(), P(None, "tensor")}
