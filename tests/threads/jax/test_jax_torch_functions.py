"""A module of torch as a function of JAX: values and gradients under jit, and what is refused."""

from __future__ import annotations

from threading import Event, Thread

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polyaccel.errors import PolyaccelError

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from parity_models import drawn_from  # noqa: E402

from polyaccel.torch import as_jax  # noqa: E402


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def perceptron():
    with drawn_from(0):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def twin(params, x):
    return jnp.tanh(x @ params["0.weight"].T + params["0.bias"]) @ params["2.weight"].T + params["2.bias"]


def inputs():
    return jax.random.normal(jax.random.key(0), (5, 8))


def assert_near(found, wanted):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6), found, wanted)


def loss(fn):
    return lambda params, x: jnp.sin(fn(params, x)).sum()


def squared_gradient(fn):
    return lambda params, x: jnp.square(jax.grad(loss(fn), 1)(params, x)).sum()


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit])
def test_values_and_gradients_of_every_order(transform):
    fn = as_jax(perceptron())
    params, x = fn.params, inputs()
    assert_near(transform(fn)(params, x), twin(params, x))
    assert_near(transform(jax.grad(loss(fn), (0, 1)))(params, x), jax.grad(loss(twin), (0, 1))(params, x))
    if transform is jax.jit:
        found = transform(jax.grad(squared_gradient(fn), (0, 1)))(params, x)
        assert_near(found, jax.grad(squared_gradient(twin), (0, 1))(params, x))


def test_under_vmap():
    fn = as_jax(perceptron())
    many = jnp.stack([inputs(), 2 * inputs()])
    assert_near(jax.vmap(fn, (None, 0))(fn.params, many), jax.vmap(twin, (None, 0))(fn.params, many))


def test_bfloat16_and_numbers_of_tokens():
    embedding = as_jax(nn.Embedding(10, 4))
    params = jax.tree.map(lambda one: one.astype(jnp.bfloat16), embedding.params)
    ids = jnp.array([1, 2, 2])
    found = jax.jit(jax.grad(lambda params: embedding(params, ids).sum()))(params)["weight"]
    assert found.dtype == jnp.bfloat16
    assert found.sum(1).tolist() == [0, 4, 8, 0, 0, 0, 0, 0, 0, 0]


def test_gradients_of_complex_numbers_are_those_of_jax():
    fn = as_jax(Calls(lambda z: z * z * (1 + 2j) + z.conj()))
    z = jnp.array([1 + 2j, 0.3 - 1j])
    found = jax.grad(lambda z: jnp.square(jnp.abs(fn({}, z))).sum())(z)
    assert_near(found, jax.grad(lambda z: jnp.square(jnp.abs(z * z * (1 + 2j) + jnp.conj(z))).sum())(z))


def test_results_may_be_any_tree_and_constants_any_hashable():
    fn = as_jax(Calls(lambda x, scale: {"ids": x.argmax(-1), "y": x * scale}))
    x = inputs()
    result = jax.jit(lambda x: fn({}, x, scale=3))(x)
    assert result["ids"].tolist() == jnp.argmax(x, -1).tolist()
    assert float(jax.grad(lambda x: fn({}, x, scale=3)["y"].sum())(x).sum()) == 3 * x.size


def test_frozen_parameters_are_constants():
    module = perceptron()
    module[0].requires_grad_(False)
    fn = as_jax(module)
    assert set(fn.params) == {"2.weight", "2.bias"}
    whole = {name: jnp.array(value.detach().numpy()) for name, value in module.named_parameters()}
    assert_near(fn(fn.params, inputs()), twin(whole, inputs()))


def test_parameters_are_copies():
    module = perceptron()
    params = as_jax(module).params
    with torch.no_grad():
        module[2].bias.fill_(7)
    assert float(jnp.abs(params["2.bias"]).max()) < 7


