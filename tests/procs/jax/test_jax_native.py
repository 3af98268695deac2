"""Native mode trains as views mode does: several devices in one process, and several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax_aux
import jax_surgery as surgery
import native_jax_model as model
from jax_models import make_config, torch_gpt, train_torch

import polyaccel
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.errors import CommError, ConfigError, PolyaccelError, ShardingError
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.threads import run_threads

pytestmark = pytest.mark.timeout(300)  # programs to compile, on a machine that may be slow and busy
PATIENCE_S = 240.0
JOB = Path(__file__).parents[2] / "support" / "jobs" / "native_job.py"
DEVICES = {"one device": 1, "two processes": 1, "three devices": 3, "two by two": 2}
"""Of each process."""
PROCESSES = {"one device": 1, "two processes": 2, "three devices": 1, "two by two": 2}
CASES = [
    ("one device", 1, 3, {}),
    ("three devices", 2, 2, {"prescale_gradients": True, "gradient_clipping": 0.0}),
    ("two processes", 0, 2, {"gradient_allreduce_op": "sum"}),
    ("two processes", 2, 1, {}),
    ("two by two", 2, 3, {}),
    ("two processes", 3, 2, {"gradient_allreduce_op": "sum"}),
    ("three devices", 3, 1, {}),
]
"""(devices and processes, stage, accumulation, changes of the config)"""
GPT_CASES = [
    ("two processes", 1, 2),
    ("three devices", 2, 1),
    ("two by two", 3, 1),
]
"""As CASES. A third micro-batch would be a third large program to compile; CASES have one."""
OPTIMIZERS = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adagrad": {"lr": 1e-2, "weight_decay": 0.01},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
}


@pytest.fixture(scope="module")
def at():
    """`at(world, function, *arguments)`: each process's `function(communicator, *arguments)`."""
    pools = {}

    def run(world, function, *arguments):
        if world == "one device":
            return run_threads(1, function, *arguments, timeout_s=PATIENCE_S)
        if world not in pools:
            flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES[world]}"
            pools[world] = RankPool(PROCESSES[world], comm_timeout_s=PATIENCE_S, environ={"XLA_FLAGS": flags})
        return pools[world].run(function, *arguments, timeout_s=PATIENCE_S)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture
def native(at):
    """`native(world, *arguments of model.train)`: each process's result."""

    def run(world, *arguments, train=model.train, **named):
        return at(world, train_here, train, arguments, {"devices": DEVICES[world], **named})

    return run


def train_here(communicator, train, arguments, named):
    return train(communicator, *arguments, **named)


def of_processes(world, losses):
    """The losses of all ranks as means over the ranks of each process."""
    return np.mean(np.reshape(losses, (PROCESSES[world], DEVICES[world], -1)), axis=1)


def views(world, config, *arguments, **named):
    """Losses of each process, norms, parameters and skipped steps in views mode, at stage 2 in place of 3."""
    count = PROCESSES[world] * DEVICES[world]
    stage = min(config["zero_optimization"]["stage"], 2)
    arguments = ({**config, "zero_optimization": {**config["zero_optimization"], "stage": stage}}, *arguments)
    runs = run_threads(count, lambda ranks: model.train(ranks, *arguments, **named), timeout_s=PATIENCE_S)
    return of_processes(world, [run[0] for run in runs]), *runs[0][1:]


def check(found, expected, rel=1e-6, atol=2e-6):
    """Losses to `rel`, as the norms but for the last digits of float32 sums, parameters to `atol`."""
    losses, norms, params, skipped = expected
    for own, wanted in zip(found, losses, strict=True):
        assert own[0] == pytest.approx(list(wanted), rel=rel)
        assert own[1] == pytest.approx(norms, rel=10 * rel)
        assert own[3] == skipped
        for fqn, value in own[2].items():
            np.testing.assert_allclose(value, params[fqn], rtol=0, atol=atol, err_msg=fqn)
    assert found[0][0][-1] < 0.9 * found[0][0][0]


