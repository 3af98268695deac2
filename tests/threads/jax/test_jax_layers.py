"""A function of JAX as a layer of torch: gradients, and what is refused."""

from __future__ import annotations

import copy
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polyaccel.errors import PolyaccelError, ShardingError

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_layer_models import TorchMlp, mlp  # noqa: E402
from parity_models import drawn_from  # noqa: E402

from polyaccel.jax import as_torch  # noqa: E402


def pair():
    """A layer of JAX and its twin of torch."""
    with drawn_from(0):
        twin = TorchMlp()
    params = {
        name: {key: jnp.array(value.detach().numpy()) for key, value in part.named_parameters()}
        for name, part in twin.named_children()
    }
    return as_torch(mlp, params), twin


def inputs(seed=0, rows=5):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def by_name(layer):
    """Its parameters in an order that does not depend on where they come from: JAX sorts the keys of a dict."""
    return [parameter for _, parameter in sorted(layer.named_parameters())]


def gradients(layer, x):
    return torch.autograd.grad(layer(x).sin().sum(), [x, *by_name(layer)])


def second_gradients(layer, x):
    (first,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), [x, *(one for one in by_name(layer) if one.dim() > 1)])


def assert_near(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)


def test_names_and_values_are_those_of_the_tree():
    layer, twin = pair()
    wanted = twin.state_dict()
    assert dict(layer.state_dict()).keys() == wanted.keys()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, wanted[name])
    mixed = as_torch(lambda params, x: x, {"a": [jnp.ones(2), np.int32(3)]})
    assert list(dict(mixed.named_parameters())) == ["a.0"]
    assert mixed.state_dict()["a.1"] == 3


def test_a_layer_has_memory_of_its_own():
    given = {"w": jnp.ones(16)}
    layer = as_torch(lambda params, x: params["w"] * x, given)
    with torch.no_grad():
        layer.w.zero_()
    assert float(given["w"].sum()) == 16
    assert layer(torch.ones(())).sum() == 0


def test_gradients_of_every_order_are_those_of_torch():
    layer, twin = pair()
    x = inputs()
    assert_near([layer(x)], [twin(x)])
    assert_near(gradients(layer, x), gradients(twin, x))
    assert_near(second_gradients(layer, x), second_gradients(twin, x))


def test_gradients_of_complex_numbers_are_those_of_torch():
    layer = as_torch(lambda params, z: params * z * z + jnp.conj(z), jnp.array(1 + 2j))
    z = torch.tensor([1 + 2j, 0.3 - 1j], requires_grad=True)
    plain = layer.params * z * z + z.conj()
    wanted = torch.autograd.grad(plain.abs().square().sum(), [z, layer.params])
    assert_near(torch.autograd.grad(layer(z).abs().square().sum(), [z, layer.params]), wanted)


def test_what_needs_no_gradient_gets_none():
    layer, _ = pair()
    layer.requires_grad_(False)
    layer.wide.bias.requires_grad_(True)
    layer(inputs().detach()).sum().backward()
    assert [name for name, one in layer.named_parameters() if one.grad is not None] == ["wide.bias"]
    with torch.no_grad():
        assert not layer(inputs()).requires_grad


