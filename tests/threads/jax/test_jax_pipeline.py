"""A list of JAX functions over stages trains as on one rank: losses, norms, parameters, whatever the schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from pairwise import combinations

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.pipeline.table import PipelineError
from polyaccel.testkit.ranks.threads import run_threads

MICRO_BATCHES = 4
WIDTH = 6


def words(params, value, rng):
    """Gives an integer and a tree beside floating values."""
    hidden = params["words"][value["tokens"]]
    return {"hidden": hidden, "place": jnp.arange(hidden.shape[0]) + params["first"]}


def block(params, value, rng):
    hidden = jnp.tanh(value["hidden"] @ params["kernel"] + params["bias"]) + value["hidden"]
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape) / 0.9
    return {**value, "hidden": hidden}


def scaled(params, value, rng):
    return {**value, "hidden": value["hidden"] * 2}


def head(params, value, rng):
    given, labels = value
    found = given["hidden"].mean(1) @ params + 0.01 * given["place"][:, None]
    return jnp.square(found - labels).mean(), {"first": found[0, 0]}


LAYERS = [words, block, scaled, block, block, block, head]


def params_of_layers() -> list[Any]:
    draw = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    def of_block() -> dict[str, np.ndarray]:
        return {"kernel": normal(WIDTH, WIDTH) / 3, "bias": normal(WIDTH) / 9}

    first = {"words": normal(11, WIDTH), "first": np.int32(1)}
    return [first, of_block(), {}, *(of_block() for _ in range(3)), normal(WIDTH, 3)]


def micro_batch(step: int, micro: int, rank: int, length: int = 5) -> Any:
    draw = np.random.default_rng([step, micro, rank])
    tokens = draw.integers(0, 11, (2, length)).astype(np.int32)
    return {"tokens": tokens}, draw.normal(size=(2, 3)).astype(np.float32)


def config_of(stages: int, schedule: str = "1f1b", stage: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 60},
        "gradient_clipping": 0.5,
        "pipeline": {"stages": stages, "schedule": schedule} if stages > 1 else {},
        **changes,
    }


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    evaluated: float = 0.0


def trained(ranks: Any, config: dict[str, Any], stages: int, steps: range = range(2), load: Any = None) -> Run:
    """The figures of a rank, whose place among those of its stage says which data it has."""
    params = params_of_layers()
    engine = polyaccel.initialize(model=LAYERS, params=params, config=config, seed=5)
    place = ranks.rank % (ranks.world_size // stages)
    found = Run()
    if load is not None and steps[0]:
        engine.load_checkpoint(str(load))
    for step in steps:
        batches = [micro_batch(step, micro, place) for micro in range(MICRO_BATCHES)]
        found.losses.append(float(engine.train_batch(iter(batches))))
        found.norms.append(float(engine.get_global_grad_norm() or 0.0))
    whole = [micro_batch(9, micro, place) for micro in range(MICRO_BATCHES)]
    if stages > 1:
        found.evaluated = float(engine.eval_batch(iter(whole)))
    else:
        found.evaluated = float(np.mean([float(engine.eval_batch(one)) for one in whole]))
    if load is not None:
        engine.save_checkpoint(str(load))
    for index, tree in enumerate(engine.params):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found.params[f"{index}{jax.tree_util.keystr(path)}"] = np.array(leaf)
    engine.destroy()
    return found


@cache
def on_one_stage(data: int) -> list[Run]:
    return run_threads(data, trained, config_of(1), 1)


def assert_close(found: list[Run], expected: list[Run]) -> None:
    data = len(expected)
    merged: dict[str, np.ndarray] = {}
    for rank, run in enumerate(found):
        one = expected[rank % data]
        assert run.losses == pytest.approx(one.losses, rel=2e-6)
        assert run.norms == pytest.approx(one.norms, rel=1e-5)
        assert run.evaluated == pytest.approx(one.evaluated, rel=2e-6)
        merged |= run.params
    assert merged.keys() == expected[0].params.keys()
    for name, value in expected[0].params.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=5e-6, err_msg=name)


@combinations(
    stages=[2, 3],
    data=[1, 2],
    schedule=["1f1b", "zb-v", "gpipe", "zb-h1", "interleaved"],
    stage=[0, 1, 2],
)
def test_stages_train_what_one_rank_trains(stages, data, schedule, stage):
    found = run_threads(stages * data, trained, config_of(stages, schedule, stage), stages)
    assert_close(found, on_one_stage(data))


@pytest.mark.parametrize("after", [1, 3])
def test_a_checkpoint_of_two_stages_goes_on_with_others(after, tmp_path):
    run_threads(2, trained, config_of(2), 2, range(1), tmp_path)
    found = run_threads(after, trained, config_of(after), after, range(1, 2), tmp_path)
    whole = on_one_stage(1)[0]
    assert [run.losses for run in found] == [pytest.approx(whole.losses[1:], rel=2e-6)] * after
    merged = {name: value for run in found for name, value in run.params.items()}
    for name, value in whole.params.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=5e-6, err_msg=name)


def test_an_overflow_on_one_stage_is_skipped_by_all():
    """Gradients are too large for float16 times a first scale of 2 ** 16."""
    fp16 = {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}

    def run(ranks: Any) -> Any:
        config = config_of(ranks.world_size, fp16=fp16)
        engine = polyaccel.initialize(model=LAYERS, params=params_of_layers(), config=config)
        found = []
        for step in range(6):
            length = 4 if step == 5 else 5  # which stages must find out by themselves
            engine.train_batch(iter([micro_batch(step, micro, 0, length) for micro in range(MICRO_BATCHES)]))
            found.append((engine.get_loss_scale(), engine.was_step_applied()))
        engine.destroy()
        return found

    (one,) = run_threads(1, run)
    assert {applied for _, applied in one} == {True, False}
    assert run_threads(2, run) == [one, one]


def test_only_the_last_stage_has_the_auxiliary_output():
    def run(ranks: Any) -> Any:
        engine = polyaccel.initialize(model=LAYERS, params=params_of_layers(), config=config_of(2))
        inputs, labels = zip(*(micro_batch(0, micro, 0) for micro in range(MICRO_BATCHES)), strict=True)
        whole = {"tokens": np.concatenate([one["tokens"] for one in inputs])}, np.concatenate(labels)
        engine.train_batch(whole)  # cut into micro-batches
        assert [len(part) for part in engine.parts] == [3, 4]
        assert len(engine.task_times) == 2 * MICRO_BATCHES
        with pytest.raises(PolyaccelError) as caught:
            engine.grad_step(whole)
        assert "grad_step" in str(caught.value)
        found = engine.is_first_stage(), engine.is_last_stage(), engine.aux is not None
        engine.destroy()
        return found

    assert run_threads(2, run) == [(True, False, False), (False, True, True)]


TWO = {"stages": 2}


def narrow(params, value, rng):
    return {"hidden": value["hidden"][..., :4]}


@pytest.mark.parametrize(
    ("layers", "params", "changes", "error", "named"),
    [
        (LAYERS[:2], [{}], {}, PolyaccelError, "1"),
        ([words, 3], [{}, {}], {}, PolyaccelError, "'function'"),
        (head, {"a": np.ones(2)}, {}, ConfigError, "pipeline.stages"),
        (LAYERS, params_of_layers(), {"zero_optimization": {"stage": 3}}, ConfigError, "zero_optimization.stage"),
        (
            LAYERS,
            params_of_layers(),
            {"pipeline": {**TWO, "partition": "profiled"}},
            ConfigError,
            "pipeline.partition",
        ),
        (
            [words, *[scaled] * 3],
            [params_of_layers()[0], {}, {}, {}],
            {"pipeline": {**TWO, "partition": "uniform"}},
            PolyaccelError,
            "stage 1",
        ),
        (
            [words, narrow, block, head],
            [params_of_layers()[0], {}, *params_of_layers()[-2:]],
            {},
            PipelineError,
            "TypeError",
        ),
    ],
    ids=["counts", "no-function", "one-function", "stage-3", "profiled", "no-parameters", "misfit"],
)
def test_what_cannot_be_is_said(layers, params, changes, error, named: str):
    def run(ranks: Any) -> None:
        engine = polyaccel.initialize(model=layers, params=params, config=config_of(2, **changes))
        engine.train_batch(iter([micro_batch(0, micro, 0) for micro in range(MICRO_BATCHES)]))

    with pytest.raises(error) as caught:
        run_threads(2, run)
    assert named in str(caught.value)
