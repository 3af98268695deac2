"""Checkpoints across frameworks: a run that stopped in torch goes on in JAX, and back, at another number of ranks."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

import jax
from jax_models import jax_gpt, leaves, make_config, tokens, torch_gpt
from parity_models import drawn_from
from served_keeper import SECRET, Served

import polyaccel
from polyaccel.checkpoint.in_memory import replicas
from polyaccel.errors import CheckpointError
from polyaccel.jax import scan_units
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
from polyaccel.job.memory_server.start import can_keep
from polyaccel.testkit.ranks.threads import run_threads

STEPS, STOP = 6, 3


def micro_batches(step, ranks, world):
    """The same samples for any number of ranks: two micro-batches of two samples."""
    each = 2 // world
    return [tokens(step, ranks.rank * each + micro, 0) for micro in range(each)]


def run_torch(ranks, world, model, steps, load=None, save=None, name_map=None):
    engine, *_ = polyaccel.initialize(model=model, config=make_config(2, accumulation=2 // world))
    if load:
        engine.load_checkpoint(str(load), name_map=name_map)
    losses = []
    for step in steps:
        batches = [tuple(map(torch.from_numpy, batch)) for batch in micro_batches(step, ranks, world)]
        losses.append(float(engine.train_batch(iter(batches))))
    if save:
        engine.save_checkpoint(str(save), client_state={"from": "torch"})
    engine.destroy()
    return np.mean(losses[-1:]), {fqn: value.detach().double().numpy() for fqn, value in model.named_parameters()}


def run_jax(ranks, world, model, steps, load=None, save=None, name_map=None):
    fn, params = model
    engine = polyaccel.initialize(model=fn, params=params, config=make_config(1, accumulation=2 // world))
    state = engine.load_checkpoint(str(load), name_map=name_map)[1] if load else {}
    losses = [float(engine.train_batch(iter(micro_batches(step, ranks, world)))) for step in steps]
    if save:
        engine.save_checkpoint(str(save), client_state={**state, "then": "jax"})
    found = leaves(engine.params), engine.get_lr(), engine.global_steps, state
    engine.destroy()
    return np.mean(losses[-1:]), *found


def test_from_torch_to_jax_and_back(tmp_path):
    model = torch_gpt()
    _, whole = run_threads(1, run_torch, 1, model, range(STEPS))[0]
    models = [torch_gpt(), torch_gpt()]
    run_threads(2, lambda ranks: run_torch(ranks, 2, models[ranks.rank], range(2), save=tmp_path / "a"))
    _, _, lr, steps, state = run_threads(1, run_jax, 1, jax_gpt(), range(2, 4), tmp_path / "a", tmp_path / "b")[0]
    assert (steps, state) == (4, {"from": "torch"})
    assert lr == [pytest.approx(3e-3 * np.log(4) / np.log(8))]
    models = [torch_gpt(), torch_gpt()]
    runs = run_threads(2, lambda ranks: run_torch(ranks, 2, models[ranks.rank], range(4, STEPS), load=tmp_path / "b"))
    for fqn, value in runs[0][1].items():
        np.testing.assert_allclose(value, whole[fqn], atol=2e-5, err_msg=fqn)


def test_a_run_resumes_bitwise(tmp_path):
    model = jax_gpt()
    whole = run_threads(2, run_jax, 2, model, range(STEPS))[0]
    run_threads(2, run_jax, 2, model, range(STOP), None, tmp_path)
    resumed = run_threads(2, run_jax, 2, model, range(STOP, STEPS), tmp_path)[0]
    assert resumed[0] == whole[0]
    for fqn, value in resumed[1].items():
        np.testing.assert_array_equal(value, whole[1][fqn])


def flax_like():
    """The weights of `Net` in flax's layout, and a function that computes what it does."""
    with drawn_from(0):
        net = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 5), "second": torch.nn.Linear(5, 2)})
    params = {
        name: {"kernel": part.weight.detach().numpy().T.copy(), "bias": part.bias.detach().numpy().copy()}
        for name, part in net.items()
    }

    def fn(params, batch, rng):
        hidden = jax.numpy.tanh(batch @ params["first"]["kernel"] + params["first"]["bias"])
        return jax.numpy.square(hidden @ params["second"]["kernel"] + params["second"]["bias"]).mean()

    return net, fn, params


