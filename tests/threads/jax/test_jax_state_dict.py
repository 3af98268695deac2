"""`engine.state_dict()` through orbax's manager: a run that resumes equals the run that never stopped, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

import jax
import jax.numpy as jnp
import jax_state_models as models
import optax
import orbax.checkpoint as ocp

import polyaccel
from polyaccel.cli.main import main
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

NATIVE = {"jax": {"execution": "native"}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 50}}}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def loss_fn(params, state, batch, rng):
    x, count = batch, state["seen"]["count"] + 1
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    x = x + 0.01 * jax.random.normal(rng, x.shape)
    mean = 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(x.mean(0))
    return jnp.square(x.sum(-1) - mean.sum() - params["out"]).mean(), {"mean": mean, "seen": {"count": count}}


def engine_of(stage, transformation=None, **changes):
    layers = [{"w": jax.random.normal(jax.random.key(at), (6, 6)), "b": jnp.zeros(6)} for at in range(2)]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "verify": "off",
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64},
        **({} if transformation is not None else ADAMW),
        **changes,
    }
    return polyaccel.initialize(
        model=loss_fn,
        params={"layers": layers, "out": jnp.float32(0.5)},
        state={"mean": jnp.zeros(6), "seen": {"count": 0}},
        optimizer=transformation,
        config=config,
        seed=3,
    )


def batch_of(step, rank=0):
    return np.random.default_rng([step, rank]).standard_normal((8, 6), dtype=np.float32)


def losses_of(engine, steps, rank=0):
    return [float(engine.train_batch(batch_of(step, rank))) for step in steps]


def same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(np.array_equal(*pair) for pair in pairs)


TRANSFORMATIONS = {
    "config": (None, SCHEDULE),
    "fp16": (None, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "elementwise": (lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 20), mu_dtype=jnp.bfloat16), {}),
    "whole": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(0.01)), {}),
}
CASES = [
    ("config", 0, {}),
    ("config", 2, NATIVE),
    ("fp16", 2, {}),
    ("elementwise", 3, {}),
    ("whole", 2, {}),
]


@pytest.mark.parametrize(("kind", "stage", "changes"), CASES)
def test_orbax_restores_into_a_new_engine(tmp_path, kind, stage, changes):
    make, more = TRANSFORMATIONS[kind]

    def engine():
        return engine_of(stage, make and make(), **more, **changes)

    def go(ranks):
        first = engine()
        losses_of(first, range(2))
        saved = first.state_dict()
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(saved))
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(2, args=ocp.args.StandardSave(saved))
            manager.wait_until_finished()
            restored = [manager.restore(2, args=ocp.args.StandardRestore())]
            if kind in ("config", "whole"):
                restored.append(manager.restore(2, args=ocp.args.StandardRestore(engine().state_dict())))
        wanted = losses_of(first, range(2, 5)), first.state_dict()
        for tree in restored:
            again = engine()
            again.load_state_dict(tree)
            assert again.global_steps == json.loads(bytes(tree["engine"]))["counters"]["global_steps"] == 2
            assert losses_of(again, range(2, 5)) == wanted[0]
            assert same(again.state_dict(), wanted[1])

    run_threads(1, go)


@pytest.mark.parametrize("kind", ["config", "whole"])
def test_trees_and_checkpoints_become_each_other(tmp_path, kind):
    make, more = TRANSFORMATIONS[kind]
    folder, tree, back, out = (str(tmp_path / name) for name in ("folder", "tree", "back", "out"))

    def go(ranks):
        first, by_folder, by_tree = (engine_of(2, make and make(), **more) for _ in range(3))
        losses_of(first, range(2))
        first.save_checkpoint(folder)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tree, first.state_dict())
            checkpointer.wait_until_finished()
            assert main(["ckpt", "import", tree, back, "--from", "orbax"]) == 0
            assert main(["ckpt", "export", folder, out, "--format", "orbax"]) == 0
            by_folder.load_checkpoint(back)
            by_tree.load_state_dict(checkpointer.restore(out))
        wanted = losses_of(first, range(2, 4))
        assert losses_of(by_folder, range(2, 4)) == losses_of(by_tree, range(2, 4)) == wanted

    run_threads(1, go)


@pytest.mark.parametrize("changes", [{}, NATIVE])
def test_a_tree_of_no_step_begins_as_a_new_engine_does(changes):
    """Slow weights begin as copies of the parameters, and a number was set."""

    def go(ranks):
        def make():
            def chain(rate):
                return optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.schedule_free_adamw(rate))

            return engine_of(0, optax.inject_hyperparams(chain)(rate=0.1), **changes)

        first, again = make(), make()
        first.hyperparams["rate"] = 0.05
        assert "optax" in first.state_dict()["optimizer"]
        again.load_state_dict(first.state_dict())
        assert again.hyperparams["rate"] == pytest.approx(0.05)
        assert losses_of(again, range(3)) == losses_of(first, range(3))
        assert same(again.state_dict(), first.state_dict())

    run_threads(1, go)


def test_stages_of_a_pipeline():
    def layer(params, value, rng):
        return jnp.tanh(value @ params["w"])

    def last(params, pair, rng):
        return jnp.square((pair[0] @ params["w"]).sum(-1) - pair[1].sum(-1)).mean()

    def go(ranks):
        params = [{"w": jax.random.normal(jax.random.key(at), (6, 6))} for at in range(3)]
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "verify": "off", **ADAMW}
        config["pipeline"] = {"stages": 2}
        engine = polyaccel.initialize(model=[layer, layer, last], params=params, config=config)
        pairs = [(batch_of(at)[:4], batch_of(at)[4:]) for at in range(2)]
        engine.train_batch(iter(pairs))
        first = engine.state_dict()
        engine.train_batch(iter(pairs))
        second = engine.state_dict()
        engine.load_state_dict(first)
        assert same(engine.state_dict(), first)
        engine.train_batch(iter(pairs))
        assert same(engine.state_dict(), second)
        return second["params"]

    one, other = run_threads(2, go)
    assert same(one, other)
    assert [each["w"].shape for each in one.values()] == [(6, 6)] * 3


def test_ranks_become_fewer(tmp_path):
    def save(ranks):
        engine = engine_of(2)
        losses_of(engine, range(2), ranks.rank)
        engine.save_checkpoint(str(tmp_path))
        return engine.state_dict()

    one, other = run_threads(2, save)
    assert same(one, other)

    def go(ranks):
        by_tree, by_folder = engine_of(1), engine_of(1)
        by_tree.load_state_dict(jax.tree.map(jnp.asarray, one))
        by_folder.load_checkpoint(str(tmp_path))
        assert same(by_tree.state_dict(), one)
        assert losses_of(by_tree, range(2, 4)) == losses_of(by_folder, range(2, 4))

    run_threads(1, go)

    def diverge(ranks):
        engine = engine_of(2)
        before = engine.state_dict()
        mine = {**one, "params": jax.tree.map(lambda leaf: leaf + ranks.rank, one["params"])}
        with pytest.raises(CheckpointError):
            engine.load_state_dict(mine)
        assert same(engine.state_dict(), before)

    run_threads(2, diverge)


def test_other_trees_change_nothing():
    def go(ranks):
        engine = engine_of(2)
        losses_of(engine, range(1))
        good, before = engine.state_dict(), engine.state_dict()
        params, optimizer = good["params"], good["optimizer"]
        first = params["layers"][0]
        bad = {
            "params/layers/1/b": {**good, "params": {**params, "layers": [params["layers"][0], {"w": first["w"]}]}},
            "params/more": {**good, "params": {**params, "more": np.zeros(2)}},
            "params/layers/0/b": {
                **good,
                "params": {**params, "layers": [{**first, "b": np.zeros(5)}, params["layers"][1]]},
            },
            "optimizer/exp_avg": {**good, "optimizer": {"exp_avg_sq": optimizer["exp_avg_sq"]}},
            "optimizer/other": {**good, "optimizer": {**optimizer, "other": optimizer["exp_avg"]}},
            "engine": {name: good[name] for name in good if name != "engine"},
            "step": {**good, "step": np.int32(1)},
            "state": {name: good[name] for name in good if name != "state"},
            "params": {
                **good,
                "params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params),
            },
        }
        for place, tree in bad.items():
            with pytest.raises(CheckpointError) as caught:
                engine.load_state_dict(tree)
            assert place in caught.value.message
            assert caught.value.hint
            assert same(engine.state_dict(), before), place
        sgd = engine_of(2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
        with pytest.raises(CheckpointError):
            sgd.load_state_dict(good)
        engine.grad_step(batch_of(9)[:4])
        with pytest.raises(CheckpointError):
            engine.state_dict()

    run_threads(1, go)


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_trees_of_modules(kind):
    def go(ranks):
        engine = models.engine_of(kind, 2, 1)
        engine.train_batch(models.data(0))
        saved = engine.state_dict()
        assert same(saved["params"], jax.tree.map(np.asarray, engine.params))
        assert all(map(np.array_equal, models.flat(saved["state"]), models.flat(engine.state)))
        again = models.engine_of(kind, 2, 1)
        again.load_state_dict(saved)
        assert same(again.state_dict(), saved)
        assert float(again.train_batch(models.data(1))) == float(engine.train_batch(models.data(1)))

    run_threads(1, go)
