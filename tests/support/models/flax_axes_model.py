"""Modules of flax with logical names of axes, trained on the axes of a config, and by plain JAX and optax."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax_mesh_model
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.jax.native.mesh import join_processes

STEPS = 3
TOKENS = np.random.default_rng(0).integers(0, 12, (8, 6))
CONFIG = {"train_batch_size": 8, "jax": {"execution": "native"}, "verify": "off"}


def _named(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Transformer(nn.Module):
    """Attention, experts that weigh each token, and a tied table, as MaxText names their dimensions."""

    @nn.compact
    def __call__(self, tokens):
        table = self.param(
            "table", nn.with_logical_partitioning(nn.initializers.normal(0.5), ("vocab", "embed")), (12, 8)
        )
        x = nn.with_logical_constraint(table[tokens], ("batch", "length", "embed"))
        q, k, v = (self.param(name, _named("embed", "heads", "kv"), (8, 2, 4)) for name in ("query", "key", "value"))
        weights = jax.nn.softmax(
            jnp.einsum("bshd,bthd->bhst", *(jnp.einsum("bse,ehd->bshd", x, one) for one in (q, k)))
        )
        mixed = jnp.einsum("bhst,bthd->bshd", weights, jnp.einsum("bse,ehd->bshd", x, v))
        x = x + mixed.reshape(*x.shape)
        up = self.param("up", _named("expert", "embed", "mlp"), (2, 8, 16))
        down = self.param("down", _named("expert", "mlp", "embed"), (2, 16, 8))
        gate = jax.nn.softmax(x @ self.param("gate", _named("embed", None), (8, 2)))
        hidden = nn.with_logical_constraint(
            jax.nn.relu(jnp.einsum("bse,xem->bxsm", x, up)), ("batch", None, None, "mlp")
        )
        x = x + jnp.einsum("bxsm,xme,bsx->bse", hidden, down, gate)
        logits = x @ table.T
        return -(jax.nn.log_softmax(logits[:, :-1]) * jax.nn.one_hot(tokens[:, 1:], 12)).sum(-1).mean()


class Layers(nnx.Module):
    """Layers of nnx with names that a rule of the script has."""

    def __init__(self, rngs, is_eager=False):
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "wide"))
        with nnx.use_eager_sharding(is_eager):
            self.up = nnx.Linear(6, 16, rngs=rngs, kernel_init=named)
            self.down = nnx.Linear(16, 6, rngs=rngs)

    def __call__(self, x):
        return ((self.down(nnx.relu(self.up(x))) - x) ** 2).mean()


def train_linen(communicator, stage, mesh):
    """(losses, specs by name, whole parameters) of the module as it is."""
    join_processes(communicator)
    module = Transformer()
    params = module.init(jax.random.key(0), TOKENS)
    config = {**CONFIG, "zero_optimization": {"stage": stage, "param_persistence_threshold": 0}, "mesh": mesh}
    engine = polyaccel.initialize(model=module, params=params, optimizer=optax.adam(1e-2), config=config)
    own = np.array_split(TOKENS, communicator.world_size)[communicator.rank]
    if communicator.world_size > 1 and "sequence" in mesh:  # both processes have the one part of a batch
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(own)
        assert caught.value.value == (0, 1)
        own = TOKENS
    losses = [float(engine.train_batch(own)) for _ in range(STEPS)]
    found = nn.unbox(engine.params)
    specs = {name: tuple(leaf.sharding.spec) for name, leaf in found.items()}
    whole = jax.tree.map(_on_host, found)
    engine.destroy()
    return losses, specs, whole


def _on_host(leaf):
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(leaf, tiled=True))


def train_nnx(communicator):
    """Losses with a rule of the script, of a module that lies on a mesh, and of plain JAX; whether both are cut."""
    x = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32)
    named = {"optimizer": optax.adam(1e-2), "config": {**CONFIG, "zero_optimization": {"stage": 2}}}
    with jax.set_mesh(jax_mesh_model.mesh()), nnx.logical_axis_rules((("wide", "tensor"), ("embed", None))):
        there = Layers(nnx.Rngs(0), is_eager=True)
    ruled = {**named, "config": {**named["config"], "mesh": {"tensor": 2}}, "axis_rules": (("wide", "tensor"),)}
    found, cut = [], []
    for model, arguments in ((Layers(nnx.Rngs(0)), ruled), (there, named)):
        engine = polyaccel.initialize(model=model, **arguments)
        found.append([float(engine.train_batch(x)) for _ in range(STEPS)])
        cut.append({leaf.sharding.spec for leaf in jax.tree.leaves(engine.params)} == {P(), P(None, "tensor")})
    graph, state = nnx.split(Layers(nnx.Rngs(0)))
    plain, _ = _plainly(lambda params: nnx.merge(graph, params)(x), jax.tree.map(np.asarray, state))
    return *found, plain, cut


def train_linen_plainly():
    """As `train_linen`, by plain JAX and optax: (losses, parameters)."""
    module = Transformer()
    params = nn.unbox(module.init(jax.random.key(0), TOKENS))["params"]
    return _plainly(lambda own: module.apply({"params": own}, TOKENS), params)


def _plainly(loss, params):
    update = optax.adam(1e-2)
    state, losses = update.init(params), []
    both = jax.jit(jax.value_and_grad(loss))
    for _ in range(STEPS):
        value, gradients = both(params)
        updates, state = update.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, jax.tree.map(np.asarray, params)
