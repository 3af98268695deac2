"""Functions of JAX under verification: right programs are proven, wrong rewrites are found and named.

`TESTS_JAX_PROOFS=full` runs all programs and plants; otherwise a sample. Cases of several devices in native mode need
`XLA_FLAGS=--xla_force_host_platform_device_count=2`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.jax import engine as engines
from polyaccel.jax import modules, replicated, rewrites, scan_units, unit
from polyaccel.jax.native.program import StepProgram
from polyaccel.jax.optax_on_tree import optax_optimizer
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.pipeline_engine import JaxPipelineEngine
from polyaccel.jax.program.gathered_units import Members
from polyaccel.jax.program.params import ShardedParams
from polyaccel.jax.program.units import UnitRecomputation
from polyaccel.jax.pytree import named_leaves
from polyaccel.verify.prove import Proof, prove, threads_run

IS_FULL = os.environ.get("TESTS_JAX_PROOFS") == "full"
WIDTH, LAYERS = 4, 3


def sampled(names: Any, every: int) -> list[str]:
    return list(names) if IS_FULL else list(names)[::every]


# Programs.


def weights() -> Any:
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (0.3 * draw.standard_normal(shape)).astype(np.float32)

    return {
        "emb": {"kernel": normal(WIDTH, WIDTH)},
        "layers": [{"kernel": normal(WIDTH, WIDTH), "scale": 1 + normal(WIDTH)} for _ in range(LAYERS)],
        "out": {"kernel": normal(WIDTH, 3), "bias": normal(3)},
    }


def stacked() -> Any:
    params = weights()
    return {**params, "layers": jax.tree.map(lambda *parts: np.stack(parts), *params["layers"])}


def block(layer: Any, hidden: Any) -> Any:
    return hidden + jnp.tanh(hidden @ layer["kernel"]) * layer["scale"]


def loss_of(params: Any, hidden: Any, labels: Any) -> Any:
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def plain(params: Any, batch: Any, rng: Any) -> Any:
    hidden = batch["x"] @ params["emb"]["kernel"]
    for layer in params["layers"]:
        hidden = block(layer, hidden)
    return loss_of(params, hidden, batch["y"]).mean()


def in_units(params: Any, batch: Any, rng: Any) -> Any:
    hidden = batch["x"] @ params["emb"]["kernel"]
    for layer in params["layers"]:
        hidden = unit(block)(layer, hidden)
    return loss_of(params, hidden, batch["y"]).mean(), {"hidden": hidden.mean()}


def scanned(params: Any, batch: Any, rng: Any) -> Any:
    hidden = scan_units(block, batch["x"] @ params["emb"]["kernel"], params["layers"])
    return loss_of(params, hidden, batch["y"]).mean()


def noisy(params: Any, batch: Any, rng: Any) -> Any:
    hidden = batch["x"] @ params["emb"]["kernel"]
    for at, layer in enumerate(params["layers"]):
        kept = 1.0 if rng is None else jax.random.bernoulli(jax.random.fold_in(rng, at), 0.8, hidden.shape)
        hidden = unit(block)(layer, hidden * kept)
    return loss_of(params, hidden, batch["y"]).mean()


def weighted(params: Any, batch: Any, rng: Any) -> Any:
    hidden = batch["x"] @ params["emb"]["kernel"]
    return (batch["weights"][batch["y"]] * loss_of(params, hidden, batch["y"])).mean()


def padded(params: Any, batch: Any, rng: Any) -> Any:
    """A mean over samples that count, of which parts of a batch have unlike numbers."""
    counts = batch["y"] > 0
    found = loss_of(params, batch["x"] @ params["emb"]["kernel"], batch["y"])
    return jnp.where(counts, found, 0.0).sum() / jnp.maximum(counts.sum(), 1)


def scaled(params: Any, batch: Any, rng: Any) -> Any:
    """A gradient of its own, an integer leaf, tied weights."""
    hidden = jax.lax.stop_gradient(batch["x"]) @ params["emb"]["kernel"]
    hidden = hidden @ params["emb"]["kernel"].T
    return loss_of(params, hidden[:, params["order"]], batch["y"]).mean()


def data(step: int, rank: int, samples: int) -> Any:
    draw = np.random.default_rng([step, rank])
    return {
        "x": draw.standard_normal((samples, WIDTH)).astype(np.float32),
        "y": draw.integers(0, 3, samples),
    }


def with_weights(step: int, rank: int, samples: int) -> Any:
    """Class weights as long as the batch, which a cut of the batch cuts too."""
    return {**data(step, rank, samples), "weights": np.linspace(1.0, 4.0, samples, dtype=np.float32)}


def with_marked_weights(step: int, rank: int, samples: int) -> Any:
    found = with_weights(step, rank, samples)
    return {**found, "weights": replicated(found["weights"])}


def tuples(step: int, rank: int, samples: int) -> Any:
    found = data(step, rank, samples)
    return found["x"], found["x"].sum(axis=1)


def linen_module() -> tuple[Any, Any]:
    from jax_block_modules import Linen

    model = Linen()
    return model, model.init(jax.random.key(0), jnp.ones((2, WIDTH)), jnp.ones(2))


def nnx_module() -> tuple[Any, Any]:
    from flax import nnx
    from jax_block_modules import Nnx

    return Nnx(nnx.Rngs(0)), None


def equinox_module() -> tuple[Any, Any]:
    import equinox

    class Model(equinox.Module):
        enter: equinox.nn.Linear
        blocks: list[equinox.nn.Linear]

        def __call__(self, x: Any, y: Any) -> Any:
            hidden = jax.vmap(self.enter)(x)
            for one in self.blocks:
                hidden = hidden + jnp.tanh(jax.vmap(one)(hidden))
            return jnp.square(hidden.sum(axis=-1) - y).mean()

    keys = jax.random.split(jax.random.key(0), 1 + LAYERS)
    return Model(
        equinox.nn.Linear(WIDTH, WIDTH, key=keys[0]),
        [equinox.nn.Linear(WIDTH, WIDTH, key=key) for key in keys[1:]],
    ), None


def layer_list() -> tuple[Any, Any]:
    def hidden(params: Any, value: Any, rng: Any) -> Any:
        return jnp.tanh(value @ params["kernel"] + params["bias"])

    def loss(params: Any, value: Any, rng: Any) -> Any:
        given, labels = value
        return jnp.square(given @ params["kernel"] - labels[:, None]).mean()

    draw = np.random.default_rng(0)
    params = [
        {"kernel": draw.standard_normal((WIDTH, WIDTH)).astype(np.float32), "bias": np.full(WIDTH, 0.1, np.float32)}
        for _ in range(3)
    ]
    return [hidden, hidden, hidden, loss], [*params, {"kernel": draw.standard_normal((WIDTH, 1)).astype(np.float32)}]


def with_order() -> tuple[Any, Any]:
    return scaled, {**weights(), "order": np.arange(WIDTH, dtype=np.int32)[::-1].copy()}


@dataclass(frozen=True)
class Program:
    make: Callable[[], tuple[Any, Any]]
    optimizer: Callable[[], Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[int, int, int], Any] = data
    ranks: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        model, params = self.make()
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, **self.config}
        if self.optimizer is not None:
            del config["optimizer"]
        tx = None if self.optimizer is None else self.optimizer()
        engine = polyaccel.initialize(model=model, params=params, optimizer=tx, config=config, **self.arguments)
        rank, devices = default_communicator().rank, jax.local_device_count() if "jax" in self.config else 1
        rank = engine.mesh.coordinates(rank)["data"] if "jax" not in self.config else rank
        for step in range(3):
            engine.train_batch(self.batches(step, rank, 4 * devices * SIZES.get(self.ranks_of_steps(), 1)))
        raise AssertionError("the program ran on after its last step")

    def ranks_of_steps(self) -> int:
        return self.config.get("gradient_accumulation_steps", 1)

    def prove(self) -> Proof:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return prove(threads_run(self.ranks, self.run))


SIZES = {1: 1, 2: 2, 4: 4}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
STAGE_3 = {"zero_optimization": {"stage": 3}}
STAGE_2 = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 20}}
NATIVE = {"jax": {"execution": "native"}}
TWICE = {"gradient_accumulation_steps": 2}
RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
STAGES = {"pipeline": {"stages": 2}, **TWICE}


def function(fn: Any, params: Callable[[], Any] = weights) -> Callable[[], tuple[Any, Any]]:
    return lambda: (fn, params())


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "frozen" if path[0].key == "emb" else "trained", params)


def masked() -> Any:
    return optax.adamw(1e-2, weight_decay=1.0, mask=matrices)


def partitioned() -> Any:
    return optax.partition({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)


def by_dimensions() -> Any:
    scale = optax.stateless(lambda updates, params: jax.tree.map(lambda one: one * one.ndim, updates))
    return optax.chain(scale, optax.sgd(1e-2))


def centralized() -> Any:
    return optax.chain(optax.centralize(), optax.sgd(1e-2, momentum=0.9))


RIGHT = {
    "function, AdamW": Program(function(plain)),
    "function, AdamW, stage 2, two ranks, accumulation": Program(function(plain), None, {**STAGE_2, **TWICE}, ranks=2),
    "units, stage 3": Program(function(in_units), None, STAGE_3),
    "scanned units, stage 3, Adam, clipping": Program(
        function(scanned, stacked),
        None,
        {**STAGE_3, "gradient_clipping": 0.1, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}},
        arguments={"stacked": ["layers"]},
    ),
    "units recomputed": Program(function(in_units), None, RECOMPUTED),
    "units recomputed, matmul kept, stage 3": Program(
        function(in_units), None, {**STAGE_3, "activation_checkpointing": {"enabled": True, "keep": ["matmul"]}}
    ),
    "noise": Program(function(noisy), None, {**TWICE, **STAGE_2}, ranks=2),
    "noise, recomputed, stage 3": Program(function(noisy), None, {**RECOMPUTED, **STAGE_3, **TWICE}),
    "marked class weights, accumulation": Program(function(weighted), None, TWICE, with_marked_weights),
    "padding, accumulation": Program(function(padded), None, TWICE),
    "padding, native": Program(function(padded), None, {**NATIVE, **TWICE}),
    "sum over samples, accumulation": Program(
        function(lambda params, batch, rng: len(batch["y"]) * plain(params, batch, rng)), None, TWICE
    ),
    "tied weights, integers": Program(with_order, None, STAGE_2, ranks=2),
    "native": Program(function(plain), None, {**NATIVE, **STAGE_2}),
    "native, noise, accumulation, SGD": Program(
        function(noisy),
        None,
        {**NATIVE, **TWICE, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}},
    ),
    "native, marked class weights": Program(function(weighted), None, NATIVE, with_marked_weights),
    "native, mask": Program(function(plain), masked, {**NATIVE, **STAGE_2}),
    "native, partition": Program(function(plain), partitioned, {**NATIVE, **STAGE_2}),
    "linen": Program(linen_module, None, {**STAGE_3, **TWICE}, tuples),
    "linen, recomputed": Program(linen_module, None, RECOMPUTED, tuples),
    "nnx, stage 3": Program(
        nnx_module, None, STAGE_3, lambda *a: tuple(v[..., :3] if v.ndim > 1 else v for v in tuples(*a))
    ),
    "equinox, stage 3": Program(equinox_module, None, STAGE_3, tuples),
    "equinox, recomputed, accumulation": Program(equinox_module, None, {**RECOMPUTED, **TWICE}, tuples),
    "stages": Program(layer_list, None, STAGES, tuples, ranks=2),
    "stages, ZeRO 1, two data ranks": Program(
        layer_list, None, {**STAGES, "zero_optimization": {"stage": 1}}, tuples, ranks=4
    ),
    "list of layers, stage 3": Program(layer_list, None, STAGE_3, tuples),
    "mask": Program(function(plain), masked, STAGE_2, ranks=2),
    "mask, stage 3, scanned": Program(function(scanned, stacked), masked, STAGE_3, arguments={"stacked": ["layers"]}),
    "partition": Program(function(plain), partitioned, STAGE_2, ranks=2),
    "centralize": Program(function(plain), centralized),
    "sm3": Program(function(plain), lambda: optax.sm3(1e-2)),
    "schedule": Program(
        function(plain), lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)), {**STAGE_2, **TWICE}, ranks=2
    ),
    "inject_hyperparams": Program(
        function(plain), lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2), STAGE_2
    ),
    "MultiSteps": Program(function(plain), lambda: optax.MultiSteps(optax.adam(1e-2), 2)),
    "apply_if_finite": Program(function(plain), lambda: optax.apply_if_finite(optax.adam(1e-2), 3)),
    "adafactor": Program(function(plain), lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2)),
    "lamb": Program(function(plain), lambda: optax.lamb(1e-2)),
    "lion, stage 3": Program(function(in_units), lambda: optax.lion(1e-3), STAGE_3),
    "schedule-free": Program(function(plain), lambda: optax.contrib.schedule_free_adamw(1e-2), STAGE_2, ranks=2),
    "Lion of the config, bf16": Program(
        function(plain), None, {"bf16": {"enabled": True}, "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
    ),
    "Adagrad of the config, fp16": Program(
        function(plain), None, {"fp16": {"enabled": True}, "optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}
    ),
}


@pytest.mark.parametrize("name", sampled(RIGHT, 9))
def test_right_programs_are_proven(name: str) -> None:
    proof = RIGHT[name].prove()
    assert proof.is_proven, [str(one) for one in proof.findings[:5]] + list(proof.differing)
    assert not proof.is_weak
    assert proof.quantities > 20
    assert all(proof.acted.values()), proof.acted


# Wrong rewrites.


def flatten_trees(patch: pytest.MonkeyPatch) -> None:
    """A transformation that runs on slices gets flat arrays, whose names are not paths."""

    def wrongly(client: Any, params: Any, dtype: Any, *, may_be_whole: bool, on_slices: bool, **named: Any) -> Any:
        if on_slices:
            params = {fqn: np.reshape(leaf, -1) for fqn, leaf in named_leaves(params)[0].items()}
        return optax_optimizer(client, params, dtype, may_be_whole=may_be_whole, on_slices=on_slices, **named)

    patch.setattr(rewrites, "optax_optimizer", wrongly)


def change(owner: Any, name: str, wrongly: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Plants `wrongly(right, *arguments)` in place of a method."""
    right = getattr(owner, name)

    def plant(patch: pytest.MonkeyPatch) -> None:
        def call(*arguments: Any, **named: Any) -> Any:
            return wrongly(right, *arguments, **named)

        patch.setattr(owner, name, call)

    return plant


