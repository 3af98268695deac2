"""Units of a function at stage 3, on one rank: every way to write one gives the bits of stage 0."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax_models import leaves
from jax_sharded_models import wide_program

import polyaccel
from polyaccel.errors import CommError, ConfigError, PolyaccelError, ShardingError
from polyaccel.jax import scan_units, unit
from polyaccel.jax.program.stacking import repeated_blocks
from polyaccel.testkit.ranks.threads import run_threads

WIDTH, LAYERS = 8, 3
ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}


def config(stage, **changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **(ZERO if stage == 3 else {})},
        **changes,
    }


def weights():
    """Small enough for tanh not to saturate. There, gradients are what rounding leaves of zero, and Adam makes steps of
    any size of them: one unit in the last place moved a row by 6e-4, and a test of two programs failed by it."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    return {
        "bias": normal(WIDTH),
        "layers": [{"weight": 0.3 * normal(WIDTH, WIDTH), "scale": normal(WIDTH)} for _ in range(LAYERS)],
        "order": np.arange(WIDTH, dtype=np.int32),
    }


def stacked_weights():
    params = weights()
    return {**params, "layers": jax.tree.map(lambda *parts: np.stack(parts), *params["layers"])}


def block(layer, hidden):
    return jnp.tanh(hidden @ layer["weight"].T) * layer["scale"]


def simple(params, batch, rng):
    for layer in params["layers"]:
        batch = unit(block)(layer, batch)
    return jnp.square(batch + params["bias"]).mean()


def closing_over(params, batch, rng):
    """Blocks that close over traced values, another unit's output, and a parameter of the root."""
    shifted = batch + params["bias"]
    first = unit(lambda layer, x: block(layer, x) + shifted)(params["layers"][0], batch)
    second = unit(lambda layer, x: block(layer, x) * params["bias"] + first[::-1])(params["layers"][1], shifted)
    return jnp.square(second).mean() + params["layers"][2]["scale"].sum(), {"first": first}


def using_twice(params, batch, rng):
    """A parameter in two units, one in a unit and outside, and an integer one in a unit."""
    gather = unit(lambda order, x: x[:, order])
    batch = gather(params["order"], batch)
    for _ in range(2):
        batch = unit(block)(params["layers"][0], batch)
    batch = unit(block)({**params["layers"][1], "scale": params["bias"]}, batch)
    return jnp.square(batch + params["bias"]).mean() + params["layers"][2]["weight"].mean()


def recomputing(params, batch, rng):
    """Blocks with checkpoint, jit, random keys and other values than arrays inside; a unit in a unit."""

    def one(layer, x, key, act):
        drawn = jax.random.normal(key, x.shape) if key is not None else 0.0
        assert layer["kind"] == "wide"
        return jax.checkpoint(jax.jit(lambda x: unit(block)(layer["of"], x) + drawn))(act(x)), x.sum()

    for layer in params["layers"]:
        batch, total = unit(one)({"of": layer, "kind": "wide"}, batch, rng, jnp.sin)
    return jnp.square(batch).mean() + 0.1 * total


def scanning(params, batch, rng):
    """Layers that are scanned, with a part of another array for each and a sum that travels along."""
    shift = params["bias"]

    def one(layer, carry, x):
        hidden, total = carry
        hidden = block(layer, hidden) + x + shift
        return hidden, total + jnp.square(hidden).sum()

    extra = 0.1 * jnp.arange(LAYERS, dtype=jnp.float32)[:, None] * jnp.ones(WIDTH)
    hidden, total = scan_units(one, (batch, jnp.float32(0.0)), params["layers"], extra)
    return jnp.square(hidden).mean() + 0.01 * total


def scanning_and_using(params, batch, rng):
    """A stacked parameter that the function also uses by itself."""
    return scanning(params, batch, rng) + params["layers"]["scale"].mean()


def batch(step):
    return np.random.default_rng(step).standard_normal((2, WIDTH)).astype(np.float32)


def train(communicator, fn, params, config, steps=3):
    """(losses with that of an evaluation, parameters, auxiliary output)."""
    stacked = () if isinstance(params["layers"], list) else ("layers",)
    engine = polyaccel.initialize(model=fn, params=params, config=config, stacked=stacked)
    losses = [float(engine.train_batch(batch(step))) for step in range(steps)]
    losses.append(float(engine.eval_batch(batch(steps))))
    found = losses, leaves(engine.params), jax.tree.map(np.asarray, engine.aux)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("fn", "params"),
    [
        (simple, weights),
        (closing_over, weights),
        (using_twice, weights),
        (recomputing, weights),
        (scanning, stacked_weights),
        (scanning_and_using, stacked_weights),
    ],
)
def test_units_change_no_number(fn, params):
    (wanted, values, aux), (found, of_stage_3, aux_of_stage_3) = (
        run_threads(1, train, fn, params(), config(stage))[0] for stage in (0, 3)
    )
    assert found == pytest.approx(wanted, rel=1e-6)
    assert wanted[0] != wanted[1]
    for fqn, value in values.items():
        np.testing.assert_allclose(of_stage_3[fqn], value, rtol=1e-5, atol=1e-6, err_msg=fqn)
    jax.tree.map(np.testing.assert_allclose, aux_of_stage_3, aux)