@pytest.mark.parametrize(("world", "stage", "accumulation", "changes"), CASES)
def test_as_in_views_mode(native, world, stage, accumulation, changes):
    expected = views(world, model.make_config(stage, accumulation, **changes))
    check(native(world, model.make_config(stage, accumulation, native=True, **changes)), expected)


@pytest.mark.parametrize(("world", "stage"), [("two processes", 2), ("three devices", 0), ("two by two", 3)])
def test_sam_equals_plain_jax(at, world, stage):
    native = {"jax": {"execution": "native"}}
    runs = at(world, surgery.train, stage, "sam", 2, native, DEVICES[world])
    surgery.check_sam(runs, PROCESSES[world] * DEVICES[world], 2)


def test_auxiliary_outputs_are_averaged_over_devices(at):
    jax_aux.check(at("two by two", jax_aux.train, {"execution": "native"}, 2), 4)


@pytest.mark.parametrize(("world", "stage", "accumulation"), GPT_CASES)
def test_as_torch(native, world, stage, accumulation):
    """The example's GPT from the same weights."""
    config, of_torch = (make_config(of, accumulation=accumulation) for of in (stage, min(stage, 2)))
    count = PROCESSES[world] * DEVICES[world]
    models = [torch_gpt() for _ in range(count)]
    runs = run_threads(
        count, lambda ranks: train_torch(ranks, models[ranks.rank], of_torch, 2 * model.STEPS), timeout_s=PATIENCE_S
    )
    found = native(world, {**config, "jax": {"execution": "native"}}, train=model.train_gpt)
    for own, losses in zip(found, of_processes(world, [run.losses for run in runs]), strict=True):
        assert own[0] == pytest.approx(list(losses), rel=1e-5)
        assert own[1] == pytest.approx(runs[0].norms, rel=1e-4)
        for fqn, value in own[2].items():
            np.testing.assert_allclose(value, runs[0].params[fqn], atol=2e-4, err_msg=fqn)


