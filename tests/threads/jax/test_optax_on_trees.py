"""Transformations of optax that look at the tree of parameters, under the engine and in plain optax."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_models import leaves
from optax_runs import STEPS, data, engine_at, loss, plainly, start, train_half

import polyaccel
from polyaccel.cli.main import main
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, PolyaccelError, ShardingError
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.traced_transformation import TracedTransformation
from polyaccel.testkit.ranks.threads import run_threads


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "emb" in jax.tree_util.keystr(path) else "trained", params
    )


def matrices(params):
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


def by_path(updates, params):
    def factor(path, update):
        return update * (0.1 if "bias" in jax.tree_util.keystr(path) else -0.1)

    return jax.tree_util.tree_map_with_path(factor, updates)


def by_length(updates, params):
    return jax.tree.map(lambda update: -0.1 * update / (update.shape[0] if update.ndim else 1), updates)


def by_index(updates, params):
    flat, structure = jax.tree.flatten(updates)
    return jax.tree.unflatten(structure, [-0.02 * at * update for at, update in enumerate(flat)])


FROZEN = {"partition", "multi_transform", "freeze"}
"""Those that leave `emb` as it was."""

TRANSFORMATIONS = {
    "partition": lambda: optax.partition({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels),
    "multi_transform": lambda: optax.multi_transform(
        {"trained": optax.sgd(1e-1, momentum=0.9), "frozen": optax.set_to_zero()}, labels(start())
    ),
    "two rates": lambda: optax.partition({"trained": optax.adam(1e-2), "frozen": optax.adam(1e-4)}, labels),
    "mask": lambda: optax.adamw(1e-2, weight_decay=1.0, mask=matrices),
    "mask as a tree": lambda: optax.adamw(1e-2, weight_decay=1.0, mask=matrices(start())),
    "freeze": lambda: optax.chain(
        optax.adam(1e-2), optax.freeze(jax.tree.map(lambda label: label == "frozen", labels(start())))
    ),
    "masked by shape": lambda: optax.chain(
        optax.sgd(1e-1),
        optax.masked(optax.scale(0.1), lambda params: jax.tree.map(lambda leaf: jnp.shape(leaf)[:1] == (5,), params)),
    ),
    "stateless, path": lambda: optax.stateless(by_path),
    "stateless, shape": lambda: optax.stateless(by_length),
    "stateless, index": lambda: optax.stateless(by_index),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2, weight_decay=1.0, mask=matrices), 2),
    "narrow moments": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "states of the weights": lambda: optax.contrib.schedule_free_adamw(1e-2, weight_decay=0.1),
    "cocob": lambda: optax.contrib.cocob(),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5, factor=0.5)
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw, static_args="mask")(
        optax.linear_schedule(1e-2, 0.0, 8), weight_decay=0.5, mask=matrices
    ),
}

WHOLE = {
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(1e-1)),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-1, key=0),
    "muon": lambda: optax.contrib.muon(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(1e-1), 2),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "frozen": lambda: optax.partition(
        {"trained": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-1)), "frozen": optax.set_to_zero()}, labels
    ),
    "lbfgs": lambda: optax.lbfgs(1e-2, memory_size=2, linesearch=None),
}
"""Those that need whole parameters, or all of them, or the loss too."""
PATIENCE_S = 240.0
"""For ranks that compile programs, and prove a first step, on a busy machine."""
OWNED = [((2, 2), (2, 2)), ((3, 2), (2, 1)), ((2, 2), (0, 2)), ((2, 1), (1, 0))]
"""Ranks and stages before and after the checkpoint: states of owners, and of all ranks."""

NATIVE = [("native 3", 2), (1, "native 2"), ("native 0", "native 3"), (2, "native 3")]
"""Stages before and after the checkpoint: of two ranks in views mode, or of one in native mode."""


def under_engines(make, worlds, stages, folder):
    """The parameters by name after the first half of the steps at the first of `stages`, a checkpoint, and the rest at
    the second."""
    for half, (world, stage) in enumerate(zip(worlds, stages, strict=True)):
        results = run_threads(world, train_half, make, stage, folder, half, timeout_s=PATIENCE_S)
    for found in results[1:]:
        for fqn, value in found.items():
            np.testing.assert_array_equal(value, results[0][fqn])
    return results[0]


PLACES = [(1, (2, 0)), (2, (0, 2)), (3, (2, 1)), (2, (2, 2)), (1, (3, 3))]
"""Ranks, and the stages before and after the checkpoint."""


@pytest.mark.parametrize(
    ("name", "world", "stages"),
    [(name, *PLACES[at % len(PLACES)]) for at, name in enumerate(TRANSFORMATIONS)]
    + [("partition", *PLACES[2]), ("mask", *PLACES[1])],
)
def test_masks_and_labels_act_on_the_tree(name, world, stages, tmp_path):
    make = TRANSFORMATIONS[name]
    extra = {"value": lambda loss: loss} if name == "reduce_on_plateau" else {}
    found = under_engines(make, (world, world), stages, tmp_path)
    for fqn, value in plainly(make, (world, world), **extra).items():
        np.testing.assert_allclose(found[fqn], value, rtol=1e-4, atol=2e-6, err_msg=fqn)
    if name in FROZEN:
        np.testing.assert_array_equal(found["emb.kernel"], start()["emb"]["kernel"])
        assert np.all(found["out.kernel"] != start()["out"]["kernel"])


def check_whole(name, worlds, stages, folder):
    """Both halves of a training end at the weights of plain optax."""
    extra = {"value": lambda loss: loss} if name == "polyak_sgd" else {}
    found = under_engines(WHOLE[name], worlds, stages, folder)
    for fqn, value in plainly(WHOLE[name], worlds, **extra).items():
        np.testing.assert_allclose(found[fqn], value, rtol=1e-4, atol=2e-6, err_msg=fqn)
    if name == "frozen":
        np.testing.assert_array_equal(found["emb.kernel"], start()["emb"]["kernel"])


@pytest.mark.parametrize(
    ("name", "worlds", "stages"), [(name, *OWNED[at % len(OWNED)]) for at, name in enumerate(WHOLE)]
)
def test_whole_parameters_serve_what_needs_them(name, worlds, stages, tmp_path):
    check_whole(name, worlds, stages, tmp_path)


@pytest.mark.parametrize(("name", "stages"), [(name, NATIVE[at % 4]) for at, name in enumerate(WHOLE)])
def test_native_mode_has_them_too(name, stages, tmp_path):
    """From native mode to ranks of views mode, or back: a checkpoint has the states of both."""
    worlds = tuple(1 if isinstance(stage, str) else 2 for stage in stages)
    check_whole(name, worlds, stages, tmp_path)


FAILING = {
    "lookahead": lambda: optax.lookahead(optax.sgd(1e-1), 2, 0.5),
    "scale_by_zoom_linesearch": lambda: optax.lbfgs(),
    "masked": lambda: optax.adamw(1e-2, mask={"another": True}),
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("stage", [0, 2])
def test_what_fails_on_the_tree_is_refused_by_name(name, stage):
    def go(_):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        with pytest.raises(ShardingError) as caught:
            polyaccel.initialize(model=loss, params=start(), optimizer=FAILING[name](), config=config)
        assert caught.value.value == name

    run_threads(1, go)


HYPERPARAMETERS = {
    "elementwise": (2, lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)),
    "owned": (1, lambda: optax.inject_hyperparams(optax.lamb)(learning_rate=0.1)),
    "on the tree": (0, lambda: optax.inject_hyperparams(optax.lamb)(learning_rate=0.1)),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters_are_read_and_set_and_stay(name, tmp_path):
    """A rate of zero changes nothing, from the first update on and after a checkpoint."""
    stage, make = HYPERPARAMETERS[name]

    def go(ranks):
        engine = engine_at(stage, make())
        assert engine.hyperparams["learning_rate"] == np.float32(0.1)
        engine.hyperparams["learning_rate"] = 0.0
        engine.train_batch(data(0, ranks.rank))
        still = leaves(engine.params)
        engine.save_checkpoint(str(tmp_path))
        engine.hyperparams["learning_rate"] = 0.5
        engine.train_batch(data(1, ranks.rank))
        assert engine.hyperparams["learning_rate"] == 0.5
        moved = leaves(engine.params)
        with pytest.raises(PolyaccelError):
            engine.hyperparams["rate"] = 1.0
        other = engine_at(stage, make())
        other.load_checkpoint(str(tmp_path))
        assert dict(other.hyperparams)["learning_rate"] == 0.0
        return still, moved

    (still, moved), _ = run_threads(2, go, timeout_s=PATIENCE_S)
    assert all(np.array_equal(value, still[fqn]) for fqn, value in leaves(jax.tree.map(jnp.asarray, start())).items())
    assert all(np.any(value != still[fqn]) for fqn, value in moved.items())


def test_a_scheduled_hyperparameter_is_read_and_not_set():
    def go(_):
        engine = engine_at(0, TRANSFORMATIONS["hyperparameters"]())
        with pytest.raises(PolyaccelError) as caught:
            engine.hyperparams["learning_rate"] = 1.0
        assert caught.value.value == "learning_rate"
        engine.hyperparams["weight_decay"] = 0.25
        assert engine.hyperparams["weight_decay"] == 0.25

    run_threads(1, go)


@pytest.mark.parametrize("stage", [0, 2])
def test_states_of_whole_parameters_rest_in_their_type_on_their_owner(stage):
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    numel = sum(np.size(leaf) for leaf in jax.tree.leaves(start()))

    def go(ranks):
        engine = engine_at(stage, transformation)
        engine.train_batch(data(0, ranks.rank))
        states = engine.zero.optimizer.states_by_path(engine.communicator)
        assert all(leaf.dtype == jnp.bfloat16 for path, leaf in states.items() if ".mu" in path)
        return engine.zero.optimizer.resting_nbytes()

    found = run_threads(2, go)
    count = 4  # bytes of the number of updates, on each rank
    total = sum(found) if stage else found[0]
    assert total == 6 * numel + count * (2 if stage else 1)


NARROW = {
    "adam": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, accumulator_dtype=jnp.float16),
}
"""Those with a state of 16 bits, the first."""


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (2, {}),
        (1, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
        (2, {"jax": {"execution": "native"}}),
    ],
)
def test_states_on_slices_rest_in_their_type(name, stage, changes):
    transformation, params = NARROW[name](), jax.tree.map(jnp.asarray, start())
    state = transformation.init(params)
    for at in range(2):
        updates, state = transformation.update(jax.jit(jax.grad(loss))(params, data(at, 0), None), state, params)
        params = optax.apply_updates(params, updates)
    wanted = next(iter(optax.tree.get_all_with_path(state, "mu" if name == "adam" else "trace")))[1]

    def go(ranks):
        engine = engine_at(stage, NARROW[name](), **changes)
        for at in range(2):
            engine.train_batch(data(at, 0))
        tensors = {(piece.fqn, piece.kind): piece.dtype for piece in engine._contents({}).pieces()}
        return engine.state_dict()["optimizer"], set(tensors.values())

    found, types = run_threads(1, go)[0]
    narrow = next(iter(found.values()))
    for one, other in zip(jax.tree.leaves(narrow), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=1e-2)
    assert types == {DType.parse(jax.tree.leaves(wanted)[0].dtype.name), DType.FLOAT32}


def test_states_of_another_transformation_are_refused(tmp_path):
    """Also those on whole parameters, whose file is no state of ours."""

    def go(_):
        def engine_of(transformation):
            config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
            return polyaccel.initialize(model=loss, params=start(), optimizer=transformation, config=config)

        engine = engine_of(WHOLE["centralize"]())
        engine.train_batch(data(0, 0))
        engine.save_checkpoint(str(tmp_path))
        other = engine_of(WHOLE["lamb"]())
        with pytest.raises(CheckpointError):
            other.load_checkpoint(str(tmp_path))
        other.load_checkpoint(str(tmp_path), load_optimizer_states=False)

    run_threads(1, go)


def test_masters_of_16_bit_parameters_and_frozen_ones():
    def go(ranks):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
        }
        engine = polyaccel.initialize(
            model=loss, params=start(), optimizer=TRANSFORMATIONS["partition"](), config=config
        )
        before = np.asarray(engine.params["emb"]["kernel"]).tobytes()
        for at in range(STEPS):
            engine.train_batch(data(at, ranks.rank))
        assert engine.params["emb"]["kernel"].dtype == jnp.bfloat16
        assert np.asarray(engine.params["emb"]["kernel"]).tobytes() == before

    run_threads(2, go)


def test_a_mask_over_leaves_that_are_not_trained():
    params = {**start(), "table": np.arange(3, dtype=np.int32)}
    mask = jax.tree.map(lambda leaf: np.ndim(leaf) > 1, params)

    def go(_):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
        engine = polyaccel.initialize(
            model=loss, params=params, optimizer=optax.adamw(1e-2, weight_decay=1.0, mask=mask), config=config
        )
        engine.train_batch(data(0, 0))
        return leaves(engine.params)

    found = run_threads(1, go)[0]
    np.testing.assert_array_equal(found["table"], [0, 1, 2])


def test_a_transformation_that_cannot_be_called_is_no_transformation():
    config = {"train_micro_batch_size_per_gpu": 4}
    with pytest.raises(PolyaccelError):
        run_threads(1, lambda _: polyaccel.initialize(model=loss, params=start(), optimizer=3, config=config))


# fmt: off
ELEMENTWISE = [
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adan", "amsgrad", "apply_every", "clip", "ema",
    "keep_params_nonnegative", "lion", "nadamw", "optimistic_adam_v2", "radam", "rmsprop", "rprop",
    "scale_by_rss", "scale_by_stddev", "sgd", "signum", "zero_nans", "contrib.adopt", "contrib.ademamix",
    "contrib.madgrad", "contrib.schedule_free_sgd",
]
# fmt: on
"""Transformations of optax whose elements are independent, by their names; given a rate, or nothing."""


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_no_elementwise_transformation_is_refused(name):
    """Every slice of every parameter moves as in plain optax, from states of its own."""
    factory = optax
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if factory is None:
        pytest.skip("not in this version of optax")
    try:
        transformation = factory(1e-2)
    except TypeError:
        transformation = factory()
    tree = {"kernel": start()["emb"]["kernel"], "bias": start()["norm"]["scale"]}
    params, state = tree, transformation.init(tree)
    optimizer = OptaxOptimizer(TracedTransformation(transformation, tree))
    parts = {(fqn, at): [jnp.asarray(part), {}] for fqn, leaf in tree.items() for at, part in enumerate(halves(leaf))}
    for (fqn, _), held in parts.items():
        starts = optimizer.programs[fqn].starts
        held[1] = {name: jnp.full(held[0].shape, start or 0.0) for name, start in starts.items()}
    numbers = optimizer.numbers
    for step in range(2):
        grads = jax.tree.map(lambda leaf, step=step: jnp.cos(7.0 * leaf + step), tree)
        updates, state = transformation.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for (fqn, at), held in parts.items():
            gradient = jnp.asarray(halves(np.asarray(grads[fqn]))[at])
            held[:] = optimizer.step(optimizer.programs[fqn], held[0], gradient, held[1], numbers, 1.0)
        numbers = optimizer.numbers_after(numbers)
    for fqn, leaf in params.items():
        found = np.concatenate([parts[fqn, 0][0], parts[fqn, 1][0]])
        np.testing.assert_allclose(found, np.ravel(leaf), rtol=1e-4, atol=1e-6)


def halves(leaf):
    """A leaf, flat, in two unequal parts."""
    return np.split(np.ravel(leaf), [np.size(leaf) * 3 // 8])


@pytest.mark.parametrize("storage", ["shared", "node_local"])
def test_states_of_owners_are_found_on_other_hosts_and_after_a_reshard(tmp_path, storage):
    """Each of three ranks owns states. On hosts with disks of their own no rank has the files of all."""

    def go(ranks, name, world):
        settings = {"checkpoint": {"storage": "node_local"}} if storage == "node_local" else {}
        own = f"{name}/host{ranks.rank}" if settings and world == 3 else name
        engine = engine_at(2, optax.adafactor(0.1), **(settings if world == 3 else {}))
        for at in range(2):
            if world == 3 and at == 1:
                engine.save_checkpoint(str(tmp_path / own))
                engine.destroy()
                engine = engine_at(2, optax.adafactor(0.1), **settings)
            if at == 1:
                engine.load_checkpoint(str(tmp_path / own))
            if world == 3 or at == 1:
                engine.train_batch(data(at, 0))
        return leaves(engine.params)

    wanted = plainly(lambda: optax.adafactor(0.1), (1,), steps=2)
    for found in run_threads(3, go, "saved", 3):
        for fqn, value in wanted.items():
            np.testing.assert_allclose(found[fqn], value, rtol=1e-4, atol=2e-6, err_msg=fqn)
    if storage == "shared":
        assert main(["ckpt", "reshard", str(tmp_path / "saved"), str(tmp_path / "other"), "--ranks", "2"]) == 0
        for found in run_threads(2, go, "other", 2):
            for fqn, value in wanted.items():
                np.testing.assert_allclose(found[fqn], value, rtol=1e-4, atol=2e-6, err_msg=fqn)