def test_fp16_overflows_and_goes_on():
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
    wanted, found = (run_threads(1, train, simple, weights(), config(stage, **fp16), 8)[0][0] for stage in (0, 3))
    assert found == wanted
    assert found[0] != found[-2]


def with_engine(check, fn=simple, params=None, **arguments):
    def go(communicator):
        engine = polyaccel.initialize(model=fn, params=params or weights(), config=config(3), **arguments)
        check(engine)
        engine.destroy()

    run_threads(1, go)


def in_checkpoint(params, batch, rng):
    return jax.checkpoint(lambda layer: unit(block)(layer, batch).mean())(params["layers"][0])


def in_scan(params, batch, rng):
    return jax.lax.scan(lambda x, _: (unit(block)(params["layers"][0], x), None), batch, length=2)[0].mean()


@pytest.mark.parametrize("fn", [in_checkpoint, in_scan])
def test_a_unit_inside_a_transformation_is_refused(fn):
    def check(engine):
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(batch(0))
        assert "polyaccel.jax.scan_units" in str(caught.value)
        engine.zero_grad()

    with_engine(check, fn)


def test_layers_that_nobody_called_stacked_are_refused():
    def check(engine):
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(batch(0))
        assert caught.value.value == "layers.scale"
        engine.zero_grad()

    with_engine(check, scanning, stacked_weights())


@pytest.mark.parametrize("prefix", ["bias.x", "order.weight", ""])
def test_what_is_called_stacked_has_to_be(prefix):
    with pytest.raises(ShardingError) as caught:
        with_engine(None, stacked=[prefix])
    assert caught.value.value == prefix


def test_ranks_that_are_threads_are_refused():
    """They would wait for each other in XLA's threads for ever."""
    with pytest.raises(ConfigError) as caught:
        run_threads(2, lambda _: polyaccel.initialize(model=simple, params=weights(), config=config(3)))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("zero_optimization.stage", 3)]


def test_what_a_call_raises_is_raised_and_the_engine_goes_on():
    def check(engine):
        first = float(engine.eval_batch(batch(0)))
        hold = engine.zero.params.gathered.unshard

        def fail(*arguments, **named):
            raise CommError("the cable was pulled", hint="plug it in")

        engine.zero.params.gathered.unshard = fail
        with pytest.raises(CommError) as caught:
            engine.train_batch(batch(0))
        assert caught.value.message == "the cable was pulled"
        engine.zero.params.gathered.unshard = hold
        engine.zero_grad()
        assert float(engine.eval_batch(batch(0))) == first
        assert float(engine.train_batch(batch(0))) == pytest.approx(first, rel=1e-6)  # another program of the same loss

    with_engine(check)


def test_a_program_of_an_engine_that_is_gone_says_so():
    kept = []

    def check(engine):
        program = engine.program(batch(0))
        kept.append((program, engine._function._params.calls.token, jax.random.key(0)))

    with_engine(check)
    program, token, key = kept.pop()
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(program([], token, batch(0), key, np.float32(1.0)))


def test_a_function_without_units_is_told_once(caplog):
    def check(engine):
        engine.train_batch(batch(0))
        engine.eval_batch(batch(0))

    caplog.set_level(logging.WARNING, logger="polyaccel")
    with_engine(check, lambda params, batch, rng: (batch * params["layers"][0]["scale"]).mean())
    assert sum("has no units" in record.message for record in caplog.records) == 1


def test_checkpoints_know_stacked_parameters_by_their_own_name(tmp_path):
    def go(communicator, stage, folder=None):
        engine = polyaccel.initialize(
            model=scanning, params=stacked_weights(), config=config(stage), stacked=["layers"]
        )
        if folder is not None:
            engine.load_checkpoint(str(folder))
        losses = [float(engine.train_batch(batch(engine.global_steps))) for _ in range(2)]
        engine.save_checkpoint(str(tmp_path / f"of{stage}"))
        engine.destroy()
        return losses

    for saved, loaded in ((3, 0), (0, 3)):
        run_threads(1, go, saved)
        across = run_threads(1, go, loaded, tmp_path / f"of{saved}")[0]
        alike = run_threads(1, go, saved, tmp_path / f"of{saved}")[0]
        assert across == pytest.approx(alike, rel=1e-6)


def test_memory_of_a_program_is_that_of_two_units():
    unit_nbytes, with_units, without = run_threads(1, wide_program)[0]
    assert with_units < 2.5 * unit_nbytes
    assert without > 8 * unit_nbytes


def test_blocks_that_are_repeated_are_found():
    names = ["blocks.0.a", "blocks.1.a", "Dense_0.k", "Block_0.Dense_0.k", "Block_1.Dense_0.k", "head.0", "0"]
    found = repeated_blocks(names)
    assert found == {
        "blocks.0.a": "blocks.0",
        "blocks.1.a": "blocks.1",
        "Dense_0.k": "",
        "Block_0.Dense_0.k": "Block_0",
        "Block_1.Dense_0.k": "Block_1",
        "head.0": "",
        "0": "",
    }
