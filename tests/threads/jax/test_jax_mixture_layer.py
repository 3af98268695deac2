"""A layer of experts as a function of JAX, against the gates' formulas in JAX: values and gradients under jit."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from polyaccel.torch.experts import Mixture

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from parity_models import drawn_from  # noqa: E402

from polyaccel.torch import as_jax  # noqa: E402

WIDTH, EXPERTS, K = 6, 5, 2
SETTINGS = {
    "softmax": {"k": K, "z_weight": 0.01},
    "top 1": {"k": 1},
    "sigmoid": {"k": K, "gate": "sigmoid", "scale": 2.0, "balance_weight": 0.0},
    "expert choice": {"gate": "expert choice", "capacity_factor": 1.0, "min_capacity": 1, "balance_weight": 0.0},
}


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, WIDTH))


class Layer(nn.Module):
    """Output and loss of a mixture."""

    def __init__(self, **settings):
        super().__init__()
        self.mixture = Mixture(WIDTH, expert, EXPERTS, **settings)

    def forward(self, x):
        found = self.mixture(x)
        return found.output, found.loss


def twin(name):
    """Every expert on every token, times what the gate's formula gives it, mostly nothing."""
    settings = {"k": K, "balance_weight": 0.01, "z_weight": 0.0} | SETTINGS[name]

    def weighed(logits):
        scores = jax.nn.sigmoid(logits) if name == "sigmoid" else jax.nn.softmax(logits)
        by, count = (scores.T, logits.shape[0] // EXPERTS * K) if name == "expert choice" else (scores, settings["k"])
        chosen = jax.nn.one_hot(jax.lax.top_k(by, count)[1], by.shape[1]).sum(1)
        chosen = chosen.T if name == "expert choice" else chosen
        weights = scores * chosen
        if name != "expert choice" and settings["k"] > 1:
            weights = weights / weights.sum(1, keepdims=True) * settings.get("scale", 1.0)
        return weights, scores, chosen

    def fn(params, x):
        get = {key.removeprefix("mixture."): value for key, value in params.items()}
        logits = x @ get["router.weight"].T
        weights, scores, chosen = weighed(logits)
        inner = jax.nn.silu(jnp.einsum("tf,ehf->teh", x, get["experts.0_weight"]) + get["experts.0_bias"])
        outer = jnp.einsum("teh,efh->tef", inner, get["experts.2_weight"]) + get["experts.2_bias"]
        balance = EXPERTS * (chosen.mean(0) * scores.mean(0)).sum()
        z = jnp.square(jax.nn.logsumexp(logits, axis=1)).mean()
        loss = settings["balance_weight"] * balance + settings["z_weight"] * z
        return jnp.einsum("te,tef->tf", weights, outer), loss

    return fn


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mixture_in_jax_is_its_formula(name):
    with drawn_from(3):
        fn = as_jax(Layer(**SETTINGS[name]))
    x = jax.random.normal(jax.random.key(1), (20, WIDTH))

    def loss_of(layer):
        def loss(params, x):
            out, loss = layer(params, x)
            return jnp.sin(out).sum() + loss

        return jax.jit(jax.value_and_grad(loss, (0, 1)))

    found, wanted = loss_of(fn)(fn.params, x), loss_of(twin(name))(fn.params, x)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6), found, wanted)