def doubled(right: Any, self: Any, program: Any, weights: Any, gradient: Any, *rest: Any) -> Any:
    return right(self, program, weights, 2 * gradient, *rest)


def forgotten_unit(right: Any, self: Any, names: Any, gradients: Any, uses: Any) -> None:
    for name, gradient in zip(names, gradients, strict=True):
        if "layers.1.kernel" in name:
            gradient.fill(0.0)
    right(self, names, gradients, uses)


def of_ones(right: Any, self: Any, names: Any, outs: Any) -> None:
    right(self, names, outs)
    for name, out in zip(names, outs, strict=True):
        if name == "layers.0.scale":
            out.fill(1.0)


def scaled_block(right: Any, self: Any, inner: Any) -> Any:
    return right(self, lambda *given: 1.001 * inner(*given))


def same_part(right: Any, batch: Any, count: int, **named: Any) -> Any:
    return [right(batch, count, **named)[0]] * count


def larger_last(right: Any, self: Any, names: Any, gradients: Any) -> None:
    right(self, names, [1.01 * one if "2.bias" in name else one for name, one in zip(names, gradients, strict=True)])


def device_sum(right: Any, self: Any, bucket: Any, gradient: Any) -> Any:
    return right(self, bucket, gradient) * 2


def without_decay(right: Any, self: Any, *given: Any) -> Any:
    after = right(self, *given)
    return {name: value if "count" not in name else 0.0 * value for name, value in after.items()}