def test_only_results_are_copied():
    fn = as_jax(perceptron())
    params, x = fn.params, inputs()
    before = fn.copies.copies
    jax.block_until_ready(fn(params, x))
    assert fn.copies.copies - before == 1


def test_a_key_decides_the_random_numbers_forward_and_backward():
    fn = as_jax(nn.Dropout(0.5))
    x = jnp.ones(64)
    state = torch.get_rng_state()
    result, pull = jax.vjp(lambda x: fn({}, x, rng=jax.random.key(3)), x)
    assert pull(x)[0].tolist() == result.tolist()
    assert set(result.tolist()) == {0, 2}
    assert fn({}, x, rng=jax.random.key(4)).tolist() != result.tolist()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.Dropout(0.5), "aten.bernoulli_.float"),
        (nn.BatchNorm1d(8, affine=False), "'num_batches_tracked'"),
        (nn.ReLU(inplace=True), "relu_"),
        (Calls(lambda x: 3), "int"),
        (Calls(lambda x: x.double()), "torch.float64"),
    ],
)
def test_modules_that_are_no_function_are_refused(module, named: str):
    with pytest.raises(PolyaccelError) as caught:
        jax.jit(as_jax(module))({}, inputs())
    assert named in str(caught.value)
    assert not any(buffer.any() for name, buffer in module.named_buffers() if name == "num_batches_tracked")


def test_calls_from_two_threads_have_their_own_parameters():
    """The second begins while the first is in the module, and lets it go on while itself is there, if it can."""
    first, second, never = Event(), Event(), Event()
    gates = []

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            if gates:
                here, there = gates.pop(0)
                here.set()
                there.wait(0.3)
            return x * self.weight

    fn, x = as_jax(Scale()), jnp.ones(4)
    assert fn({"weight": x}, x).tolist() == [1] * 4
    gates += [(first, second), (second, never)]
    found = {}
    threads = [
        Thread(target=lambda by=by: found.update({by: fn({"weight": by * x}, x).tolist()}), daemon=True)
        for by in (2, 3)
    ]
    threads[0].start()
    assert first.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert found == {2: [2] * 4, 3: [3] * 4}


def test_a_module_that_checkpoints_has_its_parameters_in_the_backward_too():
    plain = perceptron()
    checkpointed = Calls(lambda x: checkpoint(checkpointed.part, x, use_reentrant=False))
    checkpointed.part = plain
    fn, twin_of = as_jax(checkpointed), as_jax(plain)
    params = jax.tree.map(lambda one: 3 * one + 0.1, twin_of.params)
    found = jax.grad(loss(fn))({f"part.{name}": one for name, one in params.items()}, inputs())
    assert_near(found, {f"part.{name}": one for name, one in jax.grad(loss(twin_of))(params, inputs()).items()})


def test_other_parameters_are_refused():
    fn = as_jax(nn.Linear(8, 8))
    with pytest.raises(PolyaccelError) as caught:
        fn({"weight": jnp.ones((8, 8)), "other": jnp.ones(8)}, inputs())
    assert caught.value.value == ["bias", "other"]


def test_a_module_elsewhere_is_refused():
    with pytest.raises(PolyaccelError) as caught:
        as_jax(nn.Linear(2, 2, device="meta"))
    assert caught.value.value == "meta"
    assert "'weight'" in str(caught.value)


@pytest.mark.parametrize("change", ["mode", "shape"])
def test_a_module_that_became_another_is_noticed(change):
    sizes = [2]
    module = Calls(lambda x: x[: sizes[0]] * 2)
    compiled = jax.jit(as_jax(module))
    assert compiled({}, inputs()).shape == (2, 8)
    if change == "mode":
        module.eval()
    else:
        sizes[0] = 3
    named = "module.eval()" if change == "mode" else "(3, 8)"
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(compiled({}, inputs()))
    assert all(part in str(caught.value) for part in ("PolyaccelError", named))