class Net(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.first, self.second = parts["first"], parts["second"]

    def forward(self, batch):
        return self.second(torch.tanh(self.first(batch))).square().mean()


@pytest.mark.parametrize(("saver", "name_map"), [("torch", "flax"), ("jax", "function"), ("torch", "patterns")])
def test_kernels_are_transposed_with_their_optimizer_states(tmp_path, saver, name_map):
    data = np.random.default_rng(0).standard_normal((2 * STEPS, 3), dtype=np.float32)
    config = make_config(2, zero={"reduce_bucket_size": 8})

    def names(fqn):
        there = {"kernel": "weight", "weight": "kernel"}
        prefix, leaf = fqn.rsplit(".", 1)
        return (f"{prefix}.{there[leaf]}", (1, 0)) if leaf in there else fqn

    def step_torch(engine, steps):
        return [float(engine.train_batch(iter([torch.from_numpy(data[2 * at : 2 * at + 2])]))) for at in steps]

    def step_jax(engine, steps):
        return [float(engine.train_batch(data[2 * at : 2 * at + 2])) for at in steps]

    def go(ranks, parts, fn, params):
        of_torch, *_ = polyaccel.initialize(model=Net(parts), config=config)
        of_jax = polyaccel.initialize(model=fn, params=params, config=config)
        first, second = (of_torch, of_jax) if saver == "torch" else (of_jax, of_torch)
        train = {of_torch: step_torch, of_jax: step_jax}
        train[first](first, range(STOP))
        first.save_checkpoint(str(tmp_path))
        expected = train[first](first, range(STOP, STEPS))
        with pytest.raises(CheckpointError) as caught:
            second.load_checkpoint(str(tmp_path))
        assert caught.value.value == (0, 1)
        patterns = {r"^(\w+)\.kernel$": (r"\1.weight", (1, 0))}
        second.load_checkpoint(str(tmp_path), name_map={"flax": "flax", "patterns": patterns}.get(name_map, names))
        assert train[second](second, range(STOP, STEPS)) == pytest.approx(expected, rel=1e-5)

    models = [flax_like() for _ in range(2)]
    run_threads(2, lambda ranks: go(ranks, *models[ranks.rank]))


def test_a_function_of_the_user_s_own_makes_the_parameters(tmp_path):
    """Stacked layers of separate ones, and more rows than were saved; what it gets wrong changes nothing."""
    start = np.random.default_rng(0).standard_normal((2, 4, 4), dtype=np.float32)

    def fn(params, batch, rng):
        hidden = scan_units(lambda layer, x: jax.numpy.tanh(x @ layer["w"]), batch, params["layers"])
        return jax.numpy.square(hidden @ params["out"]).mean()

    def stack(src, dst):
        dst["out"][:4] = src["out"]
        return {"layers": {"w": np.stack([src["w.0"], src["w.1"]])}, "out": dst["out"]}

    def go(ranks, stage):
        saver = polyaccel.initialize(
            model=lambda params, batch, rng: jax.numpy.square(batch @ params["w"][0] @ params["out"]).mean(),
            params={"w": list(start), "out": np.ones((4, 2), np.float32)},
            config=make_config(0),
        )
        saver.save_checkpoint(str(tmp_path), client_state={"epoch": 2})
        params = {"layers": {"w": np.zeros_like(start)}, "out": np.full((4, 3), 5.0, np.float32)}
        loader = polyaccel.initialize(model=fn, params=params, config=make_config(stage), stacked=["layers"])
        for wrong, named in ((lambda src, dst: None, "PyTreeDef(None)"), (lambda src, dst: {}["x"], "KeyError")):
            with pytest.raises(CheckpointError) as caught:
                loader.load_checkpoint(str(tmp_path), custom_load_fn=wrong)
            assert caught.value.value == (0,)
            assert all(part in str(caught.value) for part in ("custom_load_fn", named))
            assert (np.asarray(loader.params["out"]) == 5).all()

        def narrow(src, dst):
            return {**stack({**src, "out": 1.0}, dst), "out": src["out"]}

        with pytest.raises(CheckpointError) as caught:
            loader.load_checkpoint(str(tmp_path), custom_load_fn=narrow, load_optimizer_states=False)
        assert caught.value.value == (0,)
        assert "'out'" in str(caught.value)

        def widen(src, dst):
            dst["out"][:, :2] = src["out"]
            return {"layers": {"w": np.stack([src["w.0"], src["w.1"]])}, "out": dst["out"]}

        state = loader.load_checkpoint(str(tmp_path), custom_load_fn=widen, load_optimizer_states=False)[1]
        assert state == {"epoch": 2}
        np.testing.assert_array_equal(loader.params["layers"]["w"], start)
        np.testing.assert_array_equal(loader.params["out"], [[1, 1, 5]] * 4)
        loader.destroy()
        saver.destroy()

    for stage in (1, 3):
        run_threads(1, go, stage)


def test_stacked_layers_are_read_from_transposed_ones(tmp_path):
    start = np.random.default_rng(0).standard_normal((3, 4, 4), dtype=np.float32)

    def fn(params, batch, rng):
        return jax.numpy.square(
            scan_units(lambda layer, x: jax.numpy.tanh(x @ layer["w"]), batch, params["layers"])
        ).mean()

    def go(ranks):
        params = {"layers": {"w": start}}
        saver = polyaccel.initialize(model=fn, params=params, config=make_config(0))
        saver.save_checkpoint(str(tmp_path))
        params = {"layers": {"w": np.zeros_like(start)}}
        loader = polyaccel.initialize(model=fn, params=params, config=make_config(3), stacked=["layers"])
        loader.load_checkpoint(str(tmp_path), name_map=lambda fqn: (fqn, (0, 2, 1)))
        np.testing.assert_array_equal(loader.params["layers"]["w"], np.swapaxes(start, 1, 2))
        loader.destroy()
        saver.destroy()

    run_threads(1, go)


def test_unfinished_accumulation_is_not_saved(tmp_path):
    def go(ranks):
        fn, params = model
        engine = polyaccel.initialize(model=fn, params=params, config=make_config(0, accumulation=2))
        engine.grad_step(tokens(0, 0, 0))
        engine.step()
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(str(tmp_path))
        assert "engine.zero_grad()" in str(caught.value)

    model = jax_gpt()
    run_threads(1, go)


@pytest.mark.skipif(not can_keep(), reason="sockets and memory without names are Linux's")
@pytest.mark.parametrize("execution", ["views", "native"])
def test_a_start_goes_on_from_the_replica_of_the_one_before(execution, tmp_path, monkeypatch):
    """Out of the keeper's memory, bit by bit."""
    keeper = Served(f"replicas-{tmp_path}")
    monkeypatch.setenv(KEEPER_VARIABLE, keeper.name)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())

    def start(ranks, steps, is_restart=True):
        monkeypatch.setattr(replicas, "_engines", count())
        fn, params = jax_gpt()
        config = make_config(1, accumulation=2) | {"checkpoint": {"in_memory": True}, "jax": {"execution": execution}}
        engine = polyaccel.initialize(model=fn, params=params, config=config)
        if is_restart:
            engine.load_checkpoint(str(tmp_path))
        assert engine.global_steps == steps[0]
        losses = [float(engine.train_batch(iter(micro_batches(step, ranks, 1)))) for step in steps]
        found = losses, leaves(engine.params)
        engine.destroy()
        return found

    losses, whole = run_threads(1, start, range(STEPS), False)[0]
    client = keeper.connect()
    client.drop("")
    client.close()
    run_threads(1, start, range(STOP), False)
    run_threads(1, start, range(STOP, STOP + 1))
    resumed = run_threads(1, start, range(STOP + 1, STEPS))[0]
    assert resumed[0] == losses[STOP + 1 :]
    for fqn, value in resumed[1].items():
        np.testing.assert_array_equal(value, whole[fqn])
    keeper.close()