def other_weights(right: Any, model: Any, blocks: Any) -> Any:
    import equinox

    found = right(model, blocks)
    if not blocks:  # as in a plain run
        return found
    return equinox.tree_at(lambda one: one.enter.bias, found, 2 * found.enter.bias)


SCANNED = RIGHT["scanned units, stage 3, Adam, clipping"]
SPREAD = {**NATIVE, **STAGE_2}
WRONG: dict[str, tuple[str, Program, Callable[[pytest.MonkeyPatch], None]]] = {
    "gradient doubled on slices": (
        "optax",
        Program(function(plain), lambda: optax.sgd(0.1)),
        change(OptaxOptimizer, "step", doubled),
    ),
    "count of updates forgotten": (
        "optax",
        Program(function(plain), lambda: optax.adam(1e-2)),
        change(OptaxOptimizer, "numbers_after", without_decay),
    ),
    "gradient of a unit forgotten": (
        "zero_optimization",
        Program(function(in_units), None, STAGE_3),
        change(ShardedParams, "reduce", forgotten_unit),
    ),
    "parameter of a unit replaced": (
        "zero_optimization",
        Program(function(in_units), None, STAGE_3),
        change(ShardedParams, "fetch", of_ones),
    ),
    "layers of a scan are the first": (
        "zero_optimization",
        SCANNED,
        change(Members, "_index_in", lambda right, self, operands: 0),
    ),
    "recomputed block with a factor": (
        "activation_checkpointing",
        Program(function(in_units), None, RECOMPUTED),
        change(UnitRecomputation, "wrap", scaled_block),
    ),
    "micro-batches of the same samples": (
        "gradient_accumulation_steps",
        Program(function(plain), None, TWICE),
        change(engines, "split_batch", same_part),
    ),
    "gradient of a stage with a factor": (
        "pipeline",
        RIGHT["stages"],
        change(JaxPipelineEngine, "_hand_over", larger_last),
    ),
    "sum over devices in place of a mean": (
        "jax",
        Program(function(plain), None, SPREAD),
        change(StepProgram, "_reduce", device_sum),
    ),
    "bias of a module doubled": (
        "model",
        Program(equinox_module, None, STAGE_3, tuples),
        change(modules, "equinox_with_units", other_weights),
    ),
    # The faults that the prototype of the proof knew, as they were.
    "mask by dimensions, flat": ("optax", RIGHT["mask"], flatten_trees),
    "partition by path, flat": ("optax", RIGHT["partition"], flatten_trees),
    "partition by path, flat, native": ("optax", RIGHT["native, partition"], flatten_trees),
    "centralize, flat": ("optax", RIGHT["centralize"], flatten_trees),
    "factor by dimensions, flat": ("optax", Program(function(plain), by_dimensions), flatten_trees),
    "class weights cut by accumulation": (
        "gradient_accumulation_steps",
        Program(function(weighted), None, TWICE, with_weights),
        lambda patch: None,
    ),
    "class weights cut over devices": (
        "jax",
        Program(function(weighted), None, NATIVE, with_weights),
        lambda patch: None,
    ),
}


@pytest.mark.parametrize("name", sampled(WRONG, 6))
def test_a_wrong_rewrite_is_found_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, program, plant = WRONG[name]
    if "over devices" in name and jax.local_device_count() == 1:
        pytest.skip("one device")
    plant(monkeypatch)
    proof = program.prove()
    assert proof.findings
    assert wanted in proof.blamed, (proof.blamed, proof.acted, [str(one) for one in proof.findings[:5]])