def test_results_may_be_any_tree_and_only_some_be_used():
    layer = as_torch(lambda w, x, scale, *, deep: {"y": x * w, "ids": jnp.argmax(x), "n": None, "z": (x * scale,)}, 2.0)
    x = inputs()
    result = layer(x, 3, deep="constant")
    assert result["n"] is None
    assert not result["ids"].is_floating_point()
    assert not result["ids"].requires_grad
    (found,) = torch.autograd.grad(result["z"][0].sum(), x)
    assert torch.equal(found, torch.full_like(x, 3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    layer, twin = pair()
    x = inputs()
    checkpoint(layer, x, use_reentrant=reentrant).sin().sum().backward()
    assert_near([x.grad, *(one.grad for one in by_name(layer))], gradients(twin, x))


def test_threads_share_a_layer():
    layer, twin = pair()
    xs = [inputs(seed, rows=3 + seed % 2) for seed in range(4)]
    found = [None] * len(xs)

    def work(index):
        for _ in range(10):
            found[index] = gradients(layer, xs[index])

    threads = [Thread(target=work, args=(index,), daemon=True) for index in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for grads, x in zip(found, xs, strict=True):
        assert_near(grads, gradients(twin, x))


def test_nothing_is_copied_but_what_has_to_be():
    layer, _ = pair()
    x = torch.ones(4, 8)
    layer(x)
    assert str(layer.copies) == "zero-copy 6/6"  # four parameters, the input, the output
    layer(torch.ones(8, 4).t())
    assert (layer.copies.views, layer.copies.copies) == (11, 1)


def test_a_result_that_is_an_input_is_memory_of_its_own():
    layer = as_torch(lambda w, x: (w, x, x), jnp.ones(16))
    x = torch.ones(16)
    results = layer(x)
    assert len({one.data_ptr() for one in (layer.params, x, *results)}) == 5


def test_a_weight_changed_before_the_backward_is_noticed():
    layer, _ = pair()
    loss = layer(inputs()).sum()
    with torch.no_grad():
        layer.narrow.weight.zero_()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert "inplace" in str(caught.value)


def test_a_copy_is_independent():
    layer, _ = pair()
    other = copy.deepcopy(layer)
    x = inputs()
    assert torch.equal(other(x), layer(x))
    with torch.no_grad():
        other.narrow.bias.add_(1)
    assert not torch.equal(other(x), layer(x))
    assert other.copies.views == 12


def test_empty_inputs_and_token_numbers():
    embedding = as_torch(lambda table, ids: table[ids], np.eye(4, dtype=np.float32))
    assert embedding(torch.tensor([2, 3])).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert embedding(torch.empty(0, dtype=torch.int64)).shape == (0, 4)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (torch.tensor([2**40]), "1099511627776"),
        (torch.ones(2, dtype=torch.float64), "torch.float64"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "meta"),
        (np.ones(2), "ndarray"),
    ],
)
def test_what_jax_cannot_take_is_refused(given, named):
    with pytest.raises(PolyaccelError) as caught:
        as_torch(lambda w, x: x, 1.0)(given)
    assert named in str(caught.value)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda fn: torch.func.grad(lambda x: fn(x).sum())])
def test_transforms_of_torch_are_refused(transform):
    layer, _ = pair()
    with pytest.raises(PolyaccelError) as caught:
        transform(layer)(torch.ones(3, 8))
    assert "torch.func" in str(caught.value)


@pytest.mark.parametrize("wrapped", [lambda fn: fn, jax.jit])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_a_function_that_closed_over_its_parameters_is_refused(kind, wrapped):
    """It would compute with the values of the start for good."""
    given = {"a": kind(np.ones(64, np.float32)), "b": kind(np.ones(64, np.float32))}
    layer = as_torch(wrapped(lambda params, x: params["a"] * given["b"] * x), given)
    with pytest.raises(ShardingError) as caught:
        layer(torch.ones(()))
    assert caught.value.value == "b"


def test_a_function_that_closed_over_the_memory_of_a_parameter_is_refused():
    """An update would change a constant of the program."""
    held = [jnp.ones(64)]
    layer = as_torch(lambda w, x: w * x * held[0], jnp.ones(64))
    assert layer(torch.ones(())).tolist() == [1] * 64
    held[0] = jax.dlpack.from_dlpack(layer.params.detach())
    with pytest.raises(ShardingError) as caught:
        layer(torch.ones(64))
    assert caught.value.value == "params"


def test_a_compiled_model_runs_its_layers_of_jax_as_they_are():
    layer, _ = pair()
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
    x = inputs()
    wanted = gradients(model, x)
    with pytest.raises(Exception) as caught:
        torch.compile(model, backend="eager", fullgraph=True)(x)
    assert "JAX" in str(caught.value)
    torch._dynamo.reset()
    assert_near(gradients(torch.compile(model, backend="eager"), x), wanted)
    assert_near([torch.compile(layer, backend="eager")(x)], [layer(x)])


def test_names_that_a_module_cannot_have_are_refused():
    with pytest.raises(PolyaccelError) as caught:
        as_torch(lambda params: 0, {"type": jnp.ones(2)})
    assert caught.value.value == "type"
    with pytest.raises(ShardingError) as caught:
        as_torch(lambda params: 0, {"a": "text"})
    assert caught.value.value == "str"
    assert "'a'" in str(caught.value)


def test_layers_of_one_function_are_compiled_once():
    calls = []

    def traced(params, x):
        calls.append(1)
        return params * x

    layers = [as_torch(traced, jnp.full(16, float(index))) for index in range(3)]
    assert [layer(torch.ones(16))[0].item() for layer in layers] == [0, 1, 2]
    assert len(calls) == 1