@pytest.mark.parametrize(
    ("name", "stage", "world"),
    [*((name, 2, "three devices") for name in OPTIMIZERS), ("Lamb", 0, "one device"), ("Lamb", 3, "three devices")],
)
def test_every_optimizer(native, name, stage, world):
    changes = {"optimizer": {"type": name, "params": OPTIMIZERS[name]}, "scheduler": None}
    expected = views(world, model.make_config(stage, **changes))
    # Lion's and LAMB's steps turn on signs and ratios of what is nearly zero.
    check(native(world, model.make_config(stage, native=True, **changes)), expected, rel=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stage", "world"),
    [
        ("adam", 2, "three devices"),
        ("momentum", 0, "two processes"),
        ("masked", 0, "one device"),
        ("masked", 2, "two processes"),
        ("partition", 1, "three devices"),
        ("partition", 0, "one device"),
        ("partition", 3, "three devices"),
        ("lamb", 2, "two processes"),
        ("lamb", 3, "three devices"),
    ],
)
def test_a_transformation_of_optax(native, name, stage, world):
    pytest.importorskip("optax")
    expected = views(world, model.make_config(stage, 2, scheduler=None), optax_name=name)
    found = native(world, model.make_config(stage, 2, native=True, scheduler=None), optax_name=name)
    check(found, expected, rel=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world", "stage"), [("three devices", 1), ("two processes", 2), ("three devices", 3)])
def test_bf16_with_precise_masters(native, world, stage):
    changes = {"bf16": {"enabled": True}}
    expected = views(world, model.make_config(stage, 2, **changes))
    check(native(world, model.make_config(stage, 2, native=True, **changes)), expected, rel=1e-2, atol=2e-2)


@pytest.mark.parametrize("stage", [2, 3])
def test_fp16_skips_overflows(native, stage):
    """A scale at which the first gradients overflow: both modes skip the same steps."""
    changes = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    expected = views("three devices", model.make_config(2, 2, **changes), range(16))
    found = native("three devices", model.make_config(stage, 2, native=True, **changes), range(16))
    assert 0 < expected[3] < 16
    assert found[0][3] == expected[3]
    assert found[0][0] == pytest.approx(list(expected[0][0]), rel=1e-3)
    assert found[0][1] == pytest.approx(expected[1], rel=1e-2, nan_ok=True)


def pieces_here(communicator, stage):
    """`grad_step` and `step` beside `train_batch`; a culprit; auxiliary output; evaluation."""
    config = model.make_config(stage, 2, native=True)
    batches = []
    for micro in (0, 1):
        parts = [model.samples(0, micro, rank) for rank in range(3)]
        batches.append(tuple(np.concatenate(part) for part in zip(*parts, strict=True)))
    whole, parts = model.start(config), model.start(config)
    loss = whole.train_batch(iter(batches))
    losses = []
    for batch in batches:
        losses.append(parts.grad_step(batch))
        parts.step()
    np.testing.assert_allclose(np.mean(losses), loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(parts.aux["x"], batches[1][0][[0, 2, 4]])
    evaluated = model.loss(parts.params, batches[0], None)[0]
    np.testing.assert_allclose(parts.eval_batch(batches[0]), evaluated, rtol=1e-6)
    assert parts.program(batches[0]).memory_analysis().argument_size_in_bytes > 0

    spoilt = model.start(model.make_config(max(stage, 2), native=True, fp16={"enabled": True}))
    x, y = batches[0]
    before = jax.tree.map(np.array, spoilt.params)
    spoilt.grad_step((np.where(np.arange(6)[:, None] == 5, np.inf, x).astype(np.float32), y))
    spoilt.step()
    assert not spoilt.was_step_applied()
    assert spoilt._result.first_nonfinite_param is not None
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(spoilt.params), strict=True):
        np.testing.assert_array_equal(one, other)

    with pytest.raises(PolyaccelError) as caught:
        parts.grad_step((x[:5], y[:5]))
    assert caught.value.value == 5
    captured = jax.numpy.asarray(model.initial_params()["first"]["weight"])
    bad = polyaccel.initialize(
        model=lambda params, batch, rng: (batch[0] @ captured).sum() * params["w"].sum(),
        params={"w": captured},
        config=config,
    )
    with pytest.raises(ShardingError) as caught:
        bad.grad_step(batches[0])
    assert caught.value.value == "w"
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_a_step(at, stage):
    assert at("three devices", pieces_here, stage) == [True]


def global_batch(communicator):
    """A batch on the devices of all processes, of which this one has a part."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x, y = samples = model.samples(0, 0, communicator.rank)
    engine = model.start(model.make_config(2, native=True))
    with pytest.raises(PolyaccelError) as caught:
        engine.train_batch((jax.make_array_from_process_local_data(place, x), y))
    engine.train_batch(samples)
    return caught.value.value


def test_a_batch_of_all_processes_is_refused(at):
    assert at("two processes", global_batch) == ["batch[0]"] * 2


def resume_after_failure(communicator, folder, stage, name):
    """An update that fails loses what it was lent; a checkpoint brings it back."""
    engine = model.start(model.make_config(stage, native=True, scheduler=None), optax_name=name)
    batch = model.samples(0, 0, 0)
    engine.train_batch(batch)
    engine.save_checkpoint(folder)
    kept = jax.tree.map(np.array, engine.params)
    update = engine._program.step

    def fail(*arguments):
        update(*arguments)
        raise RuntimeError("in the middle")

    engine._program.step = fail
    with pytest.raises(RuntimeError) as caught:
        engine.train_batch(batch)
    assert str(caught.value) == "in the middle"
    engine._program.step = update
    for use in (lambda: engine.train_batch(batch), lambda: engine.params, lambda: engine.save_checkpoint(folder)):
        with pytest.raises(PolyaccelError) as caught:
            use()
        assert type(caught.value) is PolyaccelError
    engine.load_checkpoint(folder)
    for one, other in zip(jax.tree.leaves(engine.params), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(one, other)
    engine.train_batch(batch)
    return True


@pytest.mark.parametrize(("stage", "name"), [(2, None), (3, "lamb")])
def test_a_failed_update_is_not_trained_on(tmp_path, stage, name):
    assert run_threads(1, resume_after_failure, str(tmp_path), stage, name, timeout_s=PATIENCE_S) == [True]


@pytest.mark.parametrize("optax_name", [None, "adam", "lamb"])
def test_checkpoints_go_between_modes_and_worlds(at, tmp_path, optax_name):
    """Each leg takes up what the one before saved; together they are one run."""
    stages = {"views": 2, "three devices": 0 if optax_name == "adam" else 3, "two processes": 2, "one device": 1}
    changes = {} if optax_name is None else {"scheduler": None}
    if optax_name is not None:
        pytest.importorskip("optax")

    def go(place, steps, load=None, save=None):
        config = model.make_config(stages[place], native=place != "views", **changes)
        arguments = (config, steps, PROCESSES.get(place, 3), load, save, optax_name)
        if place == "views":
            return run_threads(3, model.train_whole_batches, *arguments, timeout_s=PATIENCE_S)[0]
        return at(place, model.train_whole_batches, *arguments)[0]

    whole = go("views", range(8))
    folder = None
    for leg, place in enumerate(["views", "three devices", "two processes", "one device", "views"]):
        save = str(tmp_path / str(leg))
        params = go(place, range(2 * leg, 2 * leg + 2) if leg < 4 else range(8, 8), folder, save)
        folder = save
    for fqn, value in params.items():
        np.testing.assert_allclose(value, whole[fqn], rtol=0, atol=5e-6, err_msg=fqn)


@pytest.mark.parametrize(
    ("world", "stage", "kind"),
    [("three devices", 2, "bf16"), ("two processes", 1, "fp16"), ("three devices", 3, "bf16")],
)
def test_stochastic_rounding_has_the_bits_of_views_mode(at, tmp_path, world, stage, kind):
    """Whoever has the same master weights has the same parameters."""
    first, second, third, last = (str(tmp_path / str(at)) for at in range(4))

    def config(**named):
        return {
            **model.make_config(stage, native=named.pop("native", False), scheduler=None),
            kind: {"enabled": True, "stochastic_rounding": True, **named},
        }

    scale = {"loss_scale": 8} if kind == "fp16" else {}
    start = run_threads(1, model.round_weights, config(**scale), None, first)[0][1]
    found = at(world, model.round_weights, config(native=True, **scale), first, second, True)
    for loaded, trained in found:
        for one, other in zip([*loaded, *trained], [*start, *found[0][1]], strict=True):
            np.testing.assert_array_equal(one, other)
    again = run_threads(1, model.round_weights, config(**scale), second, third)[0][0]
    nearest = run_threads(1, model.round_weights, config(**scale, stochastic_rounding=False), second, last)[0][0]
    for one, other, near in zip(again, found[0][1], nearest, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.size < 40 or np.any(one != near)


def late_here(communicator):
    jax.numpy.zeros(1).block_until_ready()
    with pytest.raises(CommError) as caught:
        model.start(model.make_config(2, native=True))
    assert caught.value.value == [True, True]
    assert all(part in str(caught.value) for part in ("JAX", "ranks [0, 1]"))
    return True


def test_processes_that_meet_too_late_are_told_so():
    with RankPool(2, comm_timeout_s=PATIENCE_S) as pool:
        assert pool.run(late_here, timeout_s=PATIENCE_S) == [True, True]


def test_ranks_of_the_launcher_meet(tmp_path):
    """The service of JAX beside the launcher's own port, and arrays of JAX made after the meeting."""
    command = [
        sys.executable,
        "-m",
        "polyaccel",
        "run",
        "--nproc",
        "2",
        str(Path(__file__).parents[2] / "support" / "jobs" / "native_job.py"),
    ]
    job = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert job.returncode == 0, job.stdout + job.stderr
    assert all(f"trained: rank {rank} of 2" in job.stdout for rank in range(2)), job.stdout


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"comms_logger": {"enabled": True}}, "comms_logger.enabled"),
    ],
)
def test_what_native_mode_has_not(changes, key):
    def go(ranks):
        set_thread_communicator(RecordingCommunicator(ranks, watch_s=None))  # as init_distributed makes it
        with pytest.raises(ConfigError) as caught:
            model.start({**model.make_config(1, native=True), **changes})
        assert key in str(caught.value)

    run_threads(1, go)
